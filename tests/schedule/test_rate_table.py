from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mptrain.engine.step import Learner
from mptrain.numerics.overflow_check import gradient_norms, judge
from mptrain.optimizer import SGD, Weights
from mptrain.scaler import DynamicScaler, NoScaler
from mptrain.schedule import Constant, Cosine, Linear, Step, rate_table
from mptrain.schedule.shapes import TabulatedSchedule
from mptrain.system.errors import ConfigError
from mptrain.workloads.base.task import Objective

CPU = torch.device("cpu")
SCHEDULES = [Constant(warmup=3), Cosine(warmup=5), Linear(final=0.1), Step()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_table_is_the_function_rounded_once_to_float32(schedule):
    table = rate_table(schedule, 0.05, 30, CPU)
    assert table.dtype == torch.float32
    assert table.shape == (31,)
    for update in range(31):
        assert table[update] == torch.tensor(0.05 * schedule.factor(update, 30))


def learner_with(schedule, scaler=None, planned=30):
    parameter = nn.Parameter(torch.ones(2))
    weights = Weights({"p": parameter}, SGD(lr=0.5), master_weights=False)
    objective = Objective("main", ("",), lambda model, batch: torch.zeros(()))
    return Learner(objective, weights, scaler or DynamicScaler(), rate_table(schedule, 0.5, planned, CPU), CPU)


def verdict_of(value, *, skip_on_overflow=True):
    return judge(gradient_norms([torch.tensor([value])]), torch.ones(1), skip_on_overflow=skip_on_overflow)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trap_22_refused_updates_do_not_move_the_schedule(schedule):
    learner = learner_with(schedule)
    rates = []
    for overflow in [False, True, True, False, True, False, False]:
        rates.append(learner.rate().item())
        learner.advance(verdict_of(float("inf") if overflow else 1.0))
    table = learner.rates.tolist()
    assert rates == [table[update] for update in (0, 1, 1, 1, 2, 2, 3)]
    assert learner.updates.item() == 4


@pytest.mark.parametrize("scaler", [NoScaler(), DynamicScaler(init_scale=1.0), DynamicScaler(hysteresis=5)])
def test_trap_26_a_refusal_is_known_by_its_flag(scaler):
    learner = learner_with(Cosine(), scaler)
    before = learner.scale.clone()
    learner.advance(verdict_of(float("nan")))
    assert torch.equal(learner.scale, before)
    assert learner.updates.item() == 0


def test_trap_26_an_overflow_that_is_applied_counts_as_an_update():
    learner = learner_with(Cosine())
    learner.advance(verdict_of(float("nan"), skip_on_overflow=False))
    assert learner.updates.item() == 1


def test_a_rate_that_is_not_finite_is_an_error_before_the_run():
    class Falling:
        def factor(self, update, planned):
            return math.nan if update == 3 else 1.0

    with pytest.raises(ConfigError, match="schedule: Falling gives update 4 of 10 the learning rate nan"):
        rate_table(Falling(), 0.1, 10, CPU)


class Says:
    """A schedule of somebody's, with these factors."""

    def __init__(self, factor):
        self.factor = lambda update, planned: factor


class Tabulated(TabulatedSchedule):
    def __init__(self, made):
        self.made = made

    def rates(self, lr, planned, steps_per_epoch):
        return self.made


@pytest.mark.parametrize("factor", [None, "half", [1.0], math.nan])
def test_a_factor_that_is_no_number_is_refused_by_name(factor):
    with pytest.raises(ConfigError, match="Says gives update 1 of 30 the learning rate"):
        rate_table(Says(factor), 0.1, 30, CPU)


def test_rates_are_one_for_each_update_and_one_more():
    assert rate_table(Tabulated(0.5 for _ in range(31)), 0.1, 30, CPU).tolist() == [0.5] * 31
    for count in (30, 32):
        with pytest.raises(ConfigError, match=f"Tabulated gives {count} learning rates for 30 updates"):
            rate_table(Tabulated([0.5] * count), 0.1, 30, CPU)
