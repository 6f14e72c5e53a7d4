"""Rounding of updated weights: what moves a weight, what is lost, and the two ways to lose less."""

from __future__ import annotations

import math

import pytest
import torch

from mptrain.numerics.rounding import (
    decay_is_lost,
    exact_update,
    reach,
    round_compensated,
    round_stochastically,
    rounding_key,
    stuck,
    update_sums,
    with_compensation,
)

HALF = [torch.bfloat16, torch.float16]


def every_value(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_reach_is_half_the_distance_to_the_nearer_neighbour_of_every_finite_value(dtype):
    values = every_value(dtype)
    finite = values[values.isfinite()].double()
    ordered = torch.unique(finite)  # both zeros are one value
    at = torch.searchsorted(ordered, finite)
    below = torch.where(at > 0, finite - ordered[(at - 1).clamp(min=0)], math.inf)
    above = torch.where(at < len(ordered) - 1, ordered[(at + 1).clamp(max=len(ordered) - 1)] - finite, math.inf)
    assert torch.equal(reach(values[values.isfinite()]).double(), torch.minimum(below, above) / 2)
    assert reach(values[~values.isfinite()]).isnan().all()


@pytest.mark.parametrize("dtype", HALF)
def test_an_update_below_the_reach_changes_nothing_and_one_above_it_does_towards_the_nearer_neighbour(dtype):
    values = every_value(dtype)
    values = values[values.isfinite()]
    room = reach(values).double()
    towards_zero = -values.double().sign()
    for factor, changes in ((0.99, False), (1.01, True)):
        for sign in (1.0, -1.0):
            moved = (values.double() + sign * factor * room).to(dtype)
            assert not (changes is False and not torch.equal(moved, values))
        if changes:
            moved = (values.double() + factor * room * torch.where(values == 0, 1.0, towards_zero)).to(dtype)
            assert (moved != values).all()


def test_stuck_counts_weights_that_no_update_of_a_size_changes():
    weights = torch.tensor([0.0, 2.0**-20, 1.0, -1.0, 2.0], dtype=torch.bfloat16)
    assert int(stuck(weights, 2.0**-9)) == 1  # 2: half the distance below it is 2^-8, and below 1 it is 2^-9
    assert int(stuck(weights, 2.0**-10)) == 3
    assert int(stuck(torch.zeros(0, dtype=torch.bfloat16), 1.0)) == 0


def test_sums_of_updates_count_what_stayed_and_weigh_it_by_magnitude():
    before = torch.ones(4, dtype=torch.bfloat16)
    update = torch.tensor([0.0, 2.0**-12, 2.0**-7, -0.75 * 2.0**-8])
    after = (before.float() + update).to(torch.bfloat16)
    updates, lost, size, lost_size, moved = update_sums(before, update, after).tolist()
    assert (updates, lost) == (3, 1)
    assert size == 2.0**-12 + 2.0**-7 + 0.75 * 2.0**-8
    assert lost_size == 2.0**-12
    assert moved == 2.0**-7 + 2.0**-8  # the last one went too far


def loop_of(kind, dtype, **constants):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(40, 50, dtype=torch.float64).mul(0.02).to(dtype))
    return weight, kind([weight], **constants)


@pytest.mark.parametrize(
    ("kind", "constants"),
    [
        (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.0}),
        (torch.optim.AdamW, {"lr": 1e-3, "maximize": True, "betas": (0.8, 0.95)}),
        (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ],
)
def test_the_exact_update_is_that_of_the_optimizer_in_fp64(kind, constants):
    weight, optimizer = loop_of(kind, torch.float64, **constants)
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        before = weight.detach().clone()
        optimizer.step()
        found = exact_update(kind.__name__, optimizer.param_groups[0], optimizer.state[weight], before, weight.grad)
        assert torch.allclose(found.double(), weight.detach() - before, rtol=1e-4, atol=1e-9)


def test_elements_that_only_weight_decay_moves_are_no_updates_and_unknown_rules_have_none():
    weight, optimizer = loop_of(torch.optim.AdamW, torch.float32, lr=1e-3, weight_decay=0.5)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    update = exact_update("AdamW", optimizer.param_groups[0], optimizer.state[weight], weight, weight.grad)
    assert not update.any()
    assert exact_update("RMSprop", {"lr": 0.1}, {}, weight, weight.grad) is None
    assert exact_update("AdamW", optimizer.param_groups[0], {}, weight, weight.grad) is None


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("keep", [0.9, 0.99, 0.995, 0.998, 0.9985, 0.999, 0.9999])
def test_a_decay_is_lost_if_no_normal_value_falls(dtype, keep):
    values = every_value(dtype)
    normal = values[values.isfinite() & (values >= torch.finfo(dtype).smallest_normal)]
    falls = (normal.float() * keep).to(dtype) < normal
    assert decay_is_lost(dtype, keep) == (not falls.any())


