"""What a run that goes on finds in its folder: records and a configuration that are no longer what they were."""

from __future__ import annotations

import json

import pytest

from mptrain.campaign import attempt
from mptrain.cli.main import main
from mptrain.engine.interrupt import AskedToEnd

WORDS = ("model=mlp", "model.hidden=[16]", "dataset.train_samples=64", "train.epochs=2", "run.name=run")


@pytest.fixture
def broken_off(tmp_path, monkeypatch):
    """The folder of a run that was killed behind its first checkpoint, which is that of step 2."""
    monkeypatch.chdir(tmp_path)
    break_off(monkeypatch, list(WORDS), 4)
    return tmp_path / "outputs" / "run"


def break_off(monkeypatch, words, step):
    attempted = attempt.Loop.attempt

    def killed(loop, batch):
        if loop.progress.step + 1 == step:
            raise AskedToEnd("SIGTERM")
        attempted(loop, batch)

    with monkeypatch.context() as patch:
        patch.setattr(attempt.Loop, "attempt", killed)
        assert main(words) == 75


def flip(path, old, new):
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))


def test_a_record_that_was_damaged_is_told_and_the_run_goes_on(broken_off, capsys):
    flip(broken_off / "steps.jsonl", '"epoch": 0', '"epoch": 8')
    assert main(["resume", "outputs/run"]) == 0
    assert "steps.jsonl is damaged: its first " in capsys.readouterr().err
    assert (broken_off / "steps.jsonl").read_bytes().count(b"\n") == 4
    events = [json.loads(line) for line in (broken_off / "events.jsonl").read_text().splitlines()]
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert "is damaged" in resumed["warnings"][0]


def test_a_configuration_that_no_command_changed_is_refused_and_goes_on_when_asked_for(broken_off, capsys):
    flip(broken_off / "config.yaml", "momentum: 0.9", "momentum: 0.8")
    assert main(["resume", "outputs/run"]) == 6
    said = capsys.readouterr().err
    strange = "outputs/run/config.yaml is damaged or was edited: step 2 was trained with another"
    assert f"error: {strange}: optimizer.momentum was 0.9, now 0.8\n" in said
    assert "mptrain resume outputs/run optimizer.momentum=0.8\n" in said
    assert main(["resume", "outputs/run", "train.epochs=4"]) == 6
    said = capsys.readouterr().err
    assert strange in said
    assert "mptrain resume outputs/run optimizer.momentum=0.8 train.epochs=4\n" in said
    assert main(["resume", "outputs/run", "optimizer.momentum=0.9"]) == 0
    assert "warning: outputs/run/config.yaml is damaged or was edited" in capsys.readouterr().err


def test_a_line_that_says_everything_is_not_blamed_for_what_happened_to_the_file(broken_off, capsys):
    path = broken_off / "config.yaml"
    whole = path.read_text()
    path.write_text(whole[: whole.index("optimizer:")])
    words = [*WORDS, "run.resume=auto"]
    assert main(words) == 6
    errors = capsys.readouterr().err.splitlines()
    strange = "outputs/run/config.yaml is damaged or was edited: step 2 was trained with another"
    assert errors[-2:] == [f"error: {strange}", "hint: restore the file from a copy"]
    path.write_text(whole)
    assert main([*words, "seed=7"]) == 2
    assert "outputs/run: seed was 0, now 7" in capsys.readouterr().err
    assert main(words) == 0


def test_a_configuration_that_is_damaged_beyond_reading_is_named_and_not_taken_for_a_mistake_of_the_user(
    broken_off, capsys
):
    flip(broken_off / "config.yaml", "_target_: mptrain.task", "_uarget_: mptrain.task")
    assert main(["resume", "outputs/run"]) == 6
    said = capsys.readouterr().err
    assert "error: outputs/run/config.yaml is damaged or was edited: step 2 was trained with another: task " in said
    assert "hint: restore the file from a copy" in said


def test_a_run_without_its_configuration_is_not_taken_for_one_that_never_began(broken_off, capsys):
    (broken_off / "config.yaml").unlink()
    assert main(["resume", "outputs/run"]) == 6
    assert "hint: restore the file from a copy" in capsys.readouterr().err


def test_what_more_ranks_than_samples_cannot_do_is_said_before_there_are_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attempt, "gathered", None)
    assert main([*WORDS, "distributed.procs=500"]) == 2
    assert "for 500 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("resume", "outputs/run"), (*WORDS, "run.resume=auto")])
def test_a_configuration_that_is_no_yaml_any_more_is_named(broken_off, capsys, words):
    flip(broken_off / "config.yaml", "  momentum: 0.9", "mom")
    assert main(list(words)) == 6
    said = capsys.readouterr().err
    assert "error: outputs/run/config.yaml is damaged: line " in said
    assert "hint: restore the file from a copy" in said


def test_what_changes_no_number_may_be_edited(broken_off):
    flip(broken_off / "config.yaml", "keep: 2", "keep: 3")
    assert main(["resume", "outputs/run"]) == 0


def test_a_change_on_purpose_that_was_killed_before_its_first_checkpoint_goes_on(broken_off, monkeypatch):
    break_off(monkeypatch, ["resume", "outputs/run", "optimizer.momentum=0.8"], 3)
    assert main(["resume", "outputs/run"]) == 0


def test_what_a_killed_process_had_begun_to_write_is_gone_when_the_run_goes_on(broken_off):
    (broken_off / "run.json.0123abcd.tmp").write_text('{"schema"')
    assert main(["resume", "outputs/run"]) == 0
    assert not list(broken_off.rglob("*.tmp"))


def test_keys_without_effect_on_a_resumed_run_are_refused_with_the_reason(broken_off, capsys):
    config = (broken_off / "config.yaml").read_bytes()
    for words, says in (
        (("run.root=elsewhere",), "run.root=elsewhere has no effect on a saved run: it stays where it is"),
        (("run.name=two",), "run.name=two has no effect on a saved run"),
        (("hydra.verbose=true",), "hydra.verbose=true has no effect on a saved run"),
        (
            ("model.weights=w.pt",),
            "model.weights has no effect on a resumed run: its weights are those of the checkpoint",
        ),
        (("scaler.init_scale=8",), "scaler.init_scale has no effect on a resumed run: its loss scale is that of the"),
    ):
        assert main(["resume", "outputs/run", *words]) == 2, words
        said = capsys.readouterr().err
        assert f"error: {says}" in said
        assert "hint: leave it out" in said
    assert (broken_off / "config.yaml").read_bytes() == config


def test_the_first_scale_of_another_rule_has_an_effect(broken_off):
    assert main(["resume", "outputs/run", "precision=fp32"]) == 0
    assert main(["resume", "outputs/run", "precision=amp_dynamic", "scaler.init_scale=8", "train.epochs=3"]) == 0
    assert '"loss_scale": 8.0' in (broken_off / "steps.jsonl").read_text()
