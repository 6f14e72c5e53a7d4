"""Whole comparisons, from run directories to verdicts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from mptrain.study.comparison.arms import group_into_arms
from mptrain.study.comparison.compare_arms import compare
from mptrain.study.comparison.logs.compare_logs import LoggedArm
from mptrain.study.comparison.results import Arm
from mptrain.study.comparison.run_measures import measure
from mptrain.system.errors import UsageError
from mptrain.system.records import EventRecord
from tests.study.comparison.fake_runs import (
    SOME_RECORDS,
    arm,
    epoch,
    failed,
    measures,
    some_summary,
    write_run,
    yaml_of,
)

FULL = [0.950, 0.955, 0.960, 0.952]


@pytest.fixture
def arms(tmp_path):
    """Makes an FP32 arm and another, with directories: accuracies by seed, and changes of the other arm's measures."""
    places = itertools.count()

    def make(full=FULL, amp=FULL, keys=None, **changes):
        place = tmp_path / str(next(places))
        place.mkdir()
        other = made(place, "amp_dynamic", amp, keys or {})
        return [each(other, **changes), made(place, "fp32", full, {})]

    return make


def made(place, mode, top1s, keys):
    runs = []
    for seed, top1 in enumerate(top1s):
        start = EventRecord("start", 0, {"initial_weights": f"weights {seed}"})
        records = [start, *SOME_RECORDS[1:], epoch(1, 30, 28, top1=top1)]
        summary = some_summary(test={"loss": 1 - top1, "top1": top1})
        config = yaml_of(seed, mode, **keys)
        runs.append(measure(write_run(place, f"{mode}{seed}", config=config, records=records, summary=summary)))
    return Arm(mode, tuple(runs))


def each(one, **changes):
    """The arm with other measures."""
    return Arm(one.name, tuple(replace(run, **changes) for run in one.runs))


def test_equal_arms_are_equivalent_and_everything_is_said(arms):
    amp = [value + shift for value, shift in zip(FULL, (0.001, -0.001, 0.0005, 0.0), strict=True)]
    found = compare(arms(amp=amp, terms_per_second=150.0, peak_memory=500), notes=["made by hand"])
    assert (found.metric, found.higher_is_better, found.split, found.margin) == ("top1", True, "test", 0.01)
    assert [one.arm.name for one in found.arms] == ["fp32", "amp_dynamic"]
    reference, other = found.arms
    assert (reference.verdict.word, reference.difference, reference.speed) == ("reference", None, None)
    assert other.verdict.word == "equivalent"
    means = (other.difference.mean, other.metric.mean, other.speed.mean, other.memory.mean, other.energy.mean)
    assert means == pytest.approx((0.000125, sum(amp) / 4, 1.5, 0.5, 1.0))
    assert (other.throughput.mean, other.peak.mean, other.failed, other.missing) == (150.0, 500.0, 0, 0)
    assert other.differs["precision.name"] == ("fp32", "amp_dynamic")
    aligned = [(one.by, one.at, one.quantity) for one in other.aligned]
    assert aligned == [("updates", 28, "val_top1"), ("samples", 285, "val_top1")]
    assert [one.difference is None for one in reference.aligned] == [True, True]
    assert found.objections == ()
    assert found.notes[0] == "made by hand"
    assert "one sample is 0.0025 of top1" in found.notes[1]
    assert any("less than one sample" in note for note in compare(arms(), margin=0.001).notes)


def test_another_metric_and_its_direction(arms):
    found = compare(arms(amp=[value - 0.1 for value in FULL]), metric="loss")
    assert (found.metric, found.higher_is_better) == ("loss", False)
    assert found.arms[1].difference.mean == pytest.approx(0.1)
    assert found.arms[1].verdict.word == "worse"
    perplexity = [each(one, metric_name="perplexity", higher_is_better=False) for one in arms()]
    assert compare(perplexity, metric="top1").higher_is_better  # shares are better when higher
    nameless = compare([each(one, metric_name=None) for one in arms()])
    assert (nameless.metric, nameless.higher_is_better) == ("loss", False)
    two = [each(one, metrics={"x": 1.0}, metric_name=None, higher_is_better=None) for one in arms()]
    assert any("direction of x is not recorded" in note for note in compare(two, metric="x").notes)


