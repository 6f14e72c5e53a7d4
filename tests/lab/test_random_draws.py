"""Random numbers that do not depend on the dtype in which a model draws them."""

import pytest
import torch
from torch.nn import functional as F

from mptrain.lab.step.observation import SameDraws


def drawn(how, dtype):
    torch.manual_seed(3)
    like = torch.ones(4, 33, dtype=dtype)
    with SameDraws():
        return how(like)


@pytest.mark.parametrize(
    "how",
    [
        torch.randn_like,
        torch.rand_like,
        lambda like: torch.randn(4, 33, dtype=like.dtype),
        lambda like: torch.empty_like(like).normal_(1, 2),
        lambda like: torch.empty_like(like).uniform_(-1, 1),
        lambda like: like.new_empty(4, 33).bernoulli_(0.5),
        lambda like: torch.bernoulli(like * 0.25),
        lambda like: torch.empty_like(like).exponential_(),
        lambda like: torch.normal(like, 0.5),
        lambda like: F.dropout(like, 0.5),
        lambda like: torch.zeros(66, 33, dtype=like.dtype)[::2][:4].normal_(),  # a view
    ],
)
def test_draws_are_those_of_fp32_rounded(how):
    right = drawn(how, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        found = drawn(how, dtype)
        assert found.dtype == dtype
        assert torch.equal(found, right.to(dtype)) or torch.allclose(
            found.double(), right.double(), rtol=0.02, atol=0.01
        ), dtype


def test_draws_that_have_no_dtype_stay():
    assert torch.equal(
        drawn(lambda like: torch.randperm(9), torch.float16), drawn(lambda like: torch.randperm(9), torch.float64)
    )
    assert drawn(lambda like: torch.multinomial(like[0], 5), torch.float16).dtype == torch.int64
