"""What a run that goes on finds in its folder: records and a configuration that are no longer what they were."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from mptrain.api.run import open_run
from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.engine.interrupt import EndRequested
from mptrain.engine.loop import Loop
from mptrain.run import resume
from mptrain.run.build.parts import build, build_model
from tests.small_runs import TINY

WORDS = ("model=mlp", "model.hidden=[16]", "dataset.train_samples=64", "train.epochs=2", "run.name=run")


@pytest.fixture
def broken_off(tmp_path, monkeypatch):
    """The folder of a run that was killed behind its first checkpoint, which is that of step 2."""
    monkeypatch.chdir(tmp_path)
    break_off(monkeypatch, list(WORDS), 4)
    return tmp_path / "outputs" / "run"


def break_off(monkeypatch, words, step):
    attempted = Loop.attempt

    def killed(loop, batch):
        if loop.progress.step + 1 == step:
            raise EndRequested("SIGTERM")
        attempted(loop, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "attempt", killed)
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
    assert "is damaged" in " ".join(resumed["warnings"])


def test_a_configuration_that_no_command_changed_is_refused_and_goes_on_when_asked_for(broken_off, capsys):
    flip(broken_off / "config.yaml", "momentum: 0.9", "momentum: 0.8")
    assert main(["resume", "outputs/run"]) == 6
    said = capsys.readouterr().err
    assert "optimizer.momentum was 0.9, now 0.8\n" in said
    assert "mptrain resume outputs/run optimizer.momentum=0.8\n" in said
    assert main(["resume", "outputs/run", "train.epochs=4"]) == 6
    assert "mptrain resume outputs/run optimizer.momentum=0.8 train.epochs=4\n" in capsys.readouterr().err
    assert main(["resume", "outputs/run", "optimizer.momentum=0.9"]) == 0
    assert "warning: outputs/run/config.yaml is damaged or was edited" in capsys.readouterr().err


def test_a_line_that_says_everything_is_not_blamed_for_what_happened_to_the_file(broken_off, capsys):
    path = broken_off / "config.yaml"
    whole = path.read_text()
    path.write_text(whole[: whole.index("optimizer:")])
    words = [*WORDS, "run.resume=auto"]
    assert main(words) == 6
    errors = capsys.readouterr().err.splitlines()
    strange = "outputs/run/config.yaml is damaged or was edited: step 2 was trained with another configuration"
    assert errors[-2:] == [f"error: {strange}", "hint: restore the file from a copy"]
    path.write_text(whole)
    assert main([*words, "seed=7"]) == 2
    assert "outputs/run: seed was 0, now 7" in capsys.readouterr().err
    assert main(words) == 0


@pytest.mark.parametrize("words", [("resume", "outputs/run"), (*WORDS, "run.resume=auto")])
@pytest.mark.parametrize(
    ("old", "new"), [("_target_: mptrain.workloads", "_uarget_: mptrain.workloads"), ("  momentum: 0.9", "mom")]
)
def test_a_configuration_that_cannot_be_read_is_named(broken_off, capsys, words, old, new):
    flip(broken_off / "config.yaml", old, new)
    assert main(list(words)) == 6
    said = capsys.readouterr().err
    assert "error: outputs/run/config.yaml is damaged" in said
    assert "hint: restore the file from a copy" in said


def test_a_run_without_its_configuration_is_not_taken_for_a_new_one(broken_off, capsys):
    (broken_off / "config.yaml").unlink()
    assert main(["resume", "outputs/run"]) == 6
    assert "hint: restore the file from a copy" in capsys.readouterr().err


def test_a_configuration_that_changed_before_the_run_is_locked_is_not_undone(broken_off, monkeypatch, capsys):
    lock = resume.RunDirectory.lock

    def changed_first(directory):
        flip(broken_off / "config.yaml", "epochs: 2", "epochs: 3")
        return lock(directory)

    with monkeypatch.context() as patch:
        patch.setattr(resume.RunDirectory, "lock", changed_first)
        assert main(["resume", "outputs/run", "train.epochs=4"]) == 6
    said = capsys.readouterr().err
    assert "config.yaml was changed while this process started" in said
    assert "hint: resume it again" in said


def test_what_more_ranks_than_samples_cannot_do_is_said_before_there_are_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "launch_ranks", None)
    assert main([*WORDS, "distributed.procs=500"]) == 2
    assert "with 500 ranks" in capsys.readouterr().err


def test_what_changes_no_number_may_be_edited(broken_off):
    flip(broken_off / "config.yaml", "keep: 2", "keep: 3")
    assert main(["resume", "outputs/run"]) == 0


def test_a_change_on_purpose_that_was_killed_before_its_first_checkpoint_goes_on(broken_off, monkeypatch):
    break_off(monkeypatch, ["resume", "outputs/run", "optimizer.momentum=0.8"], 3)
    assert main(["resume", "outputs/run"]) == 0


def test_a_change_on_purpose_excuses_no_other_edit_of_the_configuration(broken_off, monkeypatch, capsys):
    break_off(monkeypatch, ["resume", "outputs/run", "optimizer.momentum=0.8"], 3)
    flip(broken_off / "config.yaml", "weight_decay: 0.0001", "weight_decay: 0.01")
    assert main(["resume", "outputs/run"]) == 6
    assert "config.yaml is damaged or was edited" in capsys.readouterr().err


def test_what_a_killed_process_had_begun_to_write_is_gone_when_the_run_goes_on(broken_off):
    (broken_off / "run.json.0123abcd.tmp").write_text('{"schema"')
    assert main(["resume", "outputs/run"]) == 0
    assert not list(broken_off.rglob("*.tmp"))


def test_keys_without_effect_on_a_resumed_run_are_refused_with_the_reason(broken_off, capsys):
    config = (broken_off / "config.yaml").read_bytes()
    for key, value in {
        "run.root": "elsewhere", "run.name": "two", "hydra.verbose": "true", "model.weights": "w.pt", "scaler.init_scale": "8"
    }.items():  # fmt: skip
        assert main(["resume", "outputs/run", f"{key}={value}"]) == 2, key
        error, hint = capsys.readouterr().err.splitlines()
        assert key in error
        assert "has no effect" in error
        assert "leave it out" in hint
    assert (broken_off / "config.yaml").read_bytes() == config


def test_the_first_scale_of_another_rule_has_an_effect(broken_off):
    assert main(["resume", "outputs/run", "precision=fp32"]) == 0
    assert main(["resume", "outputs/run", "precision=amp_dynamic", "scaler.init_scale=8", "train.epochs=3"]) == 0
    assert '"loss_scale": 8.0' in (broken_off / "steps.jsonl").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("distributed=fsdp2",), "distributed=fsdp2 with one rank shards nothing: set distributed.procs=2 or more"),
        (("precision=fp16_pure", "model.weights=large.pt"), "3 values in weights and buffers are beyond 65504"),
    ],
)
def test_what_is_not_as_it_was_asked_for_is_warned_of_and_on_record(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    weights = build(compose(WORDS))[0].model.state_dict()
    next(iter(weights.values())).view(-1)[:3] = 1e5
    torch.save(weights, "large.pt")
    assert main(
        [*WORDS, *words, "train.max_steps=1", "precision.cpu_kernels=upcast", "train.max_consecutive_overflows=9"]
    ) in (0, 4)
    assert f"warning: {said}" in capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "outputs" / "run" / "events.jsonl").read_text().splitlines()]
    messages = [event["message"] for event in events if event["event"] == "warning"]
    assert [message for message in messages if message.startswith(said[:40])]
    slow = "same numerics as tensor cores, but not faster than FP32"
    assert [message for message in messages if message.endswith(slow)]


def test_warnings_about_the_configuration_are_printed_once_and_on_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "train.max_steps=1", "scaler.init_scale=1000"]) == 0
    (said,) = compose([*WORDS, "scaler.init_scale=1000"]).warnings
    assert capsys.readouterr().err.count(said) == 1
    assert said in open_run("outputs/run").warnings
    assert main(["resume", "run", "train.max_steps=2", "scaler.init_scale=1000"]) == 0
    assert open_run("outputs/run").warnings.count(said) == 1


def test_the_header_says_how_many_parameters_are_trained_where_those_are_not_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def half_frozen(*given):
        network = build_model(*given)
        next(module for module in network.modules() if isinstance(module, torch.nn.Linear)).requires_grad_(False)
        return network

    monkeypatch.setattr("mptrain.run.build.parts.build_model", half_frozen)
    assert main([*WORDS, "train.max_steps=1"]) == 0
    assert "parameters, 170 trainable" in capsys.readouterr().out


BUILD, REHEARSAL = "mptrain.run.resume.build", "mptrain.engine.rehearsal.accumulate_gradients"


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (BUILD, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")),
        (BUILD, OSError(errno.ENOMEM, "Cannot allocate memory")),
        (REHEARSAL, MemoryError()),
        (REHEARSAL, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")),
    ],
)
def test_a_machine_without_memory_is_told_as_such(tmp_path, monkeypatch, capsys, place, error):
    monkeypatch.chdir(tmp_path)

    def refuse(*given, **named):
        raise error

    monkeypatch.setattr(place, refuse)
    assert main([*WORDS]) == 3
    assert "out of memory" in capsys.readouterr().err


def test_a_checkpoint_that_there_is_no_memory_for_is_not_taken_for_damaged(broken_off, monkeypatch, capsys):
    before = sorted(path.name for path in (broken_off / "checkpoints").iterdir())

    def refuse(*given, **named):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refuse)
        assert main(["resume", str(broken_off)]) == 3
    assert "out of memory while reading" in capsys.readouterr().err
    assert sorted(path.name for path in (broken_off / "checkpoints").iterdir()) == before
    assert main(["resume", str(broken_off)]) == 0


def test_a_failed_run_that_is_tried_again_has_all_its_patience_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("train.batch_size=8", "precision=fp16_static", "scaler.scale=1073741824")
    assert main([*WORDS, *words, "train.max_consecutive_overflows=3"]) == 4
    for last in (6, 9):
        capsys.readouterr()
        assert main(["resume", "outputs/run"]) == 4
        assert f"3 steps in a row overflowed, the last at step {last} " in capsys.readouterr().err


def groups(run):
    events = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "groups"]


def test_a_resumed_run_has_its_groups_once_and_again_if_they_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "optimizer.groups=[{match: '*bias', lr_factor: 0.5}]", "run.name=a", "checkpoint.every_steps=2"]
    assert main([*words, "train.max_steps=2"]) == 0
    before = groups("outputs/a")
    assert len(before) == 1
    assert main(["resume", "outputs/a", "train.max_steps=4"]) == 0
    assert groups("outputs/a") == before
    assert main(["resume", "outputs/a", "train.max_steps=6", "optimizer.groups.0.lr_factor=0.25"]) == 0
    after = groups("outputs/a")
    assert len(after) == 2
    assert after[0] == before[0]
    assert "0.25" in json.dumps(after[1])
