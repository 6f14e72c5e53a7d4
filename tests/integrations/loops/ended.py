"""Loops that end early, or in other processes and threads: ``python -m tests.integrations.loops.ended ENDING FOLDER``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.integrations.loops.judge import Truth, Watching, batches, cpu_scaler, loop, loss_of, mlp, norm, update


class OfTheUserError(Exception):
    """Exception of a loop."""


@loop()
def exception(watch, truth):
    """An exception leaves the first watch after a pass; a second one has the same model and optimizer."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def train(truth, count, broken_at=None):
        for i, x, y in batches(count):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            if i == broken_at:
                truth.left_out += 1
                raise OfTheUserError("of the user")
            truth.step(loss=loss, norm=norm(model))
            optimizer.step()

    with contextlib.suppress(OfTheUserError), watch(model, optimizer, name="first"):
        train(truth.also("first", status="failed", reason="OfTheUserError: of the user"), 8, broken_at=5)
        raise AssertionError("the exception is lost")
    with watch(model, optimizer):
        train(truth, 3)
    return model


@loop(processes=1)
def forked(watch, truth):
    """Children of the loop save a checkpoint and leave: at once, by the end of the watch, and by the exit functions."""
    model, scaler, parent, data = mlp(), cpu_scaler(), os.getpid(), batches(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def leave(with_exit_functions=True):
        if with_exit_functions:
            atexit._run_exitfuncs()
            gc.collect()
        os._exit(0)

    with watch(model, optimizer, scaler) as watched:
        for i in range(1, 31):
            _, x, y = data[i % 4]
            loss = loss_of(model, x, y, math.inf if i == 15 else None)
            update(truth, model, optimizer, loss, scaler, skipped=i == 15)
            if i % 10:
                continue
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0
                continue
            torch.save(model.state_dict(), io.BytesIO())
            watched.flush()
            if i == 20:
                break
            leave(with_exit_functions=i == 30)
    if os.getpid() != parent:
        leave()
    return model


@loop()
def flushed_by_a_thread(watch, truth):
    """A thread flushes all the time; one of two learners overflows in its update 60."""
    models, scaler, data = [mlp(), mlp(seed=1)], cpu_scaler(256.0), batches(4)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    ended, errors = threading.Event(), []

    def beat():
        try:
            while not ended.wait(0.005):
                watched.flush()
                watched.last  # noqa: B018
        except Exception as error:
            errors.append(error)

    with watch(models, optimizers, scaler, every=10) as watched:
        thread = threading.Thread(target=beat)
        thread.start()
        for i in range(1, 121):
            _, x, y = data[i % 4]
            for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                skipped, scale = (i, at) == (60, 1), scaler.get_scale()
                loss = loss_of(model, x, y, math.inf if skipped else None)
                scaler.scale(loss).backward()
                truth.look(model, f"optimizer{at}", prefix=f"{at}.")
                truth.step(f"optimizer{at}", skipped=skipped, loss=loss, norm=norm(model, scale), scale=scale)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            truth.scaled(scale, scaler.get_scale())
        ended.set()
        thread.join()
    assert not errors, errors
    return models


@dataclass(frozen=True)
class Ending:
    """End of a process within its loop.

    Attributes:
        updates: Updates that it makes; the fourth is skipped.
        codes: Exit statuses that it has without a watch.
        status: Status of the run on record.
        signal: Signal that is sent to it when it has made them; None if it exits by itself.
        inside: Whether the watch is a context manager; else nobody closes it.
        tracebacks: Tracebacks that Python prints.
    """

    updates: int
    codes: tuple[int, ...]
    status: str
    signal: int | None = None
    inside: bool = False
    tracebacks: int = 0


INTERRUPTED = (-signal.SIGINT, 130, 1)
ENDINGS = {
    "exit": Ending(9, (3,), "done"),
    "terminated": Ending(15, (-signal.SIGTERM,), "running", signal.SIGTERM),
    "terminated_inside": Ending(15, (-signal.SIGTERM,), "running", signal.SIGTERM, inside=True),
    "interrupted": Ending(10, INTERRUPTED, "failed", signal.SIGINT, tracebacks=1),
    "interrupted_inside": Ending(10, INTERRUPTED, "failed", signal.SIGINT, inside=True, tracebacks=1),
    "interrupted_and_caught": Ending(10, (0,), "done", signal.SIGINT),
}
#: Words that a process prints when the signal may come.
READY = "all updates are made"


def train(ending: Ending, watch: Watching, truth: Truth) -> None:
    """Make the updates of a process; a record of its own accord is written once a second."""
    model, scaler = mlp(), cpu_scaler()
    kind = torch.optim.SGD if ending.signal else torch.optim.AdamW
    optimizer = kind(model.parameters(), 0.01)
    terminated, alone = ending.signal == signal.SIGTERM, watch.folder is None
    watched = watch(model, optimizer, scaler, every=0 if terminated else 4)
    with watched if ending.inside else contextlib.nullcontext():
        for i, x, y in batches(ending.updates):
            update(truth, model, optimizer, loss_of(model, x, y, math.inf if i == 4 else None), scaler, skipped=i == 4)
            if terminated and i in (10, 15) and not alone:
                time.sleep(1.3)
        if alone:
            return
        if ending.signal is None:
            sys.exit(3)
        print(READY, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    with contextlib.suppress(*[KeyboardInterrupt] * (sys.argv[1] == "interrupted_and_caught")):
        train(ENDINGS[sys.argv[1]], Watching(Path(sys.argv[2])), Truth())
