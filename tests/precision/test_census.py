"""The census counts what a step was computed in, and its casts; what computes nothing is left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.precision.apply import autocast
from mptrain.precision.census import Cast, Operator, OperatorCensus, _Nested
from mptrain.precision.upcast import PRODUCTS, SUMS, Products
from tests.precision.modes import mode

CPU = torch.device("cpu")


def test_operators_are_counted_by_dtypes_and_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).half()
    given = torch.randn(3, 4).half()
    census = OperatorCensus()
    with census.inside(Products(PRODUCTS | SUMS)).context:
        torch.softmax(model(given), 1).float().log().sum().backward()
    assert census.operators[Operator("forward", "addmm", "float16", "float16")] == 2
    assert census.operators[Operator("forward", "_softmax", "float16", "float16")] == 1
    assert census.operators[Operator("forward", "log", "float32", "float32")] == 1
    assert census.operators[Operator("backward", "threshold_backward", "float16", "float16")] == 1
    assert sum(calls for one, calls in census.operators.items() if one.name == "mm") == 3
    assert census.casts == {Cast("forward", "float16", "float32"): 1, Cast("backward", "float32", "float16"): 1}


def test_autocast_shows_its_casts_of_weights_and_inputs():
    census = OperatorCensus()
    with census, autocast(mode("amp_dynamic"), CPU):
        nn.Linear(4, 4)(torch.randn(3, 4))
    assert census.operators[Operator("forward", "addmm", "float16", "float16")] == 1
    assert census.casts[Cast("forward", "float32", "float16")] == 3  # input, weight and bias


def test_views_constants_and_memory_that_nobody_has_written_to_are_left_out():
    x = torch.randn(3, 4)
    with OperatorCensus() as census:
        x.view(12)[2:].unsqueeze(0).expand(2, -1).detach()
        torch.empty_like(x).fill_(2.0)
        torch.zeros_like(x)
        torch.arange(3).sum()
    assert not census.operators
    assert not census.casts


def test_copies_into_another_dtype_and_integers_to_floats_are_casts():
    with OperatorCensus() as census:
        torch.empty(3, dtype=torch.float16).copy_(torch.ones(3))
        torch.ones(3).copy_(torch.zeros(3))
        torch.arange(3).float()
        torch.arange(3).int()
    assert census.casts == {Cast("forward", "float32", "float16"): 1, Cast("forward", "int64", "float32"): 1}
    assert census.operators == {Operator("forward", "copy_", "float32", "float32"): 1}


def test_the_table_has_the_passes_in_order_and_the_most_frequent_first():
    weight = torch.ones(3, requires_grad=True)
    with OperatorCensus() as census:
        ((weight.half() * 2 * 3).exp().float()).sum().backward()
    table = census.table()
    phases = [row["phase"] for row in table["operators"]]
    assert phases == sorted(phases, reverse=True)
    assert table["operators"][0] == {
        "phase": "forward", "operator": "mul", "inputs": "float16", "outputs": "float16", "calls": 2,
    }  # fmt: skip
    assert {(row["from"], row["to"], row["calls"]) for row in table["casts"]} == {
        ("float32", "float16", 1), ("float16", "float32", 1),
    }  # fmt: skip


def test_contexts_within_each_other_are_left_as_they_were_entered():
    inside, trail = [], []

    class Noted:
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        def __enter__(self):
            if self.fails:
                raise ValueError(self.name)
            inside.append(self.name)

        def __exit__(self, *raised):
            trail.append(inside.pop())

    both = _Nested(Noted("outer"), Noted("inner"))
    with both:
        with both:
            assert inside == ["outer", "inner"] * 2
        assert inside == ["outer", "inner"]
    assert trail == ["inner", "outer"] * 2
    with pytest.raises(ValueError, match="late"), _Nested(Noted("early"), Noted("late", fails=True)):
        pass
    assert not inside
