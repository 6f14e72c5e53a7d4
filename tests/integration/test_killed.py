"""Whatever kills a run, resuming it gives the records of the undisturbed one, byte for byte."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.small_runs import command, environment, run_in_process

WORKLOADS = {
    "cnn": ("model=cnn", "dataset.train_samples=480"),
    "word_lstm": (
        "model=word_lstm", "model.embedding_size=8", "model.hidden_size=8", "dataset.max_vocabulary=100",
        "dataset.sequence_length=8", "dataset.train_samples=480", "dataset.val_share=0.01", "dataset.test_share=0.01",
        "train.batch_size=32", "train.ema_decay=0.99",
    ),
    "transformer": (
        "model=transformer", "model.width=8", "model.heads=2", "model.dropout=0.1", "dataset.sequence_length=8",
        "dataset.train_samples=480", "dataset.val_share=0.01", "dataset.test_share=0.01",
    ),
    "dcgan": (
        "model=dcgan", "model.width=2", "model.latent=4", "dataset.image_size=8", "dataset.train_samples=480",
        "train.batch_size=32",
    ),
}  # fmt: skip
OFTEN = ("train.epochs=3", "checkpoint.every_steps=7", "log.seconds=0.05")
DYNAMIC = ("scaler.init_scale=268435456", "scaler.max_scale=268435456", "scaler.growth_interval=9")


def words_for(precision, workload="cnn"):
    return (*WORKLOADS[workload], *OFTEN, f"precision={precision}", *(DYNAMIC if "dynamic" in precision else ()))


def start(*words, cwd, program=None):
    """A process whose output goes to ``output.txt``."""
    line = command(*words) if program is None else [sys.executable, "-c", program, *words]
    with (cwd / "output.txt").open("w") as output:
        return subprocess.Popen(line, cwd=cwd, env=environment(), stdout=output, stderr=subprocess.STDOUT)


def finish(process, cwd):
    """Its exit code and output."""
    process.wait(timeout=60)
    return process.returncode, (cwd / "output.txt").read_text()


def wait_until(condition, process, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, "ended early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of(folder):
    path = folder / "outputs" / "run" / "steps.jsonl"
    return path.read_bytes() if path.exists() else b""


def has_steps(folder, count):
    return steps_of(folder).count(b"\n") >= count


def kill_and_resume(tmp_path, precision, kills, epochs, seed, workload="cnn"):
    """Run undisturbed, then again with so many kills of a living process; returns both records."""
    words = (*words_for(precision, workload), f"train.epochs={epochs}", "run.name=run")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    done = run_in_process(*words, cwd=undisturbed)
    assert done.returncode == 0, done.stderr
    draw = random.Random(seed)
    for _ in range(kills):
        process = start(*words, "run.resume=auto", cwd=killed)
        time.sleep(draw.uniform(1.0, 4.5))  # from before the first import is done to somewhere in training
        assert process.poll() is None, "the run ended before it could be killed: give it more epochs"
        process.kill()
        process.wait()
    last = run_in_process(*words, "run.resume=auto", cwd=killed)
    assert last.returncode == 0, last.stderr
    return [steps_of(folder) for folder in (undisturbed, killed)]


SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.process
@pytest.mark.parametrize(
    ("workload", "precision", "kills", "epochs", "seed"),
    [
        ("cnn", "amp_dynamic", 1, 36, 1),
        pytest.param("word_lstm", "amp_dynamic", 1, 20, 7, marks=SLOW),
        pytest.param("dcgan", "fp16_dynamic", 1, 20, 7, marks=SLOW),
        pytest.param("transformer", "bf16", 1, 20, 7, marks=SLOW),
        pytest.param("cnn", "nvfp4_emulated", 1, 20, 7, marks=SLOW),
        *(pytest.param("cnn", mode, 20, 480, 2, marks=SLOW) for mode in ("fp32", "amp_dynamic", "fp16_dynamic")),
        *(pytest.param(name, "fp16_dynamic", 10, 240, 3, marks=SLOW) for name in ("word_lstm", "transformer", "dcgan")),
    ],
)
def test_sigkills_and_resumes_write_the_same_records(tmp_path, workload, precision, kills, epochs, seed):
    expected, found = kill_and_resume(tmp_path, precision, kills, epochs, seed, workload)
    assert found == expected
    assert expected.count(b"\n") == epochs * (30 if workload == "dcgan" else 15)


KILLED_WHILE_SAVING = """
import os, signal, sys, time, torch
from pathlib import Path
save = torch.save
def until_killed(state, file):
    if state["progress"]["step"] < 14:
        return save(state, file)
    file.write(b"a part of it")
    steps, deadline = Path("outputs/run/steps.jsonl"), time.monotonic() + 30
    while steps.read_bytes().count(b"\\n") < 17 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = until_killed
from mptrain.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.process
def test_sigkill_while_a_checkpoint_is_written_goes_on_from_the_one_before(tmp_path):
    words = (*words_for("fp32"), "run.name=run", "log.seconds=0.001", "checkpoint.every_epochs=null")
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    for folder in folders:
        folder.mkdir()
    assert run_in_process(*words, cwd=folders[0]).returncode == 0
    process = start(*words, cwd=folders[1], program=KILLED_WHILE_SAVING)
    assert finish(process, folders[1])[0] == -signal.SIGKILL
    assert has_steps(folders[1], 17)
    left = sorted(path.name.split(".")[0] for path in (folders[1] / "outputs/run/checkpoints").iterdir())
    assert left == ["last", "step-00000007", "step-00000007", "step-00000014"]
    assert run_in_process("resume", "last", cwd=folders[1]).returncode == 0
    assert steps_of(folders[1]) == steps_of(folders[0])


