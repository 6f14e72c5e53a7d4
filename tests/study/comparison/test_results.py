"""A comparison as JSON: everything comes back."""

from __future__ import annotations

import json
import math
import sys
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
    write_comparisons,
)
from mptrain.system.errors import EnvironmentRefused, StorageError
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
    fields = WHOLE.to_dict()
    assert fields["arms"][0]["metric"]["low"] is None
    assert from_json(parse_strict(json.dumps(fields, allow_nan=False))).to_dict() == fields
    for damaged in ({}, {**fields, "arms": 3}, {**fields, "arms": [{}]}, {**fields, "extra": 1}):
        with pytest.raises(StorageError, match="damaged"):
            from_json(damaged)


def test_the_courses_of_runs_are_not_kept():
    course = (CurvePoint(10, 9, 100, {"val_top1": 0.5}),)
    with_course = replace(WHOLE, arms=(replace(FULL, arm=arm("fp32", [0.9], course=course)), OTHER))
    kept = from_json(with_course.to_dict())
    assert [run.course for run in kept.arms[0].arm.runs] == [()]


def test_groups_of_comparisons_come_back_from_their_file(tmp_path):
    path = tmp_path / "comparison.json"
    with pytest.raises(StorageError, match=r"cannot read .*comparison\.json"):
        read_comparisons(path)
    write_comparisons(path, {"": WHOLE, "mlp": replace(WHOLE, reference="other")})
    parse_strict(path.read_text())
    found = {name: comparison.to_dict() for name, comparison in read_comparisons(path).items()}
    assert found == {"": WHOLE.to_dict(), "mlp": replace(WHOLE, reference="other").to_dict()}


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


def test_a_verdict_is_printed_with_its_reason_and_with_every_objection():
    whole = replace(WHOLE, objections=(Objection("A" * 300 + " differs", True), Objection("b <i> lacks seed 3", False)))
    for shown in (repr(whole), str(whole)):
        head, reference, other, reason, *qualified = shown.splitlines()
        assert [part for part in head.split("  ") if part][2].strip() == "top1 (test) ± 95 % CI"
        assert reference.split() == ["fp32", "1", "of", "2", "0.5000", "-", "reference"]
        assert other.split()[-1] == "undecided"
        assert "-0.10 [-0.20, 0.00]" in other
        assert reason == '- amp_dynamic: says "no" <b>'
        expected = f"- Not comparable: {'A' * 300} differs - Caveat: b <i> lacks seed 3 - note"
        assert "".join(qualified).replace(" ", "") == expected.replace(" ", "")
    page = whole._repr_html_()
    assert '<td class="">undecided</td>' in page
    assert "says &#34;no&#34; &lt;b&gt;" in page
    assert "<li>Caveat: b &lt;i&gt; lacks seed 3</li>" in page
    assert "A" * 300 in page
    assert "<i>" not in page


def test_an_arm_is_one_line_and_many_arms_are_counted():
    assert repr(OTHER) == "<amp_dynamic: runs 1, mean 0.5000, difference -0.10 [-0.20, 0.00], undecided>"
    many = replace(WHOLE, arms=(FULL, *(replace(OTHER, arm=replace(OTHER.arm, name=f"arm{at}")) for at in range(30))))
    lines = repr(many).splitlines()
    assert lines[13] == "... and 19 more arms"
    assert len(lines) == 14 + 11 + 2
    assert ">arm10<" in many._repr_html_()
    assert ">arm11<" not in many._repr_html_()


def test_a_table_of_pandas_has_a_row_for_each_arm_and_the_objections_in_each():
    pytest.importorskip("pandas")
    table = WHOLE.to_dataframe()
    assert list(table["arm"]) == ["fp32", "amp_dynamic"]
    assert list(table["runs"]) == [2, 1]
    assert table["difference_low"][1] == -0.2
    assert math.isnan(table["difference_low"][0])
    assert table["speed_high"][1] == 1.6
    assert list(table["limits"]) == ["Not comparable: what; note"] * 2
    assert {"verdict", "why", "skip_rate", "mean", "mean_high", "failed"} <= set(table)


def test_without_pandas_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EnvironmentRefused, match=r"to_dataframe\(\) needs the package pandas") as refused:
        WHOLE.to_dataframe()
    assert refused.value.hint == "pip install pandas"
