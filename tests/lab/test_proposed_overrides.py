"""The overrides that doctor proposes: all modules that need FP32, or FP32 itself where nothing less helps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mptrain.config.compose import compose
from mptrain.lab.doctor.check import check_scaling
from tests import faulty_networks

WHOLE = ("model._target_=tests.faulty_networks.cancelling_whole", "dataset.image_size=8", "~model.widths")


def check(*words):
    more = ("extensions.allow=[tests.faulty_networks]", "train.batch_size=16", "dataset.train_samples=64")
    return check_scaling(compose((*words, *more)), lambda _: None)


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic", "bf16"])
def test_fp32_is_proposed_where_no_other_override_helps(precision):
    (found,) = check(*WHOLE, f"precision={precision}").findings
    assert (found.kind, found.where) == ("output", ("whole",))
    assert found.hint.endswith(", or set precision=fp32")


def test_it_is_not_where_fp32_has_the_problem_too():
    report = check(*faulty_networks.with_fault("cancels_in_fp32"), "precision=fp16_dynamic")
    assert [one.kind for one in report.findings] == ["fp32"]
    assert "precision=fp32" not in report.findings[0].hint


class Determinant(nn.Module):
    """Adds the logarithm of the product of positive numbers, which are larger by a start."""

    def __init__(self, start):
        super().__init__()
        self.start = start

    def forward(self, given):
        stretch = F.softplus(given * 0.01 + self.start)
        product = stretch[:, 0]
        for at in range(1, stretch.shape[1]):
            product = product * stretch[:, at]
        return given + product.log()[:, None] / 32


class Doubles(nn.Module):
    """Close to the largest number too, but of another class."""

    def forward(self, given):
        return given + (given * 0 + 30000) * torch.tensor(2.0**-15, dtype=given.dtype)


@pytest.mark.long
@pytest.mark.parametrize(("start", "also"), [(1.09, True), (0.5, False)])
def test_modules_of_the_same_class_that_will_overflow_next_are_proposed_too(start, also, examined):
    make = lambda: nn.Sequential(Determinant(start), Doubles(), Determinant(2.0))  # noqa: E731
    (found,) = examined(make, "dataset.train_samples=64").findings
    assert found.where == ("odd.2",)
    assert found.hint.endswith("odd.2,odd.0]" if also else "LocalResponseNorm,odd.2]")