@pytest.mark.long
def test_a_damaged_checkpoint_falls_back_and_the_records_stay_right(tmp_path):
    words = (*words_for("amp_dynamic"), "run.name=run", "schedule=constant")
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    for folder, steps in ((whole, 30), (damaged, 16)):
        folder.mkdir()
        assert run_in_process(*words, f"train.max_steps={steps}", cwd=folder).returncode == 0
    newest = max(damaged.glob("outputs/run/checkpoints/*.pt"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    again = run_in_process("resume", "outputs/run", "train.max_steps=30", cwd=damaged)
    assert again.returncode == 0, again.stderr
    assert "damaged" in again.stdout + again.stderr
    assert steps_of(damaged) == steps_of(whole)


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_in_training_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, number, code):
    process = start(*words_for("fp32"), "train.epochs=400", "run.name=run", cwd=tmp_path)
    wait_until(lambda: has_steps(tmp_path, 3), process)
    process.send_signal(number)
    while process.poll() is None:
        if "hint: " in (tmp_path / "output.txt").read_text():  # what comes while the interpreter goes changes nothing
            process.send_signal(number)
        time.sleep(0.001)
    found, output = finish(process, tmp_path)
    assert found == code, output
    assert "mptrain resume outputs/run" in output
    assert "Traceback" not in output
    state = json.loads((tmp_path / "outputs" / "run" / "run.json").read_text())
    assert (state["status"], state["exit_code"]) == ("preempted", code)
    steps = steps_of(tmp_path).count(b"\n")
    assert state["attempts"][-1]["to_step"] == steps
    again = run_in_process("resume", "outputs/run", f"train.max_steps={steps + 2}", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert steps_of(tmp_path).count(b"\n") == steps + 2


SLOW_EVALUATION = """
import sys, time
from mptrain.workloads.classification.task import Classify
measure = Classify.measure
def slowly(self, model, batch):
    open("evaluating", "w").close()
    time.sleep(0.05)
    return measure(self, model, batch)
Classify.measure = slowly
from mptrain.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.process
def test_sigterm_in_evaluation_saves_and_the_evaluation_is_done_on_resume(tmp_path):
    words = (*words_for("fp32"), "train.epochs=1", "run.name=run")
    process = start(*words, cwd=tmp_path, program=SLOW_EVALUATION)
    wait_until((tmp_path / "evaluating").exists, process)
    process.send_signal(signal.SIGTERM)
    found, output = finish(process, tmp_path)
    assert found == 75, output
    run = tmp_path / "outputs" / "run"
    assert "evaluation" not in (run / "events.jsonl").read_text()
    again = run_in_process("resume", "last", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["split"] for event in events if event["event"] == "evaluation"] == ["val", "test"]
    assert len((run / "epochs.csv").read_text().splitlines()) == 2
    assert (run / "steps.jsonl").read_bytes().count(b"\n") == 15
    assert json.loads((run / "run.json").read_text())["status"] == "done"


@pytest.mark.process
def test_two_writers_of_one_run_are_refused(tmp_path):
    words = (*words_for("fp32"), "train.epochs=400", "run.name=run", "run.resume=auto")
    process = start(*words, cwd=tmp_path)
    wait_until(lambda: has_steps(tmp_path, 1), process)
    second = run_in_process(*words, cwd=tmp_path)
    process.kill()
    process.wait()
    assert second.returncode == 6
    assert f"pid {process.pid}" in second.stderr.replace("process ", "pid ")


#: Commands that train nothing, or nothing yet; each runs for seconds, most of them imports.
COMMANDS = {
    "export": ("export", "outputs/a", "--output", "net.pt"),
    "together": ("report", "outputs/a", "outputs/b", "--together"),
    "logs": ("compare", "--logs", "a=log?.csv", "b=log?.csv", "--metric", "loss", "--margin", "1"),
    "sweep": ("-m", *words_for("fp32"), "seed=0,1", "train.epochs=400"),
    "runs": ("runs",),
}


@pytest.mark.process
@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.6])
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_signal_ends_every_command_with_its_code_and_a_line(tmp_path, kind, seconds):
    for name in ("a", "b"):
        done = run_in_process(*words_for("fp32"), "train.max_steps=2", f"run.name={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (f"{step},{step % 7}\n" for step in range(100))
        (tmp_path / f"log{name}.csv").write_text("step,loss\n" + "".join(lines))
    process = start(*COMMANDS[kind], cwd=tmp_path)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    found, output = finish(process, tmp_path)
    assert found in (0, 75), output  # 0: it had ended
    assert "Traceback" not in output
    if found == 75:
        assert "SIGTERM" in output
        assert not (tmp_path / "net.pt").exists()
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.process
@pytest.mark.parametrize("seconds", [0.5, 2.0, 3.5, 5.0])
def test_a_closed_terminal_ends_a_sweep_without_a_traceback(tmp_path, seconds):
    line = command("-m", *words_for("fp32"), "seed=0,1", "train.epochs=4000")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup these tests would start programs that ignore it
    try:
        with (tmp_path / "output.txt").open("w") as output:
            process = subprocess.Popen(
                line, cwd=tmp_path, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
    finally:
        signal.signal(signal.SIGHUP, before)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGHUP)  # as a terminal does, to all processes in front
    try:
        found, output = finish(process, tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert found == 75, output
    assert "Error" not in output
