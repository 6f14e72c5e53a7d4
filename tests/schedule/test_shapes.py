from __future__ import annotations

import itertools
import math
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.config.allowed_targets import PACKAGES
from mptrain.config.targets import Target
from mptrain.schedule import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    OneCycle,
    Plateau,
    Polynomial,
    Step,
    WarmupStableDecay,
)  # fmt: skip
from mptrain.system.errors import ConfigError
from tests.loops import each


def factors(schedule, planned):
    return [schedule.factor(update, planned) for update in range(planned + 1)]


HALF_CYCLE = OneCycle(pct_start=0.5, div_factor=4, final_div_factor=2, anneal_strategy="linear")


@each(
    ("schedule", "planned", "expected"),
    [
        *(
            (schedule, 6, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0])  # a warm-up is over with its last update
            for schedule in (Constant(warmup=4), Step(milestones=(), warmup=4), Linear(final=1.0, warmup=4))
        ),
        (Linear(), 4, [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Linear(final=0.5), 4, [1.0, 0.875, 0.75, 0.625, 0.5]),
        (Linear(warmup=2), 6, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (Cosine(), 4, [1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0.0]),
        (Cosine(final=0.2), 2, [1.0, 0.6, 0.2]),
        (Cosine(warmup=2), 4, [0.5, 1.0, 1.0, 0.5, 0.0]),
        (Step(milestones=(0.5, 0.75), gamma=0.5), 8, [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25]),
        (InverseSqrt(warmup=4), 16, [0.25, 0.5, 0.75, 1.0] + [(4 / update) ** 0.5 for update in range(5, 18)]),
        (Polynomial(power=2), 4, [1.0, 0.5625, 0.25, 0.0625, 0.0]),
        (Polynomial(power=1, final=0.5, warmup=2), 4, [0.5, 1.0, 1.0, 0.75, 0.5]),
        (Exponential(final=0.0625), 4, [1.0, 0.5, 0.25, 0.125, 0.0625]),
        (Exponential(gamma=0.5, warmup=2), 4, [0.5, 1.0, 1.0, 0.5, 0.25]),
        (WarmupStableDecay(warmup=2, decay=0.4), 10, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (
            WarmupStableDecay(warmup=0, decay=0.4, shape="sqrt", final=0.5),
            10,
            [*[1] * 7, 0.75, 1 - 0.5 * 0.5**0.5, 1 - 0.5 * 0.75**0.5, 0.5],
        ),
        (HALF_CYCLE, 6, [0.25, 0.625, 1.0, 1 - 0.875 / 3, 1 - 1.75 / 3, 0.125]),
        (CosineRestarts(period=0.25, warmup=2), 8, [0.5, 1.0, 1.0, 0.5, 1.0, 0.5]),
    ],
)
def test_factors_are_those_worked_out_by_hand(schedule, planned, expected):
    assert factors(schedule, planned)[: len(expected)] == pytest.approx(expected)


def test_inverse_sqrt_is_the_rate_of_the_transformers_paper():
    for update in (1, 100, 4000, 100_000):
        published = 512**-0.5 * min(update**-0.5, update * 4000**-1.5)
        assert 512**-0.5 * 4000**-0.5 * InverseSqrt().factor(update - 1, 100_000) == pytest.approx(published)


def test_cycles_and_restarts_are_sound_at_their_edges():
    for planned, share in ((1, 0.0), (1, 0.3), (1, 1.0), (2, 0.5), (4, 1.0)):
        assert all(0 < factor <= 1 for factor in factors(OneCycle(pct_start=share), planned))
    assert factors(OneCycle(pct_start=1.0), 4)[3] == 1.0
    longer = factors(CosineRestarts(period=0.1, multiplier=2), 20)
    assert [update for update, factor in enumerate(longer) if factor == 1.0] == [0, 2, 6, 14]
    assert CosineRestarts(period=1e-9).factor(5, 10) == 1.0  # a period has at least one update


@pytest.mark.parametrize("planned", [90, 9000, 450_000])
def test_the_default_milestones_are_epochs_30_60_and_80_of_90(planned):
    default = factors(Step(), planned)
    fallen = [update for update in range(1, planned + 1) if default[update] != default[update - 1]]
    assert fallen == [planned * epoch // 90 for epoch in (30, 60, 80)]
    assert default[-1] == pytest.approx(1e-3)


@pytest.mark.parametrize("planned", [100, 12345])
def test_a_milestone_in_hundredths_falls_on_its_update(planned):
    for percent in range(1, 100):
        if percent * planned % 100:
            continue
        schedule, update = Step(milestones=(percent / 100,)), percent * planned // 100
        assert schedule.factor(update - 1, planned) == 1.0
        assert schedule.factor(update, planned) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "schedule",
    [Cosine(final=0.1), Linear(), Step(), Constant(), Polynomial(), Exponential(), OneCycle(), WarmupStableDecay()],
)
def test_beyond_the_plan_the_last_factor_holds(schedule):
    assert schedule.factor(15, 10) == schedule.factor(10, 10) == schedule.factor(10**9, 10)
    assert all(factor > 0 for factor in factors(schedule, 10)[:-1])


warm, share, above_zero = st.integers(0, 50), st.floats(0, 1), st.floats(1e-6, 1)
milestones = st.lists(share, max_size=4).map(tuple)
shapes = st.one_of(
    st.builds(Constant, warmup=warm),
    st.builds(Cosine, final=share, warmup=warm),
    st.builds(Linear, final=share, warmup=warm),
    st.builds(Step, milestones=milestones, gamma=st.floats(0.01, 1), warmup=warm),
    st.builds(Polynomial, power=st.floats(0.1, 5), final=share, warmup=warm),
    st.builds(Exponential, final=above_zero, warmup=warm),
    st.builds(Exponential, gamma=above_zero, warmup=warm),
    st.builds(
        WarmupStableDecay, warmup=warm, decay=share, shape=st.sampled_from(["linear", "cosine", "sqrt"]), final=share
    ),
)


@settings(deadline=None)
@given(schedule=shapes, planned=st.integers(1, 60))
def test_factors_lie_between_0_and_1_and_rise_no_more_once_warm(schedule, planned):
    found = factors(schedule, planned)
    assert all(0.0 <= factor <= 1.0 for factor in found)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(found[schedule.warmup :]))
    if isinstance(schedule, Cosine | Linear):
        assert min(found[schedule.warmup :], default=1.0) >= schedule.final - 1e-12


@each(
    ("kind", "wrong"),
    [
        (Cosine, {"final": -0.1, "warmup": -1}),
        (Linear, {"final": 1.1}),
        (Constant, {"warmup": 1.5}),
        (Step, {"gamma": 0.0, "milestones": [0.5, 1.5]}),
        (Step, {"gamma": math.nan}),
        (Exponential, {"final": 0.0, "gamma": 1.1}),
        (Polynomial, {"power": 0}),
        (WarmupStableDecay, {"shape": "exp"}),
        (OneCycle, {"div_factor": 0.5, "anneal_strategy": "cosine"}),
        (CosineRestarts, {"period": 0, "multiplier": 0}),
        (Plateau, {"factor": 1.0, "patience": -1, "mode": "higher"}),
    ],
)
def test_constants_outside_their_ranges_are_refused(kind, wrong):
    for key, value in wrong.items():
        assert key in typing.get_type_hints(kind)
        with pytest.raises(ConfigError, match=f"schedule.{key}="):
            Target(f"mptrain.schedule.{kind.__name__}", {key: value}, PACKAGES["schedule"]).check("schedule")
