"""``schedule=plateau`` against torch's ReduceLROnPlateau, validation by validation."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mptrain.schedule import Plateau, rate_table
from mptrain.schedule.plateau import PlateauState, RateReduction
from mptrain.system.errors import CheckpointError
from tests.loops import each

CPU = torch.device("cpu")


def trace(seed, length=120):
    """Metrics that improve, stall, worsen and are sometimes no numbers."""
    draw, value, values = random.Random(seed), 1.0, []
    for _ in range(length):
        value += draw.choice([-0.05, -0.01, -1e-5, 0.0, 0.0, 0.03])
        values.append(draw.choice([value] * 20 + [math.nan, math.inf, -value]))
    return values


def reduction_of(rule, planned=10, lr=0.1):
    return RateReduction(rule, lr, rate_table(rule, lr, planned, CPU))


@each("mode", ["min", "max"])
@each("threshold_mode", ["rel", "abs"])
@each(("patience", "cooldown", "threshold"), [(0, 0, 0.0), (1, 0, 1e-4), (3, 2, 0.02), (2, 5, 0.5)])
@each("min_factor", [0.0, 0.03])
def test_every_rate_is_that_of_torch_after_random_metrics(
    mode, threshold_mode, patience, cooldown, threshold, min_factor
):
    for seed in range(4):
        rule = Plateau(0.3, patience, threshold, threshold_mode, cooldown, min_factor)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        theirs = ReduceLROnPlateau(
            optimizer, mode, 0.3, patience, threshold, threshold_mode, cooldown, min_factor * 0.1, eps=0.0
        )
        ours, reductions = reduction_of(rule), 0
        for value in trace(seed):
            before = optimizer.param_groups[0]["lr"]
            theirs.step(value)
            reduced = ours.after_validation("m", value, higher=mode == "max")
            assert reduced == (optimizer.param_groups[0]["lr"] < before)
            assert ours.lr * ours.state.factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
            reductions += reduced
        assert reductions > 1


def test_the_table_is_changed_in_place_and_resumes_to_the_same_bits():
    rule = Plateau(factor=0.7, patience=0, warmup=4)
    ours = reduction_of(rule)
    table = ours._rates
    address, before = table.data_ptr(), table.clone()
    for value in (1.0, 1.0, 1.0, 1.0):
        ours.after_validation("loss", value, higher=False)
    assert table.data_ptr() == address
    assert torch.allclose(table, before * 0.7**3)
    resumed = reduction_of(rule)
    resumed.load_state_dict(ours.state_dict())
    assert resumed.state == ours.state
    assert torch.equal(resumed._rates, table)


def test_another_metric_begins_anew_and_keeps_the_reduced_rate():
    ours = reduction_of(Plateau(patience=0))
    for value in (1.0, 2.0, 2.0):
        ours.after_validation("loss", value, higher=False)
    assert ours.state.factor == pytest.approx(0.01)
    assert not ours.after_validation("top1", 0.1, higher=True)
    assert ours.state == PlateauState("top1", 0.1, 0, 0, ours.state.factor)


@each(
    ("field", "value"),
    [
        ("factor", 2.0),
        ("factor", "x"),
        ("factor", math.nan),
        ("bad", None),
        ("best", []),
        ("metric", 3),
        ("cooldown", 0.5),
    ],
)
def test_a_damaged_state_is_refused(field, value):
    ours = reduction_of(Plateau())
    with pytest.raises(CheckpointError, match="schedule=plateau is damaged"):
        ours.load_state_dict({**ours.state_dict(), field: value})


def test_a_run_that_had_another_schedule_starts_afresh():
    ours = reduction_of(Plateau(patience=0))
    for value in itertools.repeat(1.0, 3):
        ours.after_validation("loss", value, higher=False)
    ours.load_state_dict({})
    assert ours.state == PlateauState()
    assert ours._rates[0] == torch.tensor(0.1)
