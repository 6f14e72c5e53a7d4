"""Checkpoints that are written behind training."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mptrain.engine import validation
from mptrain.system.errors import StorageError
from tests.small_runs import TINY, continue_loop, interrupt_after, loop_of, steps_of

WORDS = (*TINY, "precision=amp_dynamic", "train.ema_decay=0.9")


def at_step(loop, number, action):
    """Do something after a certain step."""
    lap = loop.telemetry.clock.lap

    def lap_and_act(*counted):
        if loop.progress.step == number:
            action()
        return lap(*counted)

    loop.telemetry.clock.lap = lap_and_act


def hold(loop, monkeypatch):
    """Let the store write nothing before the event that is returned."""
    save, opened = loop.storage.store.save, threading.Event()

    def when_opened(*args, **known):
        assert opened.wait(20)
        return save(*args, **known)

    monkeypatch.setattr(loop.storage.store, "save", when_opened)
    return opened


def weights_of(loop):
    return {**loop.parts.model.state_dict(), **{f"average {name}": v for name, v in loop.parts.averages().items()}}


def test_training_goes_on_while_an_earlier_state_is_written(tmp_path, monkeypatch):
    words = (*WORDS, "checkpoint.every_steps=4", "train.max_steps=7")
    waiting = loop_of(tmp_path, *words, "checkpoint.async_save=false")
    waiting.run()
    loop = loop_of(tmp_path, *words)
    opened = hold(loop, monkeypatch)
    at_step(loop, 7, opened.set)
    loop.run()
    expected, found = (each.storage.store.load(each.storage.paths.checkpoints / "step-00000004.json").state
                       for each in (waiting, loop))  # fmt: skip
    assert found["learners"]["main"]["updates"].item() == expected["learners"]["main"]["updates"].item()
    for part in ("model", "carried"):
        assert all(torch.equal(value, expected[part][name]) for name, value in found[part].items())
    for part in ("average", "scaler"):
        own, others = found["learners"]["main"][part], expected["learners"]["main"][part]
        assert all(torch.equal(value, others[name]) for name, value in own.items())
    assert found["progress"]["step"] == found["accounts"]["main"]["last"]["step"] == 4
    assert torch.equal(found["random"]["torch"], expected["random"]["torch"])


def test_a_run_trains_alike_whether_it_waits_for_the_disk_or_not(tmp_path):
    loops = [
        loop_of(tmp_path, *WORDS, "checkpoint.every_steps=1", f"checkpoint.async_save={background}")
        for background in ("true", "false")
    ]
    for loop in loops:
        loop.run()
    assert steps_of(loops[0]) == steps_of(loops[1])
    one, other = map(weights_of, loops)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_run_whose_last_save_was_not_finished_goes_on_from_the_one_before(tmp_path, monkeypatch):
    whole = loop_of(tmp_path, *WORDS)
    whole.run()
    loop = loop_of(tmp_path, *WORDS, "checkpoint.every_steps=4")
    loop.storage.store.keep = 9
    interrupt_after(loop, 11)
    for step in (8, 11):  # as if the process had been killed before these manifests were written
        (loop.storage.paths.checkpoints / f"step-{step:08d}.json").unlink()
    rest = continue_loop(loop, *WORDS)
    assert rest.progress.step == 4
    rest.run()
    assert steps_of(rest) == steps_of(whole)


@pytest.mark.parametrize("how", ["the end", "a signal", "a bug"])
def test_the_end_waits_until_what_was_saved_is_on_the_disk(tmp_path, monkeypatch, how):
    loop = loop_of(tmp_path, *WORDS, *(("checkpoint.every_steps=4",) if how == "a bug" else ()))
    opened = hold(loop, monkeypatch)
    threading.Timer(0.3, opened.set).start()
    started = time.monotonic()
    if how == "the end":
        loop.run()
    elif how == "a signal":
        interrupt_after(loop, 3)
    else:
        at_step(loop, 5, {}.popitem)
        with pytest.raises(KeyError):
            loop.run()
    assert time.monotonic() - started > 0.2
    assert loop.storage.store.load_latest().manifest.step == {"the end": loop.planned, "a signal": 3, "a bug": 4}[how]


def refuse(*args, **known):
    raise StorageError("cannot write", "free some space")


def test_an_error_of_the_writing_thread_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    loop = loop_of(tmp_path, *WORDS, "checkpoint.every_steps=4")
    monkeypatch.setattr(loop.storage.store, "save", refuse)
    at_step(loop, 5, lambda: loop.checkpointing.saver._saving.exception(20))
    with pytest.raises(StorageError, match="cannot write"):
        loop.run()
    assert loop.progress.step == 5
    assert [step["step"] for step in steps_of(loop)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", ["the end", "a signal", "a bug"])
def test_an_error_of_the_last_save_is_what_the_run_ends_with(tmp_path, monkeypatch, how):
    loop = loop_of(tmp_path, *WORDS, *(("checkpoint.every_steps=4",) if how == "a bug" else ()))
    monkeypatch.setattr(loop.storage.store, "save", refuse)
    if how == "a signal":
        at_step(loop, 3, lambda: setattr(loop.interrupts, "received", "SIGTERM"))
    if how == "a bug":
        save = loop.checkpointing.save
        monkeypatch.setattr(loop.checkpointing, "save", lambda: (save(), 1 / 0))
    with pytest.raises(StorageError, match="cannot write") as caught:
        loop.run()
    assert caught.value.hint == "free some space"


def test_while_it_evaluates_every_step_is_in_the_file(tmp_path, monkeypatch):
    loop = loop_of(tmp_path, *TINY, "log.ring=32", "log.seconds=1000")
    usual, found = validation.evaluate, []

    def look_and_evaluate(*arguments, **named):
        found.append(loop.storage.paths.steps.read_bytes().count(b"\n"))
        return usual(*arguments, **named)

    monkeypatch.setattr(validation, "evaluate", look_and_evaluate)
    loop.run()
    assert found == [6, 12, 18, 18]


def test_with_no_time_between_two_looks_every_step_is_in_the_file_at_once(tmp_path):
    loop = loop_of(tmp_path, *TINY, "log.ring=32", "log.seconds=0")
    show, found = loop.telemetry.show, []

    def show_and_look(doing):
        show(doing)
        found.append((loop.progress.step, loop.storage.paths.steps.read_bytes().count(b"\n")))

    loop.telemetry.show = show_and_look
    loop.run()
    assert len(found) > 18
    assert all(step == lines for step, lines in found)