def test_a_metric_that_no_run_has_is_refused():
    for wanted, hint in (("lss", "did you mean loss?"), ("zzz", "recorded metrics: loss, top1")):
        with pytest.raises(UsageError) as caught:
            compare([arm("fp32", [0.9]), arm("amp_dynamic", [0.9])], metric=wanted)
        assert caught.value.hint == hint


def test_runs_of_different_tasks_are_not_compared():
    two = [arm("fp32", [0.9]), arm("amp_dynamic", [0.9], metric_name="perplexity")]
    with pytest.raises(UsageError, match="different metrics: top1, perplexity"):
        compare(two)


def test_failed_runs_are_counted_and_decide(arms):
    two = arms(full=[0.95] * 8, amp=[0.95] * 8)
    broken = Arm("amp_dynamic", tuple(failed(run) for run in two[0].runs))
    found = compare([broken, two[1]]).arms[1]
    assert found.verdict.word == "worse"
    assert "8 of 8 runs failed" in found.verdict.why
    assert (found.failed, found.missing, found.metric, found.difference, found.speed) == (8, 0, None, None, None)
    assert any("did not finish" in remark for remark in found.remarks)


def test_a_metric_of_nan_is_a_failure_and_a_run_without_end_missing(arms):
    amp, full = arms()
    broken, stopped = replace(amp.runs[0], metrics={"top1": math.nan}), replace(amp.runs[1], status="preempted")
    found = compare([Arm("amp_dynamic", (broken, stopped, *amp.runs[2:])), full]).arms[1]
    assert (found.failed, found.missing, found.difference.n, found.metric.n) == (1, 1, 2, 2)
    assert found.verdict.word == "undecided"
    assert "seed 0 failed numerically" in found.verdict.why


def test_speeds_are_compared_only_where_both_are_known(arms):
    found = compare(arms(terms_per_second=None, energy=None, peak_memory=0)).arms[1]
    assert (found.speed, found.energy, found.memory, found.throughput, found.peak) == (None,) * 5
    assert found.time.mean == pytest.approx(1.0)


def test_an_unfair_comparison_has_numbers_and_no_verdict_unless_one_insists(arms):
    two = arms(keys={"train__batch_size": 20})
    found = compare(two)
    assert found.objections[0].fatal
    assert "train.batch_size is 10 in fp32, 20 in amp_dynamic" in found.objections[0].what
    assert found.arms[0].verdict.word == "reference"
    assert found.arms[1].verdict.word == "undecided"
    assert found.arms[1].verdict.why == f"the comparison is unfair: {found.objections[0].what}"
    assert compare(two, anyway=True).arms[1].verdict.word == "equivalent"
    assert compare(two, claimed=["train.batch_size"]).arms[1].verdict.word == "equivalent"


def test_another_split_is_fatal_and_left_out(arms):
    found = compare(arms(split="val"))
    assert found.objections[0].fatal
    assert "amp_dynamic was evaluated on val, others on test" in found.objections[0].what
    assert (found.arms[1].metric, found.arms[1].missing) == (None, 4)


def test_several_comparisons_at_once_and_a_busy_machine_are_noted(arms):
    two = arms(attempts=(("host", "1", "9"),))
    notes = "\n".join(compare([*two, Arm("third", two[0].runs)]).notes)
    assert "2 arms are compared with the reference at 95 % each" in notes
    assert "false equivalence, is up to 10 %" in notes
    assert "up to 8 of these runs ran on one machine" in notes


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan, math.inf])
def test_a_margin_that_is_none_is_refused(margin):
    with pytest.raises(UsageError, match="margin"):
        compare([arm("fp32", [0.9]), arm("amp_dynamic", [0.9])], margin=margin)


def test_one_arm_alone_or_an_empty_one_is_refused():
    with pytest.raises(UsageError, match="all runs belong to one arm, fp32"):
        compare(group_into_arms([measures(0), measures(1)]))
    with pytest.raises(UsageError, match="no run of b"):
        compare([arm("fp32", [0.9]), Arm("b", ())])


