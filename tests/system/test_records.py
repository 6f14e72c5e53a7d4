"""Records: frozen, free of tensors, and strict JSON whatever the numbers are."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.runlog.record_writer import step_json
from mptrain.system.records import StepRecord, as_json, nonfinite_kind

RECORD = StepRecord(
    learner="main",
    step=7,
    updates=6,
    epoch=1,
    loss=0.1,
    loss_scale=65536.0,
    overflow=True,
    skipped=True,
    grad_norm=math.inf,
    lr=0.05,
)


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "kind"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (0.0, None), (1e308, None)]
)
def test_kind_names_exactly_the_numbers_that_json_cannot_hold(value, kind):
    assert nonfinite_kind(value) == kind


def test_step_line_has_every_field_in_declared_order_and_no_clock():
    fields = strict(step_json(RECORD))
    assert " ".join(fields) == ("learner step updates epoch loss loss_scale overflow skipped grad_norm lr nonfinite")
    assert fields["grad_norm"] is None
    assert fields["nonfinite"] == {"grad_norm": "inf"}
    line = step_json(replace(RECORD, grad_norm=1.5))
    assert "nonfinite" not in strict(line)
    assert "\n" not in line


@given(st.floats())
def test_every_float_survives_the_line_bit_for_bit(value):
    fields = strict(step_json(replace(RECORD, grad_norm=1.0, loss=value)))
    kind = fields.get("nonfinite", {}).get("loss")
    back = fields["loss"] if kind is None else float(kind)
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert math.isnan(value) or math.copysign(1, back) == math.copysign(1, value)


@settings(max_examples=40)
@given(*[st.floats()] * 4, st.none() | st.floats(), st.integers(0, 2**62), st.booleans(), st.text())
def test_the_short_way_to_a_step_line_is_the_long_one(loss, scale, norm, lr, applied, number, flag, learner):
    record = StepRecord(learner, number, number, number, loss, scale, flag, not flag, norm, lr, applied)
    values = {name: value for name, value in asdict(record).items() if value is not None}
    assert step_json(record) == as_json(values)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text().filter(lambda key: key != "nonfinite"), values))
def test_nested_values_are_strict_json_too(fields):
    parsed = strict(as_json(fields))
    assert set(fields) == set(parsed) - {"nonfinite"}


def test_nested_nonfinite_numbers_become_null_and_are_listed_by_path():
    assert strict(as_json({"metrics": {"loss": math.nan, "all": (1.0, math.inf)}})) == {
        "metrics": {"loss": None, "all": [1.0, None]},
        "nonfinite": {"metrics.loss": "nan", "metrics.all.1": "inf"},
    }


def test_records_and_errors_import_no_torch():
    code = "import sys, mptrain.system.records, mptrain.system.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
