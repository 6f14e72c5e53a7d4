"""Rules replayed over runs: under its own rule a run gives the scales on its record, under another what its gradients tell."""

import json
import math

import pytest

from mptrain.config.compose import compose
from mptrain.lab.replay import replay_run
from mptrain.run.resume import launch, resume
from mptrain.runlog import RecordWriter, RunDirectory, RunPaths, RunState
from mptrain.runlog.run_reader import read_run
from mptrain.system.errors import ConfigError, DataError, StorageError, UsageError
from mptrain.system.records import ExponentCounts, HistogramRecord, StepRecord
from tests.small_runs import TINY

FP16 = (*TINY, "precision=fp16_dynamic")
SEEN = ("diagnostics=histograms", "diagnostics.every=1")


def silent(opening):
    return ()


def trained(root, *words):
    launch(compose([*words, f"run.root={root}", "run.name=run"]), silent)
    return str(root / "run")


def scales_of(run, learner="main"):
    from pathlib import Path

    return [record.loss_scale for record in read_run(Path(run)).steps() if record.learner == learner]


def written(root, steps, looks=(), words=(), config=("precision=fp16_dynamic", "model=mlp"), dtype="float16"):
    """A run directory with a trace written by hand; ``steps`` are (scale, overflow) or (scale, overflow, loss)."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    directory = RunDirectory(paths)
    directory.write_state(RunState(id="run", argv=(), command="mptrain").begin().end("done", "", 0, len(steps)))
    directory.write_config(compose([*config, *words]).yaml, words)
    writer, updates = RecordWriter(paths), 0
    for number, (scale, overflow, *loss) in enumerate(steps, 1):
        updates += not overflow
        norm = math.inf if overflow else 1.0
        writer.take(StepRecord("main", number, updates, 0, *(loss or [1.0]), scale, overflow, overflow, norm, 0.1))
    for number, scale, largest in looks:
        counts = _counts(largest, dtype)
        tensors = {"activation_gradients": {"0": counts}, "weight_gradients": {"0.weight": counts}}
        writer.take(HistogramRecord("main", number, scale, False, tensors, {}))
    writer.close()
    return str(root)


def _counts(largest, dtype):
    exponent = math.frexp(largest)[1] - 1
    return ExponentCounts(dtype, 90, 0, 0, largest, exponent, (10,))


# ---- the run's own rule ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("scaler=dynamic", "scaler.init_scale=16777216", "scaler.growth_interval=3"),
        ("scaler=static", "scaler.scale=524288"),
        ("scaler=megatron", "scaler.init_scale=16777216", "scaler.growth_interval=3"),
        ("scaler=deepspeed", "scaler.init_scale=16777216", "scaler.growth_interval=3"),
        ("scaler=fairseq", "scaler.init_scale=16777216", "scaler.growth_interval=3", "scaler.tolerance=0.3"),
        ("scaler=mxnet", "scaler.init_scale=16777216", "scaler.growth_interval=3"),
        ("scaler=paddle", "scaler.init_scale=16777216", "scaler.growth_interval=3"),
        ("scaler=smooth", "scaler.init_scale=16384", "scaler.max_scale=16777216", "scaler.interval=4"),
        ("scaler=logmax", "scaler.max_scale=16777216", "scaler.deviations=0", "scaler.overflow_counts_as=16", *SEEN),
        ("scaler=als", *SEEN),
    ],
    ids=lambda words: words[0].removeprefix("scaler="),
)
def test_under_its_own_rule_a_run_gives_exactly_the_scales_on_its_record(tmp_path, words):
    run = trained(tmp_path, *FP16, *words)
    (learner,) = replay_run(run, ()).learners
    scales = scales_of(run)
    assert learner.parted is None
    assert learner.same == learner.known == len(scales) == 18
    assert learner.replayed.scales.extremes() == learner.recorded.scales.extremes()
    assert (learner.replayed.updates, learner.replayed.skipped) == (learner.recorded.updates, learner.recorded.skipped)
    if words[0] != "scaler=static":
        assert len(set(scales)) > 2  # there is something to follow
    if words[0] not in ("scaler=als", "scaler=logmax"):
        assert learner.recorded.overflows > 0


def test_a_run_that_was_interrupted_and_resumed_is_replayed_as_one(tmp_path):
    words = (*FP16, "scaler.init_scale=16777216", "scaler.growth_interval=3")
    run = trained(tmp_path, *words, "train.max_steps=8")
    resume(run, ["train.max_steps=18"], silent)
    replay = replay_run(run, ())
    assert replay.learners[0].parted is None
    assert replay.learners[0].same == 18
    assert replay.notes == ()


def test_a_rule_that_was_changed_on_the_way_is_said(tmp_path):
    run = trained(tmp_path, *FP16, "scaler.init_scale=16777216", "train.max_steps=8")
    resume(run, ["train.max_steps=18", "scaler.growth_interval=3"], silent)
    (note,) = replay_run(run, ()).notes
    assert "changed after step 8 (scaler.growth_interval was 2000, now 3)" in note


@pytest.mark.long
def test_each_learner_is_replayed_by_its_own_rule(tmp_path):
    gan = (
        "task=gan",
        "model=dcgan",
        "model.width=8",
        "dataset=digits",
        "dataset.image_size=16",
        "dataset.train_samples=64",
    )
    rules = ("scaler.init_scale=16777216", "scaler.growth_interval=5", "learners.generator.scaler.growth_interval=2")
    run = trained(tmp_path, *gan, *rules, "precision=fp16_dynamic", "train.batch_size=16", "train.max_steps=24")
    replay = replay_run(run, ())
    assert [one.name for one in replay.learners] == ["discriminator", "generator"]
    for one in replay.learners:
        assert one.parted is None
        assert one.same == 24
        assert one.replayed.overflows > 0
    assert scales_of(run, "generator") != scales_of(run, "discriminator")
    alike = replay_run(run, ["learners.generator.scaler.growth_interval=5"]).learners
    assert alike[0].parted is None
    assert alike[1].parted is not None


# ---- another rule ------------------------------------------------------------------------------------------------


def test_another_rules_scales_follow_from_the_verdicts_of_the_run(tmp_path):
    """Recorded at 64: clean but for steps 3 and 6; the third overflow has a lost loss."""
    run = written(tmp_path / "run", [(64.0, step in (3, 6), math.nan if step == 6 else 1.0) for step in range(1, 9)])
    words = ["scaler=dynamic", "scaler.init_scale=128", "scaler.growth_interval=2"]
    (learner,) = replay_run(run, words).learners
    steps, scales = learner.replayed.scales.extremes()
    # At 128 step 1 is estimated to overflow, as step 3 did at 64.
    assert dict(zip(steps, scales, strict=True)) == {1: 128, 2: 64, 3: 64, 4: 32, 5: 32, 6: 64, 7: 32, 8: 32}
    assert learner.replayed.marks.extremes()[0] == [1, 3, 6]
    assert (learner.known, learner.estimated, learner.replayed.unknown) == (7, 1, 0)
    assert (learner.same, learner.parted) == (3, 1)
    assert (learner.replayed.updates, learner.replayed.skipped) == (5, 3)


def test_histograms_say_at_which_scales_the_gradients_still_fit(tmp_path):
    """Gradients up to 16 at a scale of 1: they leave FP16 at 2^12."""
    run = written(tmp_path / "run", [(1.0, False)] * 8, looks=[(2, 1.0, 16.0)])
    (learner,) = replay_run(run, ["scaler=dynamic", "scaler.init_scale=8192", "scaler.growth_interval=3"]).learners
    assert learner.replayed.marks.extremes() == ([1, 2, 6], [8192, 4096, 4096])
    assert (learner.known, learner.estimated, learner.replayed.unknown) == (1, 7, 0)
    assert learner.replayed.last == 2048


def test_rules_that_measure_read_the_largest_gradient_from_histograms(tmp_path):
    run = written(tmp_path / "run", [(2.0, False)] * 4, looks=[(1, 2.0, 16.0), (3, 2.0, 64.0)])
    words = ["scaler=logmax", "scaler.beta1=0.5", "scaler.deviations=0", "scaler.log2_max=12"]
    (learner,) = replay_run(run, words).learners
    _, scales = learner.replayed.scales.extremes()
    # x = 3, 3 (step 2 is taken like step 1) and 5: means 3, 3 and (3 / 7 + 4 * 5 / 7 + 2 * 3 / 7)
    assert scales == pytest.approx([1.0, 2.0**9, 2.0**9, 2.0 ** (12 - 29 / 7)], rel=1e-6)
    assert (learner.known, learner.estimated) == (2, 2)


def test_als_reads_the_share_above_its_edge_from_histograms(tmp_path):
    """A tenth of the gradients lie near 1: above 8188 at a scale of 2^13 and more."""
    run = written(tmp_path / "run", [(1.0, False)] * 18, looks=[(step, 1.0, 1.0) for step in range(1, 19)])
    (learner,) = replay_run(run, ["scaler=als", "scaler.threshold=0.01"]).learners
    _, scales = learner.replayed.scales.extremes()
    assert scales == [*(2.0**power for power in range(14)), 2.0**12, 2.0**13, 2.0**12, 2.0**13]
    assert learner.known == 18


def test_a_rule_that_lets_overflows_through_skips_nothing(tmp_path):
    run = written(tmp_path / "run", [(64.0, False), (64.0, True)])
    (learner,) = replay_run(run, ["scaler=static", "scaler.scale=64", "scaler.on_overflow=apply"]).learners
    assert (learner.replayed.overflows, learner.replayed.skipped, learner.recorded.skipped) == (1, 0, 1)


def test_a_run_without_histograms_is_said_to_have_none_only_where_they_were_missed(tmp_path):
    run = written(tmp_path / "run", [(8.0, False), (64.0, True), (8.0, False)])
    assert replay_run(run, ()).learners[0].parted == 1
    assert replay_run(run, ["scaler=static", "scaler.scale=4"]).learners[0].replayed.updates == 3
    (note,) = replay_run(run, ["scaler=static", "scaler.scale=8"]).notes
    assert "the run has no histograms" in note


def test_steps_that_nothing_tells_about_are_neither_updates_nor_skipped(tmp_path):
    """Nothing but overflows at 2^23: whether scale 1 would have been clean is not on record."""
    run = written(tmp_path / "run", [(2.0**23, True)] * 5)
    replay = replay_run(run, ["scaler=none"])
    (learner,) = replay.learners
    assert (learner.replayed.updates, learner.replayed.skipped, learner.replayed.unknown) == (0, 0, 5)
    assert (learner.recorded.skipped, learner.recorded.unknown) == (5, 0)
    assert len(learner.replayed.marks) == 0
    assert learner.basis() == "outcomes of 5 steps: 5 unknown"
    (note,) = replay.notes
    assert f"mptrain diagnose {run}" in note
    assert "diagnostics=histograms" in note


def test_a_constant_scale_that_overflows_is_said_to_overflow_on(tmp_path):
    """Gradients up to 16 at step 1 leave FP16 at 2^12."""
    run = written(tmp_path / "run", [(1.0, False)] * 3, looks=[(1, 1.0, 16.0), (2, 1.0, 1.0), (3, 1.0, 1.0)])
    (note,) = replay_run(run, ["scaler=static", "scaler.scale=8192"]).notes
    assert "one overflow can become an overflow at every step" in note
    assert replay_run(run, ["scaler=static", "scaler.scale=8"]).notes == ()
    assert replay_run(run, ["scaler=dynamic", "scaler.init_scale=8192"]).notes == ()


def test_a_run_that_goes_on_is_said_to(tmp_path):
    run = written(tmp_path / "run", [(1.0, False)] * 3)
    directory = RunDirectory(RunPaths(tmp_path / "run"))
    directory.write_state(RunState(id="run", argv=(), command="mptrain").begin())
    assert any("the run has not ended" in note for note in replay_run(run, ["scaler=static"]).notes)
    with directory.lock():
        assert any("still running" in note for note in replay_run(run, ["scaler=static"]).notes)


def test_what_a_run_in_fp32_says_of_fp16_is_an_estimate(tmp_path):
    """Gradients up to 70000: clean in FP32, and infinite in FP16 at any scale from 1 on."""
    config = ("precision=fp32", "model=mlp")
    run = written(tmp_path / "run", [(1.0, False)] * 4, looks=[(2, 1.0, 70000.0)], config=config, dtype="float32")
    (learner,) = replay_run(run, ["scaler=static", "scaler.scale=1"]).learners
    assert (learner.known, learner.estimated, learner.replayed.skipped) == (0, 4, 4)
    (own,) = replay_run(run, ()).learners
    assert (own.known, own.replayed.skipped, own.parted) == (4, 0, None)


def test_a_run_that_did_not_compute_in_fp16_is_said(tmp_path):
    run = written(tmp_path / "run", [(1.0, False)] * 3, config=("precision=fp32", "model=mlp"))
    notes = replay_run(run, ["scaler=dynamic"]).notes
    assert any("the run computed in float32" in note for note in notes)


# ---- what cannot be done -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["logmax", "als"])
def test_a_rule_that_measures_needs_histograms_of_a_clean_step(tmp_path, rule):
    run = written(tmp_path / "run", [(1.0, False)])
    with pytest.raises(DataError, match="the run has no histograms") as refusal:
        replay_run(run, [f"scaler={rule}"])
    assert "diagnostics=histograms diagnostics.every=1" in refusal.value.hint


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["train.epochs=3"], UsageError, "'train.epochs=3' is not about the scaler"),
        (["precision=fp32"], UsageError, "is not about the scaler"),
        (["scaler=dinamic"], ConfigError, "dinamic"),
        (["scaler=dynamic", "scaler.growth=3"], ConfigError, "unknown key 'scaler.growth'"),
        (["scaler=static", "scaler.scale=-1"], ConfigError, "scaler.scale=-1"),
        (["learners.critic.scaler.init_scale=8"], UsageError, "the run has no learner 'critic'"),
    ],
)
def test_words_that_are_no_rule_are_refused(tmp_path, words, error, message):
    run = written(tmp_path / "run", [(1.0, False)])
    with pytest.raises(error, match=message):
        replay_run(run, words)


def test_a_run_without_steps_or_with_a_damaged_one_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no recorded steps"):
        replay_run(written(tmp_path / "empty", []), ())
    run = written(tmp_path / "damaged", [(1.0, False)] * 2)
    steps = tmp_path / "damaged" / "steps.jsonl"
    first, second = steps.read_text().splitlines()
    steps.write_text(first + "\n" + json.dumps({"step": 2}) + "\n" + second + "\n")
    with pytest.raises(StorageError, match="line 2 is damaged"):
        replay_run(run, ())
