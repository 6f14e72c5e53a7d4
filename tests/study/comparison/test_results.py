"""A comparison as JSON: everything comes back."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mptrain.runlog.strict_json import parse_strict
from mptrain.study.comparison.results import (
    Aligned,
    ArmResult,
    ArmVerdict,
    Comparison,
    CurvePoint,
    Equivalence,
    Interval,
    Objection,
    from_json,
    read_comparisons,
    to_json,
    write_comparisons,
)
from mptrain.system.errors import StorageError
from tests.study.comparison.fake_runs import arm

POINT = Interval(0.5, math.nan, math.nan, math.nan, 1)
FULL = ArmResult(
    arm=arm("fp32", [0.9, math.inf], data_wait=math.nan, attempts=(("host", "1", "2"),), changes=("a was 1, now 2",)),
    metric=POINT,
    difference=None,
    equivalence=None,
    verdict=ArmVerdict("reference", "it is"),
    failed=1,
    missing=0,
    throughput=None,
    speed=None,
    time=None,
    memory=None,
    peak=Interval(1e9, 1e9, 1e9, 0.0, 2),
    energy=None,
    skip_rate=0.0,
)
OTHER = replace(
    FULL,
    arm=arm("amp_dynamic", [0.9]),
    difference=Interval(-0.1, -0.2, 0.0, 0.1, 3),
    equivalence=Equivalence(0.01, math.nan, math.nan, math.nan, math.nan, None),
    verdict=ArmVerdict("undecided", 'says "no" <b>'),
    speed=Interval(1.5, 1.4, 1.6, 0.1, 3),
    aligned=(Aligned("updates", 10, "val_top1", POINT, None), Aligned("samples", 100, "train_loss", POINT, POINT)),
    differs={"precision.name": ("fp32", "amp_dynamic"), "a.b": ("(absent)", [1, 2]), "c": (None, math.inf)},
    remarks=("not faster: because",),
)
WHOLE = Comparison(
    metric="top1",
    higher_is_better=True,
    split="test",
    margin=0.01,
    reference="fp32",
    arms=(FULL, OTHER),
    objections=(Objection("what", True, "hint"),),
    checks=("checked",),
    notes=("note",),
)


def test_everything_comes_back_through_strict_json():
    fields = to_json(WHOLE)
    assert fields["arms"][0]["metric"]["low"] is None
    assert repr(from_json(parse_strict(json.dumps(fields, allow_nan=False)))) == repr(
        WHOLE
    )  # nan is not equal to itself
    for damaged in ({}, {**fields, "arms": 3}, {**fields, "arms": [{}]}, {**fields, "extra": 1}):
        with pytest.raises(StorageError, match="damaged"):
            from_json(damaged)


def test_the_courses_of_runs_are_not_kept():
    course = (CurvePoint(10, 9, 100, {"val_top1": 0.5}),)
    with_course = replace(WHOLE, arms=(replace(FULL, arm=arm("fp32", [0.9], course=course)), OTHER))
    kept = from_json(to_json(with_course))
    assert [run.course for run in kept.arms[0].arm.runs] == [()]


def test_groups_of_comparisons_come_back_from_their_file(tmp_path):
    path = tmp_path / "comparison.json"
    with pytest.raises(StorageError, match=r"cannot read .*comparison\.json"):
        read_comparisons(path)
    write_comparisons(path, {"": WHOLE, "mlp": replace(WHOLE, reference="other")})
    parse_strict(path.read_text())
    found = read_comparisons(path)
    assert repr(found) == repr({"": WHOLE, "mlp": replace(WHOLE, reference="other")})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "damaged"),
        ('{"schema": 2}', "damaged"),
        ('{"schema": 3, "groups": []}', "schema 3"),
        ('{"schema": 2, "groups": [{"name": ""}]}', "damaged"),
    ],
)
def test_damage_of_the_file_is_located(tmp_path, text, words):
    path = tmp_path / "comparison.json"
    path.write_text(text)
    with pytest.raises(StorageError, match=rf"comparison\.json.*{words}"):
        read_comparisons(path)
