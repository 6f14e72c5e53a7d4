"""The multi-tensor kernels on a CUDA device: torch's numbers within their bound, one launch, nothing waited for."""

from __future__ import annotations

import math
import os
import shutil

import pytest
import torch
from optimizer.exact_updates import exact, random_case
from optimizer.kinds import RULES

from mptrain.optimizer.multi_tensor import MultiTensorNorms, MultiTensorUpdate, obstacle
from mptrain.optimizer.rules import SGD, UpdateInputs

COMPILER = any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang"))))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not COMPILER, reason="Triton needs a C compiler (CC, gcc or clang)"),
]

BOUND = 2.0**-21
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else None


def moved(taken):
    return UpdateInputs(*(value.to(DEVICE) for value in taken))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernels_run_here(rule):
    assert obstacle(DEVICE, rule) == ""


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_one_update_is_the_formula_within_the_bound(start):
    for seed in range(start, start + 50):
        rule, decay, weight, state, grad, taken, half = random_case(seed)
        expected = exact(rule, decay, weight, state, grad, taken)
        ours, moments = weight.to(DEVICE), {key: value.to(DEVICE) for key, value in state.items()}
        published = None if half is None else torch.full_like(ours, math.nan, dtype=half)
        lists = {key: [value] for key, value in moments.items()}
        MultiTensorUpdate(rule, [ours], lists, [decay], [published])([grad.to(DEVICE)], moved(taken))
        for key, mine in {"weight": ours, **moments}.items():
            value, size = expected[key]
            assert ((mine.cpu() - value).abs() <= BOUND * size + 2.0**-148).all(), (seed, key)
        if half is not None:
            rounded = ours.to(half)
            rounded = rounded.clamp(-65504, 65504) if half == torch.float16 else rounded
            assert torch.equal(published.view(torch.int16), rounded.view(torch.int16)), seed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_name_what_is_not_finite_and_hold_what_fp32_cannot(dtype):
    large = 6e4 if dtype == torch.float16 else 1e30
    values = [torch.full((100_003,), large), torch.randn(1025), torch.tensor([1.0, math.inf]), torch.tensor([math.nan])]
    grads = [value.to(DEVICE, dtype) for value in values]
    found = MultiTensorNorms(grads)(grads).cpu()
    for norm, grad in zip(found[:2], grads[:2], strict=True):
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(grad.double()).item(), rel=2.0**-21)
    assert not found[2:].isfinite().any()


def test_neither_waits_for_the_device_when_gradients_have_moved(no_waiting):
    weights = [torch.randn(1000, device=DEVICE) for _ in range(20)]
    halves = [weight.half() for weight in weights]
    state = {"momentum_buffer": [torch.zeros_like(weight) for weight in weights]}
    update = MultiTensorUpdate(SGD(momentum=0.9), weights, state, [0.0] * 20, halves)
    norms = MultiTensorNorms(weights, update.table)
    stride = UpdateInputs(*(torch.full((1,), value, device=DEVICE) for value in (0.1, 1.0, 1024.0, 0.0)))
    kept = []

    def step():
        grads = [torch.randn_like(half) for half in halves]
        kept.append(grads)
        norms(grads)
        update(grads, stride)

    step()
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(5):
            step()
    assert all(torch.equal(half, weight.half()) for half, weight in zip(halves, weights, strict=True))


def test_tensors_that_do_not_begin_on_16_bytes_are_updated_as_others_are():
    whole = torch.randn(4099, device=DEVICE)
    grad = torch.randn(4099, device=DEVICE).half()
    stride = UpdateInputs(*(torch.full((1,), value, device=DEVICE) for value in (0.5, 1.0, 2.0, 0.0)))
    expected = whole[1:].clone() - 0.5 * (grad[1:].float() / 2.0)
    MultiTensorUpdate(SGD(momentum=0.0), [whole[1:]], {}, [0.0], [None])([grad[1:]], stride)
    torch.testing.assert_close(whole[1:], expected, rtol=1e-6, atol=1e-6)
