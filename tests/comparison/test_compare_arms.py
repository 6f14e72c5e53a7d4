"""Whole comparisons, from run directories to verdicts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from comparison.fake_runs import SOME_RECORDS, arm, epoch, failed, measures, some_summary, write_run, yaml_of

from mptrain.comparison.arms import group_into_arms
from mptrain.comparison.compare_arms import compare
from mptrain.comparison.results import Arm
from mptrain.comparison.run_measures import measure
from mptrain.system.errors import UsageError

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
        records = [*SOME_RECORDS, epoch(1, 30, 28, top1=top1)]
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
    assert other.difference.mean == pytest.approx(0.000125)
    assert other.metric.mean == pytest.approx(sum(amp) / 4)
    assert (other.speed.mean, other.memory.mean) == (pytest.approx(1.5), pytest.approx(0.5))
    assert other.energy.mean == pytest.approx(1.0)
    assert (other.throughput.mean, other.peak.mean, other.failed, other.missing) == (150.0, 500.0, 0, 0)
    assert other.differs["precision.name"] == ("fp32", "amp_dynamic")
    assert [(one.by, one.at, one.quantity) for one in other.aligned] == [
        ("updates", 28, "val_top1"),
        ("samples", 285, "val_top1"),
    ]
    assert [one.difference is None for one in reference.aligned] == [True, True]
    assert found.objections == ()
    assert found.notes[0] == "made by hand"
    assert "the test split has 397 samples: one sample is 0.0025 of top1" in found.notes[1]


def test_an_arm_below_the_reference_is_worse_and_above_it_better(arms):
    assert compare(arms(amp=[value - 0.1 for value in FULL])).arms[1].verdict.word == "worse"


def test_another_metric_and_its_direction(arms):
    found = compare(arms(amp=[value - 0.1 for value in FULL]), metric="loss")
    assert (found.metric, found.higher_is_better) == ("loss", False)
    assert found.arms[1].difference.mean == pytest.approx(0.1)
    assert found.arms[1].verdict.word == "worse"


def test_a_metric_that_no_run_has_is_refused():
    for wanted, hint in (("lss", "did you mean loss?"), ("zzz", "recorded metrics: loss, top1")):
        with pytest.raises(UsageError) as caught:
            compare([arm("fp32", [0.9]), arm("amp_dynamic", [0.9])], metric=wanted)
        assert caught.value.hint == hint


def test_shares_are_better_when_higher_though_the_tasks_metric_is_not(arms):
    two = [each(one, metric_name="perplexity", higher_is_better=False) for one in arms()]
    assert compare(two, metric="top1").higher_is_better


def test_without_a_metric_of_the_task_the_loss_is_compared(arms):
    found = compare([each(one, metric_name=None) for one in arms()])
    assert (found.metric, found.higher_is_better) == ("loss", False)


def test_a_metric_of_unknown_direction_is_said_to_be(arms):
    two = [each(one, metrics={"x": 1.0}, metric_name=None, higher_is_better=None) for one in arms()]
    assert any("the direction of x is not recorded" in note for note in compare(two, metric="x").notes)


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


def test_runs_that_did_not_end_count_neither_as_failed_nor_as_sound(arms):
    two = arms(full=[0.95] * 8, amp=[0.95] * 8)
    runs = [failed(run) for run in two[0].runs[:6]] + [replace(run, status="preempted") for run in two[0].runs[6:]]
    found = compare([Arm("amp_dynamic", tuple(runs)), two[1]]).arms[1]
    assert "6 of 6 runs failed" in found.verdict.why
    assert "0 of 8 pairs are complete, seeds 6, 7 did not finish in both arms" in found.verdict.why


def test_a_metric_that_is_not_finite_is_a_failure_and_a_run_without_end_is_missing(arms):
    amp, full = arms()
    runs = (
        replace(amp.runs[0], metrics={"top1": math.nan}),
        replace(amp.runs[1], status="preempted", exit_code=75),
        *amp.runs[2:],
    )
    found = compare([Arm("amp_dynamic", runs), full]).arms[1]
    assert (found.failed, found.missing, found.difference.n, found.metric.n) == (1, 1, 2, 2)
    assert found.verdict.word == "undecided"
    assert "seed 0 failed numerically" in found.verdict.why


def test_one_seed_decides_nothing(arms):
    found = compare(arms(full=[0.95], amp=[0.10])).arms[1]
    assert found.verdict.word == "undecided"
    assert found.equivalence is None
    assert math.isnan(found.difference.low)


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
    span = (("host", "1", "9"),)
    two = arms(attempts=span)
    third = Arm("third", two[0].runs)
    notes = "\n".join(compare([*two, third]).notes)
    assert "2 arms are compared with the reference at 95 % each" in notes
    assert "false equivalence, is up to 10 %" in notes
    assert "verdicts are per arm" in notes
    assert "up to 8 of these runs ran on one machine" in notes


def test_a_margin_below_one_sample_is_noted(arms):
    assert any("less than one sample" in note for note in compare(arms(), margin=0.001).notes)


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
    equal = compare(arms(full=[0.95] * 3, amp=[0.95] * 3)).arms[1]
    assert equal.verdict.word == "equivalent"
    half = 4.3027 / 397 / math.sqrt(3)  # Student's t for 2 degrees of freedom
    assert equal.difference.high == pytest.approx(half / math.sqrt(6), rel=1e-4)
    assert equal.metric.high - 0.95 == pytest.approx(half / math.sqrt(12), rel=1e-4)


def test_a_loss_has_no_steps(arms):
    found = compare(arms(full=[0.95] * 3, amp=[0.95] * 3), metric="loss").arms[1]
    assert (found.difference.low, found.difference.high) == (0.0, 0.0)
    assert "bitwise equal" in found.verdict.why


def test_a_reference_that_failed_at_most_seeds_leaves_no_arm_equivalent(arms):
    other, full = arms(full=[0.95] * 8, amp=[0.95] * 8)
    broken = Arm("fp32", (*(failed(run) for run in full.runs[:5]), *full.runs[5:]))
    found = compare([other, broken]).arms[1]
    assert found.verdict.word == "undecided"
    assert "seeds 0, 1, 2, 3, 4 of the reference failed numerically" in found.verdict.why
    assert "3 of 8 pairs are complete" in found.verdict.why


def test_arms_that_are_the_same_runs_are_said_to_be(arms):
    same, full = arms()
    third = Arm("third", tuple(replace(run, metrics={**run.metrics, "loss": 0.25}) for run in same.runs))
    found = {result.arm.name: " ".join(result.remarks) for result in compare([full, same, third]).arms}
    assert "bitwise identical to fp32" in found["amp_dynamic"]
    assert "bitwise identical" not in found["fp32"] + found["third"]


def test_runs_that_are_too_short_to_time_are_said_to_be(arms):
    found = compare(arms(terms_per_second=None, steady_steps=12)).arms[1]
    assert any("4 of 4 runs were too short to time: at most 12 steps after warm-up" in one for one in found.remarks)


def test_ratios_of_two_runs_have_no_interval_and_speeds_are_never_below_zero(arms):
    first, second = arms()
    few = [Arm(arm.name, arm.runs[:2]) for arm in (first, second)]
    result = compare(few).arms[1]
    for interval in (result.speed, result.time, result.memory, result.throughput, result.peak):
        assert interval is not None
        assert interval.n == 2
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
    speeds = (5.0, 4000.0, 9.0, 8000.0)
    uneven = [replace(run, terms_per_second=speed) for run, speed in zip(second.runs, speeds, strict=False)]
    found = compare([Arm(second.name, tuple(uneven)), Arm(first.name, first.runs[:4])], anyway=True)
    [throughput] = [one.throughput for one in found.arms if one.arm.name == second.name]
    assert throughput.low == 0
    assert throughput.high > throughput.mean