def test_equal_accuracies_of_few_seeds_are_no_certainty(arms):
    shifted = [value - 3 / 397 for value in FULL[:2]]
    found = compare(arms(full=FULL[:2], amp=shifted)).arms[1]
    assert found.verdict.word == "undecided"
    assert found.difference.low < 0 < found.difference.high
    assert found.equivalence.power < 1
    alike = arms(full=[0.95] * 3, amp=[0.95] * 3)
    equal = compare(alike).arms[1]
    assert equal.verdict.word == "equivalent"
    half = 4.3027 / 397 / math.sqrt(3)  # Student's t for 2 degrees of freedom
    assert equal.difference.high == pytest.approx(half / math.sqrt(6), rel=1e-4)
    assert equal.metric.high - 0.95 == pytest.approx(half / math.sqrt(12), rel=1e-4)
    loss = compare(alike, metric="loss").arms[1]  # which has no steps
    assert (loss.difference.low, loss.difference.high) == (0.0, 0.0)
    assert "bitwise equal" in loss.verdict.why


def test_arms_that_are_the_same_runs_are_said_to_be(arms):
    same, full = arms()
    third = Arm("third", tuple(replace(run, metrics={**run.metrics, "loss": 0.25}) for run in same.runs))
    found = {result.arm.name: " ".join(result.remarks) for result in compare([full, same, third]).arms}
    assert "bitwise identical to fp32" in found["amp_dynamic"]
    assert "bitwise identical" not in found["fp32"] + found["third"]


def test_runs_that_are_too_short_to_time_are_said_to_be(arms):
    found = compare(arms(terms_per_second=None, steady_steps=12)).arms[1]
    assert any("4 of 4 runs were too short to time: at most 12 steps after warm-up" in one for one in found.remarks)


def test_ratios_of_two_runs_have_no_interval_and_no_speed_is_below_0(arms):
    first, second = arms()
    result = compare([Arm(arm.name, arm.runs[:2]) for arm in (first, second)]).arms[1]
    for interval in (result.speed, result.time, result.memory, result.throughput, result.peak):
        assert (interval.n, math.isnan(interval.low), math.isnan(interval.high)) == (2, True, True)
    speeds = (5.0, 4000.0, 9.0, 8000.0)
    uneven = [replace(run, terms_per_second=speed) for run, speed in zip(second.runs, speeds, strict=True)]
    found = compare([Arm(second.name, tuple(uneven)), first], anyway=True)
    [throughput] = [one.throughput for one in found.arms if one.arm.name == second.name]
    assert throughput.low == 0
    assert throughput.high > throughput.mean


def test_untrained_arms_are_not_equivalent_and_the_headline_says_so(arms):
    untrained = {"losses": (2.3, 2.3)}
    found = compare([each(one, **untrained) for one in arms(full=[0.95] * 3, amp=[0.95] * 3)]).arms[1]
    assert (found.word, found.verdict.word) == ("neither has learned",) * 2
    assert "arms that learn nothing agree" in found.why


def test_a_comparison_prints_as_a_table_and_its_arms_are_like_those_of_logs(arms):
    found = compare(arms())
    head, *rows = repr(found).splitlines()
    assert head.split()[:4] == ["arm", "runs", "top1", "(test)"]
    assert [row.split()[0] for row in rows[:2]] == ["fp32", "amp_dynamic"]
    assert len(rows) <= 12
    assert len(repr(found.arms[1])) < 160
    arm, logged = found.arms[1], LoggedArm("amp", (), None, None, math.nan, None, math.nan, math.nan, "undecided", "")
    for name in ("name", "runs", "mean", "difference", "word", "why"):
        assert hasattr(arm, name)
        assert hasattr(logged, name)
    assert (arm.name, arm.runs, arm.mean, arm.word, arm.why) == (
        arm.arm.name, arm.arm.runs, arm.metric, arm.verdict.word, arm.verdict.why,
    )  # fmt: skip