def key(seed=0, step=1, parameter=0):
    return rounding_key(seed, torch.tensor([float(step)]), parameter)


def stochastic(values, **of):
    into = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(values, into, key(**of))
    return into


@pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("base", [1.0, -3.0, 2.0**-130])
def test_stochastic_rounding_is_unbiased_within_four_standard_errors(share, base):
    draws = 10**6
    step = max(2.0**-7 * 2.0 ** math.floor(math.log2(abs(base))), 2.0**-133)
    value = torch.full((draws,), base + math.copysign(share * step, base))
    rounded = stochastic(value, seed=7, step=3).double()
    assert set(rounded.unique().tolist()) <= {base, base + math.copysign(step, base)}
    mean = (rounded - base).mean().item() / math.copysign(step, base)
    assert abs(mean - share) < 4 * math.sqrt(share * (1 - share) / draws)


def test_stochastic_rounding_leaves_what_is_representable_and_what_is_not_finite():
    values = every_value(torch.bfloat16)
    rounded = stochastic(values.float())
    assert torch.equal(rounded.isnan(), values.isnan())
    assert torch.equal(rounded[~values.isnan()], values[~values.isnan()])
    odd = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN with all bits
    assert stochastic(odd).isnan().all()


def test_bits_are_a_function_of_seed_step_parameter_and_element():
    values = torch.randn(300, 700)
    first = stochastic(values)
    assert torch.equal(first, stochastic(values))
    for other in ({"seed": 1}, {"step": 2}, {"parameter": 1}, {"seed": 1 << 40}):
        assert not torch.equal(first, stochastic(values, **other))
    shard = torch.empty(100, 700, dtype=torch.bfloat16)
    round_stochastically(values[200:], shard, key(), first=200 * 700)
    assert torch.equal(shard, first[200:])
    strided = torch.empty(700, 300, dtype=torch.bfloat16).t()
    round_stochastically(values, strided, key())
    assert torch.equal(strided, first)


def test_bits_of_neighbouring_elements_steps_and_parameters_are_not_correlated():
    half_way = torch.full((200_000,), 1 + 2.0**-8)
    ups = {at: (stochastic(half_way, step=at).float() > 1).double() - 0.5 for at in (1, 2)}
    ups[3] = (stochastic(half_way, step=1, parameter=1).float() > 1).double() - 0.5
    bound = 4 * 0.25 / math.sqrt(len(half_way))
    assert abs((ups[1] * ups[2]).mean()) < bound
    assert abs((ups[1] * ups[3]).mean()) < bound
    for distance in (1, 2, 4, 256, 65_536):
        assert abs((ups[1][distance:] * ups[1][:-distance]).mean()) < 4 * 0.25 / math.sqrt(len(half_way) - distance)


def test_compensated_updates_follow_the_sums_in_fp64():
    torch.manual_seed(0)
    exact = torch.randn(10_000).to(torch.bfloat16).double()
    start, weight, kept = exact.clone(), exact.to(torch.bfloat16), torch.zeros(10_000, dtype=torch.int16)
    nearest, masters = weight.clone(), weight.float()
    for _ in range(1000):
        update = (1e-6 * torch.rand(10_000)).float()
        exact += update.double()
        masters += update
        round_compensated(with_compensation(weight, kept) + update, weight, kept)
        nearest = (nearest.float() + update).to(torch.bfloat16)
    gain = (exact - start).mean()
    assert ((with_compensation(weight, kept).double() - exact).abs()).mean() < 0.02 * gain
    assert (with_compensation(weight, kept) == masters).double().mean() > 0.99
    assert (nearest.double() - exact).abs().mean() > 0.9 * gain


def test_weights_and_compensation_are_the_value_again_and_an_update_of_zero_changes_neither():
    every = torch.cat([every_value(torch.bfloat16).float(), torch.randn(100_000), 1e-38 * torch.randn(100_000)])
    for values in (every[every.isfinite()], *(torch.linspace(b - 0.01, b + 0.01, 9_999) for b in (1.0, 1.99, -5.0))):
        weight, kept = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
        round_compensated(values, weight, kept)
        assert torch.equal(weight, values.to(torch.bfloat16))
        back = with_compensation(weight, kept)
        finite = weight.isfinite()
        assert ((back == values) | (kept == (1 << 15) - 1))[finite].all()
        again = weight.clone(), kept.clone()
        round_compensated(back, *again)
        assert torch.equal(again[0], weight)
        assert torch.equal(again[1], kept)


def test_values_that_are_not_finite_stay_so_when_they_are_compensated():
    values = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38])
    weight, kept = torch.empty(4, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int16)
    round_compensated(values, weight, kept)
    assert torch.equal(weight[[0, 1, 3]].float(), torch.tensor([math.inf, -math.inf, math.inf]))
    assert weight[2].isnan()
    assert not kept.any()
