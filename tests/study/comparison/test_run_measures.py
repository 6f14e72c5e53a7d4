"""From run directories to measures: what is on record arrives, what is not stays unknown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mptrain.config.config_diff import flat_settings
from mptrain.runlog import open_run, read_run
from mptrain.study.comparison.run_measures import measure
from mptrain.system.errors import StorageError
from mptrain.system.records import EvalRecord, EventRecord, ExponentCounts, HistogramRecord, OverflowRecord
from tests.study.comparison.fake_runs import SOME_DATA, SOME_RECORDS, epoch, some_summary, step, write_run, yaml_of

FAILED = ("failed", "every step overflowed", 4, 3)


def test_a_finished_run_says_everything(tmp_path):
    summary = some_summary(unusable_samples={"test": 1})
    found = measure(write_run(tmp_path, config=yaml_of(3, "amp_dynamic"), summary=summary))
    assert (found.seed, found.status, found.exit_code, found.reason) == (3, "done", 0, "")
    assert found.chosen["precision"] == "amp_dynamic"
    assert (found.metrics, found.metric_name, found.higher_is_better) == ({"loss": 0.4, "top1": 0.9}, "top1", True)
    assert (found.split, found.samples) == ("test", 397)
    assert (found.steps, found.updates, found.skipped) == (30, 28, 2)
    assert found.skip_rate == pytest.approx(2 / 30)
    assert found.overflows == {"calibrating": 2}
    assert found.scale == {"first": 65536.0, "min": 16384.0, "max": 65536.0, "last": 16384.0}
    assert (found.terms_per_second, found.term, found.train_seconds) == (100.0, "samples", 3.2)
    assert (found.peak_memory, found.memory_before, found.energy, found.data_wait) == (1000, 400, 12.5, 0.25)
    assert (found.threads, found.facts["unaligned"]) == (2, 0.5)
    assert found.initial_weights == "abc"
    assert found.data == {0: ("o0", "b0"), 1: ("o1", "b1")}
    assert (found.changes, found.unusable, found.steady_steps) == ((), {"test": 1}, 20)
    assert [host for host, _, _ in found.attempts] == [read_run(tmp_path / "a").state.attempts[0].host]


def test_zero_gradients_are_the_mean_over_the_steps_that_were_looked_at(tmp_path):
    def looked_at(step, zeros, nonzero, overflow=False):
        counts = ExponentCounts("float16", zeros, 0, 0, 1.0, -3, (nonzero,))
        return HistogramRecord("main", step, 8.0, overflow, {"activation_gradients": {"1": counts, "3": counts}}, {})

    records = [*SOME_RECORDS, looked_at(1, 1, 3), looked_at(10, 3, 1), looked_at(20, 4, 0, overflow=True)]
    assert measure(write_run(tmp_path, records=records)).zero_gradients == pytest.approx(0.5)
    assert measure(write_run(tmp_path / "other", records=SOME_RECORDS)).zero_gradients is None


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ({}, 0.75),
        ({"precision__master_weights": True}, None),
        ({"precision__rounding": "stochastic"}, None),
    ],
)
def test_lost_updates_are_those_of_half_weights_without_anything_that_keeps_them(tmp_path, mode, expected):
    def looked_at(step, lost):
        counts = {name: ExponentCounts(name, 0, 0, 0, 1.0, -3, (8,)) for name in ("bfloat16", "float32")}
        sums = {"bfloat16": (8, lost, 1.0, 0.5, 0.5), "float32": (8, 8, 1.0, 1.0, 0.0)}  # kept in FP32: nothing is lost
        return HistogramRecord("main", step, 1.0, False, {"weights": counts}, {}, {}, sums)

    records = [*SOME_RECORDS, looked_at(1, 4), looked_at(10, 8)]
    config = yaml_of(0, "fp16_static", **{"precision__master_weights": False, **mode})
    assert measure(write_run(tmp_path, config=config, records=records)).lost_updates == expected
    assert measure(write_run(tmp_path / "without", config=config)).lost_updates is None


def test_the_course_of_a_run_counts_its_samples(tmp_path):
    records = [*SOME_RECORDS, epoch(1, 10, 9, top1=0.8), epoch(2, 30, 28, top1=0.9)]
    found = measure(write_run(tmp_path, records=records, summary=some_summary()))
    assert [(moment.samples, moment.values["val_top1"]) for moment in found.course] == [(95, 0.8), (285, 0.9)]
    unfinished = measure(write_run(tmp_path, "b", records=records, end=None))
    assert [moment.samples for moment in unfinished.course] == [100, 300]  # by the batch size


def test_what_an_older_run_does_not_say_stays_unknown(tmp_path):
    newer = ("higher_is_better", "steady_terms_per_second", "data_wait", "energy_joules", "memory_before", "facts")
    newer += ("steady_steps",)
    summary = {name: value for name, value in some_summary().items() if name not in newer}
    records = [record for record in SOME_RECORDS if isinstance(record, EvalRecord)]
    found = measure(write_run(tmp_path, summary=summary, records=records, data=None))
    assert (found.data_card, found.unusable, found.steady_steps) == ("", {}, None)
    assert (found.higher_is_better, found.terms_per_second, found.energy) == (None, None, None)
    assert math.isnan(found.data_wait)
    assert (found.memory_before, found.facts, found.initial_weights, found.data) == (0, {}, "", {})
    assert found.metrics["top1"] == 0.9


def test_a_failed_run_without_a_summary_is_measured_by_its_records(tmp_path):
    overflow = OverflowRecord("main", 2, 4.0, "calibrating", "finite", (), 1, True, 0)
    records = [
        EvalRecord("val", 1, 0, 200, {"loss": math.nan, "top1": 0.1}),
        step(1, 1, scale=8.0),
        step(2, 1, skipped=True, scale=4.0),
        overflow,
        step(3, 2, scale=16.0),
        epoch(1, 2, 1),
        epoch(2, 3, 2),
    ]
    found = measure(write_run(tmp_path, records=records, end=FAILED))
    assert (found.status, found.exit_code, found.reason) == ("failed", 4, "every step overflowed")
    assert (found.steps, found.updates, found.skipped) == (3, 2, 1)
    assert found.skip_rate == pytest.approx(1 / 3)
    assert found.overflows == {"calibrating": 1}
    assert found.scale == {"first": 8.0, "min": 4.0, "max": 16.0, "last": 16.0}
    assert (found.train_seconds, found.terms_per_second, found.threads) == (3.0, None, 1)
    assert found.split == "val"
    assert math.isnan(found.metrics["loss"])


def test_a_failed_run_keeps_the_numbers_of_its_own_end_only(tmp_path):
    summary = some_summary(test={"loss": math.nan, "top1": 0.1})
    found = measure(write_run(tmp_path, summary=summary, end=("failed", "the run diverged", 4, 30)))
    assert math.isnan(found.metrics["loss"])
    assert (found.metrics["top1"], found.steps) == (0.1, 30)
    records = [*SOME_RECORDS, step(1, 1), step(2, 2)]
    found = measure(write_run(tmp_path, "later", records=records, summary=some_summary(), end=FAILED))
    assert (found.steps, found.metric_name) == (2, None)


def test_a_run_that_just_began_is_measured(tmp_path):
    found = measure(write_run(tmp_path, records=[], end=None))
    assert (found.status, found.steps, found.metrics, found.scale, found.split) == ("running", 0, {}, {}, "")
    assert math.isnan(found.train_seconds)
    assert found.attempts == ()


def test_several_learners_count_the_fewest_updates_and_all_skips(tmp_path):
    one = some_summary()["learners"]["main"]
    two = {**one, "updates": 20, "skipped": 10, "overflows": {"calibrating": 1, "unexpected": 9}}
    found = measure(write_run(tmp_path, summary=some_summary(learners={"d": one, "g": two})))
    assert (found.updates, found.skipped) == (20, 12)
    assert found.skip_rate == pytest.approx(12 / 60)
    assert found.overflows == {"calibrating": 3, "unexpected": 9}


def test_damage_is_located(tmp_path):
    with pytest.raises(StorageError, match=r"no config\.yaml"):
        measure(write_run(tmp_path, "a", config="", end=None))
    run = write_run(tmp_path, "b", records=[*SOME_RECORDS, EventRecord("data_order", 30, {"epoch": 3})])
    with pytest.raises(StorageError, match=r"events\.jsonl, line 7 is damaged: .*data_order"):
        measure(run)
    run = write_run(tmp_path, "c")
    run.paths.data.write_text("{")
    with pytest.raises(StorageError, match=r"data\.json"):
        measure(run)


def test_changes_of_the_configuration_on_the_way_are_kept(tmp_path):
    lr, epochs = "optimizer.lr was 0.1, now 0.2", "train.epochs was 3, now 4"
    run = write_run(tmp_path, summary=some_summary())
    state = run.state.begin(10, [lr]).end("failed", "", 6, 12).begin(10).begin(20, [epochs]).end("done", "", 0, 30)
    open_run(run.paths.root).write_state(state)
    assert measure(read_run(run.paths.root)).changes == (lr, epochs)


def test_the_digest_of_the_data_does_not_depend_on_their_place(tmp_path):
    def digest(name, **changes):
        return measure(write_run(tmp_path, name, data={**SOME_DATA, **changes})).data_card

    here = digest("a")
    assert len(here) == 64
    assert digest("b", files={"test": ["/elsewhere/digits.txt"]}) == here
    assert digest("c", files={"test": ["/data/other.txt"]}) != here
    assert digest("d", labels=["1", "0"]) != here
    old = {"num_classes": 10, "in_channels": 1, "image_size": 8}
    assert digest("e", **old) == digest("f", **old, num_outputs=10, input_shape=[1, 8, 8])  # of earlier versions
    assert digest("g", num_outputs=2, input_shape=[5]) != digest("h", num_outputs=2, input_shape=[6])


@pytest.mark.parametrize(("ranks", "known"), [(1, None), (2, 2)])
def test_the_number_of_ranks_is_known_also_of_torchrun(tmp_path, ranks, known):
    config = yaml_of(distributed={"kind": "ddp", "deeper": {"procs": 7}, "procs": None, "timeout": 1800.0})
    run = write_run(tmp_path, config=config, summary=some_summary(steady_steps=19))
    measured = measure(replace(run, state=replace(run.state, ranks=ranks)))
    assert flat_settings(measured.config) == {**flat_settings(config), "distributed.procs": known}
    assert measured.terms_per_second is None  # too few steps after warm-up
