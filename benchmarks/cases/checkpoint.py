"""A checkpoint of 256 MB: how long training is blocked, and how long until it is on the disk (C9)."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.cases.case import Case, Setting
from benchmarks.results import Measurement, measured
from benchmarks.timing import Estimate, estimate
from mptrain.runlog import RecordWriter, create_run
from mptrain.runlog.checkpoints import CheckpointStore, Saver

TENSORS = 160


def saving(setting: Setting) -> list[Measurement]:
    """C9: ours, a copy in memory, a plain write and torch.save take turns."""
    elements = (100_000 if setting.rehearsal else 64_000_000) // TENSORS
    state = {str(index): torch.randn(elements) for index in range(TENSORS)}
    copies = {name: torch.zeros_like(value) for name, value in state.items()}
    content = memoryview(torch.cat(list(state.values())).numpy().tobytes())
    blocked: list[float] = []
    total: list[float] = []
    copied: list[float] = []
    written: list[float] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        run = create_run(Path(folder), "benchmark")
        writer = RecordWriter(run.paths)
        store = CheckpointStore(run.paths.checkpoints, 1)
        until = time.perf_counter() + setting.seconds
        with Saver(store, writer, async_save=True) as saver:
            while len(copied) < 5 or time.perf_counter() < until:
                started = time.perf_counter()
                for name, value in state.items():
                    copies[name].copy_(value)
                copied.append(time.perf_counter() - started)
                started = time.perf_counter()
                saver.save(state, step=len(copied), metric=None, config_digest="")
                blocked.append(time.perf_counter() - started)
                saver.wait()
                total.append(time.perf_counter() - started)
                written.append(_write(Path(folder) / "plain", content))
                plain.append(_save(Path(folder) / "torch", state))
        writer.close()
    first = 1  # the first save makes its buffers
    return [
        measured("C9", "blocked / memcpy", _ratio(blocked[first:], copied[first:])),
        measured("C9", "total / write + fsync", _ratio(total[first:], written[first:])),
        measured("C9", "torch.save + fsync / memcpy", _ratio(plain[first:], copied[first:]), judged=False),
        measured("C9", "torch.save + fsync / write + fsync", _ratio(plain[first:], written[first:]), judged=False),
        measured("C9", "seconds of write + fsync", estimate(written[first:]).value, judged=False),
    ]


def _ratio(one: list[float], other: list[float]) -> Estimate:
    return estimate([a / b for a, b in zip(one, other, strict=True)])


def _write(path: Path, content: memoryview) -> float:
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        done = 0
        while done < len(content):
            done += file.write(content[done : done + (8 << 20)]) or 0
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _save(path: Path, state: dict[str, torch.Tensor]) -> float:
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


CASES = (Case("checkpoint", ("C9",), saving, 2),)
