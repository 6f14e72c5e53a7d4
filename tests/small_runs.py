"""Small runs for tests: from overrides to built parts, a loop, or a whole process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.engine.loop import Loop
from mptrain.engine.telemetry import Storage
from mptrain.run.build.parts import build
from mptrain.runlog import RecordWriter, create_run, truncate_records
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.system.errors import Preempted

#: A network and a data set that train in milliseconds.
TINY = (
    "model=mlp",
    "dataset.image_size=8",
    "dataset.train_samples=96",
    "train.batch_size=16",
    "train.epochs=3",
    "checkpoint.every_epochs=null",
)


@dataclass
class Kept:
    """A sink that keeps everything in order."""

    records: list = field(default_factory=list)

    def take(self, record):
        self.records.append(record)

    def close(self):
        pass

    def of(self, kind):
        return [record for record in self.records if isinstance(record, kind)]


def parts_of(*overrides):
    return build(compose(overrides))


def loop_of(root: Path, *overrides, kept: Kept | None = None) -> Loop:
    config = compose(overrides)
    parts, options = build(config)
    run = create_run(root, "test")
    store = CheckpointStore(run.paths.checkpoints, config.checkpoint.keep)
    return Loop(parts, options, Storage(run.paths, RecordWriter(run.paths), store, "digest"), [kept or Kept()])


def continue_loop(loop: Loop, *overrides, kept: Kept | None = None) -> Loop:
    """A fresh loop over the same directory, restored from its latest checkpoint."""
    old = loop.storage
    old.writer.close()
    parts, options = build(compose(overrides))
    loaded = old.store.load_latest()
    truncate_records(old.paths, loaded.manifest.records if loaded else {})
    storage = Storage(old.paths, RecordWriter(old.paths), old.store, old.config_digest)
    fresh = Loop(parts, options, storage, [kept or Kept()])
    if loaded:
        old.store.drop_after(loaded.manifest.step)
        fresh.notes = fresh.checkpointing.restore(loaded.state, forgive=False)
    return fresh


def interrupt_after(loop: Loop, step: int) -> None:
    """Run until a signal arrives in a step, which ends and saves the run."""
    lap = loop.telemetry.clock.lap

    def lap_and_signal(*counted):
        if loop.progress.step == step:
            loop.interrupts.received = "SIGTERM"
        return lap(*counted)

    loop.telemetry.clock.lap = lap_and_signal
    with pytest.raises(Preempted, match=f"after step {step} of"):
        loop.run()


def whole_and_resumed(root: Path, *overrides: str, after: int) -> tuple[Loop, Loop]:
    """A run to its end, and the same one interrupted after a step and gone on with."""
    whole = loop_of(root / "whole", *overrides)
    whole.run()
    broken = loop_of(root / "broken", *overrides)
    interrupt_after(broken, after)
    resumed = continue_loop(broken, *overrides)
    resumed.run()
    for loop in (whole, broken, resumed):
        for loader in loop.parts.loaders.values():
            loader.close()  # as a run does, or its processes wait until Python collects them
    return whole, resumed


def steps_of(loop: Loop) -> list[dict]:
    loop.storage.writer.flush()
    return [json.loads(line) for line in loop.storage.paths.steps.read_text().splitlines()]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mptrain", *words]


def environment(**extra: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **extra}


def run_in_process(*words: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in this process, as `run_command` does in one of its own: without the seconds that importing torch takes."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(cwd)
        for name, value in extra.items():
            patch.setenv(name, value)
        code = main(list(words))
    return subprocess.CompletedProcess(["mptrain", *words], code, out.getvalue(), err.getvalue())


def run_command(*words: str, cwd: Path, timeout: float = 240, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), check=False, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=timeout
    )
