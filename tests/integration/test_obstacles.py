"""What stands in the way of a run, and what is said about it: exit code, two lines, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

import mptrain.engine.step_runner
from mptrain.cli.main import main
from mptrain.config.compose import compose, reload
from mptrain.runlog import checkpoint_data
from mptrain.runlog.checkpoints import CheckpointStore
from tests.small_runs import TINY


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
    assert "seed was 0, now 3" in errors[0]
    assert "optimizer.lr was 0.05, now 0.01" in errors[1]
    assert "mptrain resume outputs/run" in errors[-1]
    assert main(["resume", "outputs/run", "train.max_steps=5", "log.ring=1", "optimizer.lr=0.01"]) == 0
    assert "changed: optimizer.lr was 0.05, now 0.01" in capsys.readouterr().out
    assert len(Path("outputs/run/steps.jsonl").read_text().splitlines()) == 5


def test_an_existing_name_is_refused_and_a_missing_one_must_exist(capsys):
    words = (*TINY, "precision=fp32", "train.max_steps=2", "run.name=run")
    code, _, errors = run(capsys, *words, "run.resume=must")
    assert (code, errors[0]) == (6, "error: run.resume=must: there is no run outputs/run")
    assert not Path("outputs").exists()
    assert run(capsys, *words)[0] == 0
    code, _, errors = run(capsys, *words)
    assert code == 6
    assert "outputs/run" in errors[0]
    assert "run.resume=auto" in errors[1]


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


def test_keys_of_an_option_that_was_chosen_again_no_longer_count(capsys):
    words = [*TINY, "train.max_steps=2", "run.name=run", "optimizer.lr=0.002", "schedule.warmup=1"]
    words += ["train.early_stopping.patience=3"]
    assert run(capsys, *words)[0] == 0
    changes = ["train.max_steps=3", "optimizer=adamw", "train.early_stopping=null"]
    assert run(capsys, "resume", "outputs/run", *changes)[0] == 0
    kept = [word for word in words if not word.startswith(("train.max", "optimizer.", "train.early"))]
    listed = Path("outputs/run/overrides.yaml").read_text().splitlines()
    assert sorted(listed) == sorted(f'- "{word}"' for word in (*kept, *changes))


def test_keys_below_a_mapping_still_count(capsys):
    words = [*TINY, "train.max_steps=2", "run.name=run", "train.early_stopping.min_delta=0.1"]
    assert run(capsys, *words)[0] == 0
    change = "train.early_stopping={patience: 7}"
    assert run(capsys, "resume", "outputs/run", "train.max_steps=3", change)[0] == 0
    command = shlex.split(json.loads(Path("outputs/run/run.json").read_text())["command"])
    assert {"train.early_stopping.min_delta=0.1", change} <= {*command}
    found = reload(Path("outputs/run/config.yaml").read_text()).train.early_stopping
    assert compose(command[1:]).train.early_stopping == found
    assert (found.patience, found.min_delta) == (7, 0.1)


def test_the_command_names_the_folders_of_options_also_after_a_resume(capsys):
    Path("own/optimizer").mkdir(parents=True)
    Path("own/optimizer/mine.yaml").write_text("_target_: mptrain.optimizer.SGD\nlr: 0.1\n")
    assert run(capsys, *TINY, "--config-dir", "own", "optimizer=mine", "train.max_steps=2", "run.name=run")[0] == 0
    assert run(capsys, "resume", "outputs/run", "train.max_steps=3")[0] == 0
    command = shlex.split(json.loads(Path("outputs/run/run.json").read_text())["command"])
    assert command[:3] == ["mptrain", "--config-dir", "own"]
    assert {"optimizer=mine", "train.max_steps=3"} <= {*command}


def test_notes_and_groups_of_the_start_are_on_record(capsys):
    words = ["optimizer.groups=[{match: '*.bias', lr_factor: 2}]", "schedule=torch", "schedule.name=CosineAnnealingLR"]
    assert run(capsys, *TINY, *words, "train.max_steps=2", "run.name=run")[0] == 0
    events = [json.loads(line) for line in Path("outputs/run/events.jsonl").read_text().splitlines()]
    (note,) = [event["message"] for event in events if event["event"] == "note"]
    assert note == "schedule: T_max is the number of updates of the run"
    (groups,) = [event for event in events if event["event"] == "groups"]
    assert all(name.endswith(".bias") for name in groups["learning rate x2, weight decay 0"])
    assert any(name.endswith(".weight") for name in groups["learning rate x1, weight decay 0.0001"])


def test_a_run_whose_histograms_are_gone_goes_on_and_says_so(capsys):
    words = [*TINY, "diagnostics=histograms", "diagnostics.every=1", "run.name=run"]
    assert run(capsys, *words, "train.max_steps=2")[0] == 0
    Path("outputs/run/histograms.jsonl").unlink()
    assert main(["resume", "outputs/run", "train.max_steps=4"]) == 0
    assert "warning: outputs/run/histograms.jsonl has 0 bytes" in capsys.readouterr().err.replace("\n", " ")
    events = Path("outputs/run/events.jsonl").read_text()
    assert "histograms of all steps so far are lost" in events
    looks = [json.loads(line)["step"] for line in Path("outputs/run/histograms.jsonl").read_text().splitlines()]
    assert looks == [3, 4]


def test_when_all_checkpoints_are_damaged_the_run_says_so(capsys):
    assert run(capsys, *TINY, "train.max_steps=2", "run.name=run")[0] == 0
    for path in Path("outputs/run/checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    code, _, errors = run(capsys, "resume", "outputs/run", "train.max_steps=4")
    assert code == 6
    assert "damaged" in errors[0]


#: Words, exit code, and what the error and its hint name.
STOPPED = {
    "data that are missing": (("dataset=imagenet", "model=resnet18"), 6, ("data/imagenet", "dataset=digits")),
    "no such device": ((*TINY, "device=cuda:1"), 3, ("device=cuda:1",)),
    "no such arithmetic": ((*TINY, "precision=tf32", "device=cpu"), 3, ("precision=tf32", "precision.force=true")),
    "a root below a file": ((*TINY, "run.root=file/outputs"), 6, ("file/outputs",)),
    "batch norm of one sample": (
        ("model=resnet18", "dataset.train_samples=33", "train.batch_size=16"), 2, ("one sample out of 33", "batch size"),
    ),
    "not one update": (
        (*TINY, "precision=fp16_static", "scaler.scale=1073741824", "train.max_steps=3"), 4,
        ("none of 3 updates was applied", "mptrain diagnose "),
    ),
    "an infinite perplexity": (
        ("model=word_lstm", "optimizer.lr=10000", "dataset.sequence_length=8", "dataset.train_samples=128",
         "train.batch_size=16", "train.epochs=1", "precision=fp32"), 4, ("diverged", "perplexity"),
    ),
    "one learner that overflows": (
        ("model=dcgan", "model.width=2", "dataset.image_size=8", "dataset.train_samples=128", "precision=fp16_dynamic",
         "train.max_consecutive_overflows=3", "learners.generator.scaler.init_scale=1.7e38",
         "learners.generator.scaler.max_scale=1.7e38"), 4, ("3 steps in a row of the generator", "learners.generator.scaler."),
    ),
    "a model for another task": (
        ("model=dcgan", "task=classify", "optimizer=sgd", "dataset.train_samples=64"), 2, ("DCGAN and Classify",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_that_cannot_go_on_ends_with_a_code_and_a_hint(capsys, monkeypatch, name):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("file").write_text("")
    words, expected, named = STOPPED[name]
    code, _, (error, *more) = run(capsys, *words)
    assert code == expected
    assert error.startswith("error: ")
    assert more[-1].startswith("hint: ")
    assert all(word in " ".join((error, *more)) for word in named)


def test_a_full_disk_ends_with_6_and_keeps_the_last_good_checkpoint(capsys, monkeypatch):
    words = (*TINY, "precision=fp32", "checkpoint.every_steps=4", "run.name=run", "log.ring=1", "log.seconds=0")
    write, written = os.write, []

    def until_full(descriptor, data):
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if name.endswith("steps.jsonl") and b'"step": 9,' in data:
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


def test_a_disk_that_fills_up_under_a_checkpoint_ends_with_6_while_training_goes_on(capsys, monkeypatch):
    words = (*TINY, "precision=fp32", "checkpoint.every_steps=4", "run.name=run")
    temporary = checkpoint_data.temporary

    def full(path):
        draft = temporary(path)
        if path.name == "step-00000008.pt":
            draft.symlink_to("/dev/full")
        return draft

    with monkeypatch.context() as disk:
        disk.setattr(checkpoint_data, "temporary", full)
        code, _, errors = run(capsys, *words)
    assert code == 6
    assert errors[0].startswith("error: cannot write outputs/run/checkpoints/step-00000008.pt: the disk is full (")
    assert errors[1].endswith("; still intact: the checkpoint of step 4")
    state = json.loads(Path("outputs/run/run.json").read_text())
    assert (state["status"], state["exit_code"]) == ("failed", 6)
    events = [json.loads(line) for line in Path("outputs/run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "checkpoint"][:2] == [4, 8]
    assert events[-1]["event"] == "storage"
    assert "the disk is full" in events[-1]["message"]
    assert run(capsys, "resume", "outputs/run")[0] == 0
    steps = [json.loads(line)["step"] for line in Path("outputs/run/steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 19))


def test_a_run_whose_folder_is_removed_meanwhile_does_not_train_on_for_nothing(capsys, monkeypatch):
    step = mptrain.engine.step_runner.train_step

    def removing(learner, *rest):
        if Path("outputs/run").exists():
            shutil.rmtree("outputs/run")
        return step(learner, *rest)

    monkeypatch.setattr("mptrain.engine.step_runner.train_step", removing)
    code, _, errors = run(capsys, *TINY, "checkpoint.every_epochs=1", "run.name=run")
    assert code == 6
    assert "outputs/run disappeared while it was being written: it was removed" in errors[0]
    assert not Path("outputs/run").exists()


def test_a_bug_is_called_a_bug_and_leaves_its_traceback_in_the_run(capsys, monkeypatch):
    monkeypatch.setattr("mptrain.engine.step_runner.train_step", lambda *args: 1 / 0)
    code, _, errors = run(capsys, *TINY, "run.name=run")
    assert code == 1
    assert errors[0].startswith("error: this is a bug in mptrain: ZeroDivisionError")
    assert "train_step" in Path("outputs/run/failure/traceback.txt").read_text()
    assert json.loads(Path("outputs/run/run.json").read_text())["status"] == "failed"


def test_a_run_that_diverged_is_not_called_done(capsys):
    code, _, errors = run(capsys, *TINY, "precision=fp32", "optimizer.lr=1e30", "run.name=run")
    assert code == 4
    assert "the run diverged: the last loss on" in errors[0]
    assert json.loads(Path("outputs/run/run.json").read_text())["status"] == "failed"
    assert json.loads(Path("outputs/run/summary.json").read_text())["steps"] == 18
    phases = json.loads(Path("outputs/run/summary.json").read_text())["learners"]["main"]["overflows"]
    assert set(phases) == {"unexpected"}


def test_a_run_that_ended_while_its_scale_was_still_coming_down_is_done_with_a_warning(capsys):
    high = ("scaler.init_scale=1073741824", "scaler.max_scale=1073741824")
    words = ("precision=fp16_dynamic", *high, "train.max_steps=2", "run.name=run")
    assert run(capsys, *TINY, *words)[0] == 0
    assert (
        "because the loss scale was still decreasing; train for more steps"
        in Path("outputs/run/events.jsonl").read_text()
    )
    assert json.loads(Path("outputs/run/run.json").read_text())["status"] == "done"
    assert json.loads(Path("outputs/run/summary.json").read_text())["learners"]["main"]["updates"] == 0


def test_missing_checkpoints_of_a_run_that_was_saved_are_not_taken_for_a_fresh_start(capsys):
    assert run(capsys, *TINY, "train.max_steps=4", "run.name=run")[0] == 0
    steps = Path("outputs/run/steps.jsonl").read_bytes()
    for path in Path("outputs/run/checkpoints").iterdir():
        path.unlink()
    code, _, errors = run(capsys, "resume", "outputs/run", "train.max_steps=6")
    assert code == 6
    assert "has no checkpoint, but the run was saved there" in errors[0]
    assert Path("outputs/run/steps.jsonl").read_bytes() == steps
