"""Weights that are judged and updated by the multi-tensor kernels, in Triton's interpreter, beside torch's operators."""

from __future__ import annotations

import math

import pytest
import torch
from optimizer.exact_updates import DTYPES
from optimizer.interpreted import interpreter, overflow_is_no_warning, rounded  # noqa: F401 - two are fixtures
from small_runs import TINY, loop_of, steps_of

from mptrain.optimizer import SGD, AdamW
from mptrain.optimizer.weights import Weights

pytest.importorskip("triton")

FP16, BF16, FP32 = DTYPES


def weights_of(values, dtype, rule, *, one_pass, masters=True, **more):
    parameters = {name: torch.nn.Parameter(value.to(dtype)) for name, value in values.items()}
    made = Weights(parameters, rule, master_weights=masters and dtype != FP32, **more)
    assert made.one_pass
    made.updater.one_pass = made.gradients.read_half = one_pass
    return made


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [SGD(momentum=0.9), AdamW()], ids=["sgd", "adamw"])
def test_weights_give_the_same_with_the_kernels_as_without(rule, dtype, masters, micro_batches):
    """A refused update, clipping and a parameter without a gradient among them."""
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=draw) for name, shape in {"a": (40, 31), "b": (7,), "c": (3,)}.items()}
    pair = [
        weights_of(values, dtype, rule, one_pass=one_pass, masters=masters, clip_norm=3.0) for one_pass in (True, False)
    ]
    scale, lr = torch.tensor([64.0]), torch.tensor([0.01])
    for number in range(4):
        verdicts = []
        drawn = [{name: torch.randn(value.shape, generator=draw) for name, value in values.items()} for _ in range(2)]
        for weights in pair:
            weights.gradients.zero_grad()
            for gradients in drawn[:micro_batches]:
                for name, parameter in zip(weights.names, weights.params, strict=True):
                    if name != "c" or number == 3:
                        parameter.grad = (gradients[name] * 64).to(dtype)
                        parameter.grad[0] = math.inf if number == 1 else 1.0
                weights.gradients.accumulate(single_microbatch=micro_batches == 1)
            assert weights.gradients.missing() == ([] if number == 3 else ["c"])
            assert {gradient.dtype for gradient in weights.gradients.by_name().values()} == {FP32}
            verdicts.append(weights.judge(scale, refuses=True))
            before = {name: value.clone() for name, value in weights.masters.full_precision().items()}
            weights.update(verdicts[-1], lr, scale)
            moved = [not torch.equal(before[name], value) for name, value in weights.masters.full_precision().items()]
            assert not any(moved) if number == 1 else moved[0]
            assert number == 3 or not moved[2]
        ours, theirs = verdicts
        assert (ours.skip.item(), ours.overflow.item()) == (theirs.skip.item(), theirs.overflow.item())
        torch.testing.assert_close(ours.norms, theirs.norms, rtol=2.0**-20, atol=0)
    ours, theirs = (weights.masters.full_precision() for weights in pair)
    tolerance = 2.0**-18 if masters or dtype == FP32 else 2.0 ** {FP16: -9, BF16: -6}[dtype]
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance / 8)
    for one, other in zip(*(weights.params for weights in pair), strict=True):
        assert one.dtype == other.dtype == dtype
        assert torch.equal(
            one, rounded(ours[dict(zip(map(id, pair[0].params), pair[0].names, strict=True))[id(one)]], dtype)
        )


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("rule", [SGD(), AdamW()], ids=["sgd", "adamw"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_knows_that_an_update_changed_what_a_graph_had_saved(dtype, rule, one_pass):
    weights = weights_of({"a": torch.ones(3)}, dtype, rule, one_pass=one_pass)
    [parameter], one = weights.params, torch.ones(1)
    product = (parameter * torch.ones(3, dtype=dtype, requires_grad=True)).sum()
    parameter.grad = torch.ones_like(parameter)
    weights.gradients.accumulate(single_microbatch=True)
    weights.update(weights.judge(one, refuses=True), one, one)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_whole_run_with_the_kernels_is_that_without_them(tmp_path):
    words = (*TINY, "precision=fp16_dynamic", "train.epochs=1", "optimizer=adamw")
    with_kernels = loop_of(tmp_path / "kernels", *words)
    assert all(learner.weights.one_pass for learner in with_kernels.parts.learners)
    plain = loop_of(tmp_path / "plain", *words)
    for learner in plain.parts.learners:
        learner.weights.updater.one_pass = learner.weights.gradients.read_half = False
    for loop in (with_kernels, plain):
        loop.run()
    one, other = steps_of(with_kernels), steps_of(plain)
    assert [step["skipped"] for step in one] == [step["skipped"] for step in other]
    assert [step["loss"] for step in one] == pytest.approx([step["loss"] for step in other], rel=1e-3)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_weights_with_gaps_in_memory_are_left_to_torch(dtype):
    room = torch.ones(4, 8, dtype=dtype)
    gaps = torch.nn.Parameter(room[:, ::2])
    weights = Weights({"gaps": gaps}, SGD(lr=0.5, momentum=0.0), master_weights=dtype != FP32)
    assert not weights.one_pass
    gaps.grad = torch.ones_like(gaps)
    weights.gradients.accumulate(single_microbatch=True)
    weights.update(weights.judge(torch.ones(1), refuses=True), torch.full((1,), 0.5), torch.ones(1))
    assert gaps.tolist() == [[0.5] * 4] * 4
    assert room[:, 1::2].tolist() == [[1.0] * 4] * 4
