"""Signals while nothing is being trained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mptrain.cli.main import main
from mptrain.engine.interrupt import EndRequested, SignalListener, end_at_signals
from mptrain.engine.loop import Loop
from mptrain.run import attempt, resume
from mptrain.system.errors import Preempted

TINY = ("model=mlp", "dataset.train_samples=32", "train.epochs=1", "run.name=run", "run.resume=auto")


def ask(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_at_once_what_would_not_hear_it(number):
    before = signal.signal(number, signal.SIG_DFL)  # nohup, for one, lets SIGHUP be ignored
    try:
        with pytest.raises(Preempted, match=f"{number.name}, ended at once") as caught, end_at_signals():
            ask(number)
        assert caught.value.exit_code == 75
        assert caught.value.hint
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


COMPOSING = """
import os, signal
from omegaconf import OmegaConf
from mptrain.engine.interrupt import end_at_signals
OmegaConf.register_new_resolver("asked", lambda: os.kill(os.getpid(), signal.{number}))
with end_at_signals():
    OmegaConf.to_container(OmegaConf.create({{"a": "${{asked:}}"}}), resolve=True)
"""


@pytest.mark.parametrize(
    ("number", "code", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 75, "stopped: SIGTERM")]
)
def test_no_clean_up_of_a_composition_makes_an_error_of_a_signal(number, code, said):
    ended = subprocess.run(
        [sys.executable, "-c", COMPOSING.format(number=number)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(said)


def test_no_handler_of_errors_takes_a_signal_for_one():
    assert not issubclass(EndRequested, Exception)  # what torch.load raises is caught so, and its checkpoint dropped


def test_training_hears_it_first_and_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with end_at_signals(), SignalListener() as interrupts:
            ask(signal.SIGHUP)
            assert interrupts.received is None
            ask(signal.SIGTERM)
            assert interrupts.received == "SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_python_cannot_restore_stays_set(monkeypatch):
    handler_of, set_handler, changed = signal.getsignal, signal.signal, []
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else handler_of(number))
    monkeypatch.setattr(signal, "signal", lambda number, new: changed.append(number) or set_handler(number, new))
    with end_at_signals(), SignalListener():
        pass
    assert signal.SIGTERM in changed
    assert signal.SIGUSR1 not in changed


@pytest.mark.parametrize("place", ["create_run", "Loop", "write_summary", "_close"])
def test_sigterm_before_and_after_training_ends_with_75_and_the_run_goes_on(tmp_path, monkeypatch, capsys, place):
    monkeypatch.chdir(tmp_path)
    module = resume if place in ("build", "create_run") else attempt
    inner = getattr(module, place)

    def asked(*arguments, **named):
        ask(signal.SIGTERM)
        return inner(*arguments, **named)

    monkeypatch.setattr(module, place, asked)
    assert main(list(TINY)) == 75
    said = capsys.readouterr().err
    assert "stopped: SIGTERM, ended at once" in said
    assert "hint: " in said
    monkeypatch.setattr(module, place, inner)
    assert main(list(TINY)) == 0
    assert (tmp_path / "outputs" / "run" / "steps.jsonl").read_bytes().count(b"\n") == 1


def test_a_second_ctrl_c_before_the_first_checkpoint_leaves_a_run_that_begins_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    attempted = Loop.attempt

    def asked_twice(loop, batch):
        ask(signal.SIGINT)
        ask(signal.SIGINT)
        attempted(loop, batch)

    monkeypatch.setattr(Loop, "attempt", asked_twice)
    assert main(list(TINY)) == 130
    assert "stopped: interrupted at once" in capsys.readouterr().err
    monkeypatch.setattr(Loop, "attempt", attempted)
    assert main(["resume", "outputs/run"]) == 0


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 75)])
def test_an_orderly_stop_is_no_error_and_names_the_line_that_resumes(tmp_path, monkeypatch, capsys, number, name, code):
    monkeypatch.chdir(tmp_path)
    attempted = Loop.attempt

    def asked_once(loop, batch):
        ask(number)
        attempted(loop, batch)

    monkeypatch.setattr(Loop, "attempt", asked_once)
    assert main([*TINY, "train.epochs=5"]) == code
    slow = "warning: precision=amp_dynamic on cpu: same numerics as tensor cores, but not faster than FP32"
    said = [
        line for line in capsys.readouterr().err.splitlines() if line != slow
    ]  # a CPU with FP16 arithmetic is not slow
    assert said == [f"stopped: {name}, saved after step 1 of 5", "hint: continue with: mptrain resume outputs/run"]
