"""What stands in the way of a run, and what is said about it: exit code, two lines, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path

import pytest
from small_runs import TINY

from mptrain.cli.main import main
from mptrain.runlog.checkpoints import CheckpointStore


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out, [line for line in captured.err.splitlines() if not line.startswith("warning:")]


def test_a_changed_configuration_is_refused_with_the_keys_that_differ(capsys):
    words = (*TINY, "precision=fp32", "train.max_steps=3", "run.name=run")
    assert run(capsys, *words)[0] == 0
    code, _, errors = run(capsys, *words, "run.resume=auto", "optimizer.lr=0.01", "seed=3")
    assert code == 2
    assert errors[0] == "error: seed was 0 in outputs/run, now it is 3"
    assert errors[1] == "error: optimizer.lr was 0.05 in outputs/run, now it is 0.01"
    assert errors[-1].startswith("hint: choose another run.name, or change it on purpose: mptrain resume outputs/run")
    assert main(["resume", "outputs/run", "train.max_steps=5", "log.ring=1", "optimizer.lr=0.01"]) == 0
    assert "changed: optimizer.lr from 0.05 to 0.01" in capsys.readouterr().out
    assert len(Path("outputs/run/steps.jsonl").read_text().splitlines()) == 5


def test_an_existing_name_is_refused_and_a_missing_one_must_exist(capsys):
    words = (*TINY, "precision=fp32", "train.max_steps=2", "run.name=run")
    code, _, errors = run(capsys, *words, "run.resume=must")
    assert (code, errors[0]) == (6, "error: run.resume=must: there is no run outputs/run")
    assert not Path("outputs").exists()
    assert run(capsys, *words)[0] == 0
    code, _, errors = run(capsys, *words)
    assert code == 6
    assert errors == [
        "error: run directory outputs/run exists",
        "hint: continue it with run.resume=auto, or choose another run.name",
    ]


def test_a_finished_run_is_already_done(capsys):
    assert run(capsys, *TINY, "train.max_steps=2", "run.name=run")[0] == 0
    code, output, _ = run(capsys, "resume", "outputs/run")
    assert code == 0
    assert "outputs/run is already done" in output


def test_a_change_that_does_not_fit_the_checkpoint_leaves_the_run_as_it_was(capsys):
    assert run(capsys, *TINY, "run.name=run")[0] == 0
    files = [path for path in Path("outputs/run").rglob("*") if path.is_file() and path.suffix != ".lock"]
    before = [path.read_bytes() for path in files]
    code, _, errors = run(capsys, "resume", "outputs/run", "model.hidden=[16]")
    assert code == 6
    assert errors[0].startswith("error: the checkpoint does not fit the model: ")
    assert [path.read_bytes() for path in files] == before
    assert run(capsys, "resume", "outputs/run")[0] == 0


def test_a_resumed_run_keeps_all_the_words_that_led_to_it(capsys):
    words = [*TINY, "train.max_steps=2", "run.name=run"]
    assert run(capsys, *words)[0] == 0
    assert run(capsys, "resume", "outputs/run", "train.max_steps=3", "optimizer.lr=0.01")[0] == 0
    assert run(capsys, "resume", "outputs/run", "train.max_steps=4")[0] == 0
    words[words.index("train.max_steps=2")] = "optimizer.lr=0.01"
    state = json.loads(Path("outputs/run/run.json").read_text())
    assert sorted(shlex.split(state["command"])) == sorted(["mptrain", *words, "train.max_steps=4"])
    listed = Path("outputs/run/overrides.yaml").read_text().splitlines()
    assert sorted(listed) == sorted(f'- "{word}"' for word in (*words, "train.max_steps=4"))


def test_when_all_checkpoints_are_damaged_the_run_says_so(capsys):
    assert run(capsys, *TINY, "train.max_steps=2", "run.name=run")[0] == 0
    for path in Path("outputs/run/checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    code, _, errors = run(capsys, "resume", "outputs/run", "train.max_steps=4")
    assert code == 6
    assert "damaged" in errors[0]


def test_a_run_killed_before_its_first_checkpoint_starts_again(capsys):
    assert run(capsys, *TINY, "precision=fp32", "train.max_steps=4", "run.name=run")[0] == 0
    steps = Path("outputs/run/steps.jsonl").read_text()
    for path in Path("outputs/run/checkpoints").iterdir():
        path.unlink()
    state = json.loads(Path("outputs/run/run.json").read_text())
    Path("outputs/run/run.json").write_text(json.dumps({**state, "status": "running"}))
    code, output, _ = run(capsys, "resume", "outputs/run")
    assert code == 0
    assert "there is no checkpoint yet: the run starts again" in output
    assert Path("outputs/run/steps.jsonl").read_text() == steps


def test_missing_data_says_where_it_looked_and_what_needs_no_download(capsys):
    code, _, errors = run(capsys, "dataset=imagenet", "model=resnet18")
    assert code == 6
    assert "data/imagenet" in errors[0]
    assert "dataset=digits" in errors[1]
    assert not Path("outputs").exists()


def test_a_device_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, errors = run(capsys, *TINY, "device=cuda:1")
    assert code == 3
    assert errors[0].startswith("error: device=cuda:1: torch sees no CUDA device")
    code, _, errors = run(capsys, *TINY, "precision=tf32", "device=cpu")
    assert code == 3
    assert errors == [
        "error: precision=tf32 on cpu: a CPU has no TF32",
        "hint: use precision=fp32, or precision.force=true to run it all the same",
    ]


def test_a_root_that_cannot_be_made_is_refused(capsys):
    Path("file").write_text("")
    code, _, errors = run(capsys, *TINY, "run.root=file/outputs")
    assert code == 6
    assert "file/outputs" in errors[0]
    assert errors[1].startswith("hint:")


def test_a_full_disk_ends_with_6_and_keeps_the_last_good_checkpoint(capsys, monkeypatch):
    words = (*TINY, "precision=fp32", "checkpoint.every_steps=4", "run.name=run", "log.ring=1", "log.seconds=0")
    write, written = os.write, []

    def until_full(descriptor, data):
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if name.endswith("steps.jsonl") and Path("outputs/run/checkpoints/step-00000008.json").exists():
            written.append(name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", until_full)
        code, _, errors = run(capsys, *words)
    assert written
    assert code == 6
    assert "the disk is full" in errors[0]
    assert "free" in errors[0]
    assert CheckpointStore(Path("outputs/run/checkpoints"), 2).load_latest().manifest.step == 8
    code, _, _ = run(capsys, "resume", "outputs/run")
    assert code == 0
    steps = [json.loads(line)["step"] for line in Path("outputs/run/steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 19))


def test_a_single_sample_for_batch_norm_is_refused_before_training(capsys):
    code, _, errors = run(capsys, "model=resnet18", "dataset.train_samples=33", "train.batch_size=16")
    assert code == 2
    assert "leaves a micro-batch of one of 33 samples" in errors[0]
    assert errors[1] == "hint: choose a batch size that divides differently, or accumulate less"
    assert not Path("outputs").exists()


def test_a_bug_is_called_a_bug_and_leaves_its_traceback_in_the_run(capsys, monkeypatch):
    monkeypatch.setattr("mptrain.engine.loop.train_step", lambda *args: 1 / 0)
    code, _, errors = run(capsys, *TINY, "run.name=run")
    assert code == 1
    assert errors[0].startswith("error: this is a bug in mptrain: ZeroDivisionError")
    assert "train_step" in Path("outputs/run/failure/traceback.txt").read_text()
    assert json.loads(Path("outputs/run/run.json").read_text())["status"] == "failed"
