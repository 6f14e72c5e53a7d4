"""The passes at many scales are training's own, leave nothing behind, and differ by nothing but the scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.engine.module_trail import LOSS
from mptrain.engine.step import accumulate_gradients
from mptrain.lab.step.gradients import compare_scales, compute_reference, scaled_gradients
from mptrain.lab.step.observation import disable_dropout, inspect_step, largest_values
from mptrain.numerics.formats import FLOAT16
from tests.small_runs import TINY, parts_of


def first(parts):
    parts.model.train()
    return parts.prepare(next(parts.loaders["train"].batches(0)))


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic"])
def test_weights_buffers_generators_and_gradients_stay_as_they_were(precision):
    parts, _ = parts_of("model=cnn", "dataset.train_samples=32", f"precision={precision}")
    batch = first(parts)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    generator = torch.get_rng_state()
    scaled_gradients(parts, batch, 2.0**24)  # which overflows
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())
    assert all(parameter.grad is None for parameter in parts.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_they_are_the_gradients_of_training_without_its_scale(precision):
    parts, _ = parts_of(*TINY, f"precision={precision}", "train.accumulate=2")
    batch = first(parts)
    found = scaled_gradients(parts, batch, 64.0)
    [learner] = parts.learners
    learner.weights.gradients.zero_grad()
    accumulate_gradients(learner, parts.model, batch, parts.plan)
    assert learner.scale.item() == 64.0
    for name, grad in learner.weights.gradients.by_name().items():
        assert torch.equal(grad.double() / 64.0, found[name])


def test_powers_of_two_change_no_bit_where_nothing_underflows_or_overflows():
    parts, _ = parts_of(*TINY, "precision=fp16_static")
    batch = first(parts)
    low, high = scaled_gradients(parts, batch, 2.0**16), scaled_gradients(parts, batch, 2.0**19)
    assert all(torch.equal(low[name], high[name]) for name in low)


def test_in_fp32_every_error_is_that_of_fp32_alone():
    parts, _ = parts_of(*TINY, "precision=fp32")
    batch = first(parts)
    said = inspect_step(parts, batch, FLOAT16).outputs
    reference = compute_reference(parts, batch, FLOAT16, said)
    for one in reference.distances.values():
        assert one.fp32 < 1e-6 * one.reference
        assert one.expected < 1e-5 * one.reference
        assert one.fp32_shift == 0
    assert not reference.breaks
    assert reference.outputs.pop(LOSS).half < 1e-6
    assert all(errors.half < 1e-6 and errors.explained > 1e-5 for errors in reference.outputs.values())


def test_the_backward_pass_is_compared_at_the_activations_of_the_half_precision_one():
    """A ReLU that rounding turns off moves gradients by per cents; what the backward pass adds is far below."""
    parts, _ = parts_of("model=mlp", "precision=fp16_static")
    host = next(parts.loaders["train"].batches(0))
    inspection = inspect_step(parts, parts.prepare(host), FLOAT16)
    wide, _ = parts_of("model=mlp", "precision=fp32")
    reference = compute_reference(wide, wide.prepare(host), FLOAT16, inspection.outputs)
    parts, _ = parts_of("model=mlp", "precision=fp16_static")
    measured = {one.name: one for one in compare_scales(parts, parts.prepare(host), reference, (0, 8, 16))}
    assert measured["1.weight"].expected > 0.005 * measured["1.weight"].reference
    assert measured["1.weight"].errors[8] < 0.002 * measured["1.weight"].reference
    assert list(measured["1.weight"].errors) == [0, 8, 16]
    assert measured["1.weight"].shifts[16] == 0.0
    assert measured["1.weight"].shifts[0] < 0.001 * measured["1.weight"].reference


class FP32Only(nn.Module):
    def forward(self, given):
        return torch.mul(given.float(), 2.0) @ torch.eye(given.shape[1])


def test_a_model_that_does_not_run_in_fp64_is_compared_with_fp32():
    parts, _ = parts_of(*TINY, "precision=fp32")
    parts.model.insert(1, FP32Only())
    reference = compute_reference(parts, first(parts), FLOAT16, {})
    assert reference.dtype == "float32"
    assert "does not run in FP64" in reference.notes[0]
    assert all(one.fp32 == 0 for one in reference.distances.values())


def test_dropout_of_every_kind_is_turned_off():
    model = nn.ModuleList(
        [nn.Dropout(0.5), nn.Dropout2d(0.0), nn.LSTM(2, 2, 2, dropout=0.3), nn.MultiheadAttention(4, 2, dropout=0.1)]
    )
    assert disable_dropout(model) == ("dropout is off (3 modules): its random numbers may depend on the dtype",)
    assert (model[0].p, model[2].dropout, model[3].dropout) == (0.0, 0.0, 0.0)
    assert disable_dropout(model) == ()


def test_what_is_not_finite_counts_as_infinite():
    model = nn.BatchNorm1d(2)
    with torch.no_grad():
        model.bias.fill_(-3.0)
        model.weight[0] = float("nan")
    assert largest_values(model) == {"weight": float("inf"), "bias": 3.0, "running_mean": 0.0, "running_var": 1.0}


def test_norms_are_half_only_where_parameters_are_and_none_are_kept():
    for words, norms in (
        (("precision=fp16_static",), ()),
        (("precision=amp_static",), ()),
        (("precision=fp16_static", "precision.keep_fp32=['8']"), ("1", "4", "12")),
    ):
        parts, _ = parts_of("model=cnn", "dataset.train_samples=32", *words)
        assert inspect_step(parts, first(parts), FLOAT16).evidence.half_norms == norms
