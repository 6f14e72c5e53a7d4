"""However a watched loop ends, its steps are in the files: without close, by a signal, again by a callback, by other threads."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import mptrain
from mptrain.integrations.watch import WatchingCallback
from mptrain.runlog import read_run
from tests.integrations.alone_and_watched import Scaler, loss_of, model_of


def test_a_watch_that_nobody_closes_ends_with_its_loop(tmp_path):
    original = torch.autograd.backward

    def cell():
        model = model_of()
        own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        mptrain.watch(model, own, scaler, dir=tmp_path / "run")
        for _ in range(5):
            own.zero_grad()
            scaler.scale(loss_of(model)).backward()
            gc.collect()  # nobody holds the watch, which goes on
            scaler.step(own)
            scaler.update()

    cell()
    gc.collect()
    assert torch.autograd.backward is original
    run = read_run(tmp_path / "run")
    assert (len([*run.steps()]), run.state.status) == (5, "done")


PROGRAM = """
import os, sys, threading, time, torch, mptrain
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(4, 2)
own = torch.optim.SGD(model.parameters(), 0.1)
watch = mptrain.watch(model, own, every=0, dir=sys.argv[2])
for step in range(1, 61):
    own.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    own.step()
    if step == 30 and sys.argv[1] == "fork" and os.fork() == 0:
        for _ in range(5):
            own.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            own.step()
        sys.exit(0)
    if step == 60 and sys.argv[1] == "term":
        time.sleep(1.2)
        own.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        own.step()
        print("ready", flush=True)
        time.sleep(60)
if sys.argv[1] == "raise":
    raise ValueError("of the loop")
if sys.argv[1] == "fork":
    os.wait()
if sys.argv[1] == "exit":
    sys.exit(3)
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["end", "exit", "raise", "fork", "term"])
def test_a_process_that_ends_without_close_leaves_its_steps(how, tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if how == "term":
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGTERM)
    _, said = program.communicate(timeout=120)
    expected = {"exit": 3, "raise": 1, "term": -signal.SIGTERM}.get(how, 0)
    assert program.returncode == expected, said
    run = read_run(tmp_path / "run")
    assert [one.step for one in run.steps()] == [*range(1, 61)]
    status = {"raise": "failed", "term": "running"}.get(how, "done")
    assert (run.state.status, "ValueError: of the loop" in run.state.reason) == (status, how == "raise")


def test_another_thread_may_flush(tmp_path):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    ended = threading.Event()
    with mptrain.watch(model, own, every=0, dir=tmp_path / "run") as watch:

        def flushing():
            while not ended.is_set():
                watch.flush()
                time.sleep(0)

        thread = threading.Thread(target=flushing)
        thread.start()
        for _ in range(200):
            own.zero_grad()
            loss_of(model).backward()
            own.step()
        ended.set()
        thread.join()
    assert [one.step for one in read_run(tmp_path / "run").steps()] == [*range(1, 201)]


def test_a_callback_begins_again_beside_its_first_records_and_takes_only_numbers(tmp_path):
    callback, model = WatchingCallback(every=0, dir=tmp_path / "run"), model_of()
    for steps in (0, 3):
        own = torch.optim.SGD(model.parameters(), 0.1)
        callback._start(model, own, None, steps)
        for _ in range(3):
            own.zero_grad()
            loss_of(model).backward()
            own.step()
        with pytest.warns(UserWarning, match="no numbers: report, confusion, none, nested"):
            callback._evaluated(
                {
                    "accuracy": torch.tensor(0.5),
                    "report": "precision",
                    "confusion": [[1]],
                    "none": None,
                    "nested": {},
                    "a_runtime": 3.0,
                    "samples_per_second": 1.0,
                }
            )
        callback._close()
    for name, expected in (("run", [1, 2, 3]), ("run-2", [4, 5, 6])):
        run = read_run(tmp_path / name)
        assert [one.step for one in run.steps()] == expected
        assert run.summary["learners"]["main"] == {**run.summary["learners"]["main"], "skipped": 0, "updates": 3}
        assert [one["metrics"] for one in run.events() if one["event"] == "evaluation"] == [{"accuracy": 0.5}]
    with pytest.warns(UserWarning, match="does not watch this training: Scaler is no"):
        callback._start(model, own, Scaler(), 0)
    assert callback.watch is None


def test_a_look_while_a_frozen_part_is_flushed_keeps_its_losses(tmp_path):
    model = model_of()
    own = [torch.optim.SGD(one.parameters(), 0.1) for one in (model[0], model[2])]
    with mptrain.watch(model, own, every=0, dir=tmp_path / "run") as watch:
        for _ in range(3):
            for at, part in enumerate((model[0], model[2])):
                model.requires_grad_(False)
                part.requires_grad_(True)
                loss_of(model).backward()
                own[at].step()
                watch.flush()
    assert all(math.isfinite(one.loss) for one in read_run(tmp_path / "run").steps())
