from __future__ import annotations

import math
import typing

import pytest
import torch

from mptrain.config.allowed_targets import PACKAGES
from mptrain.config.section_checks import warnings_about
from mptrain.config.targets import Target
from mptrain.config.value_checks import InvalidValueError, check_value
from mptrain.numerics.overflow_check import gradient_norms, judge
from mptrain.scaler import DynamicScaler, NoScaler, StaticScaler
from mptrain.system.errors import ConfigError
from tests.loops import each

CPU = torch.device("cpu")


@each("scaler", [StaticScaler(scale=128.0), NoScaler()])
@each("value", [1.0, math.inf, math.nan])
def test_a_static_scale_never_moves(scaler, value):
    state = scaler.initial(CPU)
    verdict = judge(gradient_norms([torch.tensor([value])]), state["scale"], skip_on_overflow=True)
    assert scaler.after(state, verdict) == state
    assert (state["scale"].dtype, state["scale"].tolist()) == (
        torch.float32,
        [128.0 if scaler == StaticScaler(scale=128.0) else 1.0],
    )


@pytest.mark.parametrize("scaler", [StaticScaler(scale=128.0), NoScaler()])
def test_trap_38_a_saved_scale_never_replaces_a_constant_one(scaler):
    own = scaler.initial(CPU)["scale"]
    state, notes = scaler.resume({"scale": torch.tensor([4096.0])}, CPU)
    assert torch.equal(state["scale"], own)
    assert notes == [f"the loss scale continues at {own.item():g}; it was 2^12 in the checkpoint"]
    assert scaler.resume({"scale": own}, CPU)[1] == []
    rounded = StaticScaler(scale=1000.1)  # by FP32, which is no change
    assert rounded.resume(rounded.initial(CPU), CPU)[1] == []


def test_trap_15_what_happens_on_overflow_is_declared_and_said():
    assert "on overflow skip" in StaticScaler().describe()
    assert "on overflow apply" in NoScaler(on_overflow="apply").describe()
    for scaler in (StaticScaler, NoScaler, DynamicScaler):
        assert scaler().on_overflow == "skip"


@each("value", [0.0, -1.0, math.nan, math.inf, -math.inf, "high", True])
@each(
    ("scaler", "field"),
    [
        (StaticScaler, "scale"),
        (DynamicScaler, "init_scale"),
        (DynamicScaler, "min_scale"),
        (DynamicScaler, "max_scale"),
    ],
)
def test_trap_40_a_scale_is_a_positive_finite_number(scaler, field, value):
    annotation = typing.get_type_hints(scaler, include_extras=True)[field]
    with pytest.raises(InvalidValueError):
        check_value(value, annotation)
    assert check_value(1024, annotation) == 1024.0


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("growth_factor", [1.0, 0.5, 0.0, -2.0, math.nan, math.inf], 2.0),
        ("backoff_factor", [1.0, 2.0, 0.0, -0.5, math.nan], 0.5),
        ("growth_interval", [0, -1, 1.5, math.nan], 2000),
        ("hysteresis", [0, -1, 0.5], 2),
        ("on_overflow", ["ignore", ""], "apply"),
    ],
)
def test_trap_40_the_other_constants_have_ranges_as_well(field, wrong, right):
    for value in wrong:
        with pytest.raises(ConfigError, match=f"scaler.{field}="):
            Target("mptrain.scaler.DynamicScaler", {field: value}, PACKAGES["scaler"]).check("scaler")
    Target("mptrain.scaler.DynamicScaler", {field: right}, PACKAGES["scaler"]).check("scaler")


def test_trap_05_a_scale_that_is_no_power_of_two_is_warned_about():
    (sentence,) = warnings_about(Target("mptrain.scaler.StaticScaler", {"scale": 1000.0}), ())
    assert "scaler.scale=1000" in sentence
    assert "nearest: 1024" in sentence
    assert warnings_about(Target("mptrain.scaler.StaticScaler", {"scale": 1024.0}), ()) == []
