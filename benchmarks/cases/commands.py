"""Whole commands: peak memory, long records, a short sweep, the default command and its threads (C14 to C17, C19)."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.cases.case import Case, Setting
from benchmarks.cases.resnet_cpu import RESNET18
from benchmarks.cases.startup import ENVIRONMENT, PYTHON, ROOT, process
from benchmarks.results import Measurement, measured, unavailable
from benchmarks.timing import Times, estimate
from mptrain.config.compose import compose
from mptrain.runlog import RecordWriter, RunDirectory, RunPaths, RunState
from mptrain.system.records import StepRecord
from mptrain.system.torch_private import has_native_half

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = 200_000
_ROUNDS = 3


def peak_memory(setting: Setting) -> list[Measurement]:
    """C14: one batch at a time, no copy for a checkpoint."""
    samples, steps = 2, 4  # as the bare program has them
    parts = (
        f"dataset.samples={samples * (steps + 1)}",
        f"dataset.val_samples={samples}",
        f"dataset.test_samples={samples}",
    )
    words = ("model=resnet50", "dataset=synthetic", "dataset.image_size=224", *parts, "optimizer=sgd", "precision=fp32")
    more = (
        "device=cpu",
        "threads=1",
        f"train.batch_size={samples}",
        f"train.max_steps={steps}",
        "checkpoint.async_save=false",
    )
    ours, bare = [], []
    for number in range(1 if setting.rehearsal else _ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            process((PYTHON, "-m", "mptrain", *words, *more, f"run.root={folder}", f"run.name=run{number}"), folder)(1)
            ours.append(json.loads((Path(folder) / f"run{number}" / "summary.json").read_text())["peak_memory"])
        told = subprocess.run(
            (PYTHON, "-m", "benchmarks.programs.bare_resnet50"), cwd=ROOT, check=True, capture_output=True, text=True
        )
        bare.append(int(told.stdout))
    return [
        measured("C14", "", estimate([one / other for one, other in zip(ours, bare, strict=True)])),
        measured("C14", "MB of the bare loop", estimate([one / 1e6 for one in bare]).value, judged=False),
    ]


def long_records(setting: Setting) -> list[Measurement]:
    """C15: a run that overflows now and then, replayed under a rule that is not its own, and its report."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run, 2_000 if setting.rehearsal else _STEPS)
        commands = {
            "replay": (PYTHON, "-m", "mptrain", "replay", str(run), "scaler=deepspeed"),
            "report": (PYTHON, "-m", "mptrain", "report", str(run)),
            "import torch": (PYTHON, "-c", "import torch"),
        }
        times = _in_turns(commands, folder, setting)
    return [
        measured("C15", "replay", times.of("replay")),
        measured("C15", "report", times.of("report")),
        measured("C15", "seconds of import torch", times.of("import torch").value, judged=False),
    ]


def short_sweep(setting: Setting) -> list[Measurement]:
    """C16: two jobs one after the other, and the same two as commands of their own."""
    words = ("model=mlp", "dataset=digits", "device=cpu", "threads=1", "train.epochs=2")
    program = (PYTHON, "-m", "mptrain")
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "sweep": (*program, "-m", *words, "seed=0,1", f"run.root={folder}"),
            "single": (*program, *words, "seed=0", f"run.root={folder}"),
        }
        times = _in_turns(commands, folder, setting)
    pairs = zip(times.seconds["sweep"], times.seconds["single"], strict=True)
    return [
        measured("C16", "", estimate([sweep - 2 * single for sweep, single in pairs])),
        measured("C16", "seconds over one single run", times.difference("sweep", "single"), judged=False),
    ]


_NO_FP16 = "this CPU has no FP16 arithmetic, and stock torch's FP16 kernels are scalar"


class _Run(NamedTuple):
    wall: float
    training: float


def default_command(setting: Setting) -> list[Measurement]:
    """C17: on all cores, alone and beside a process that fills one; threads and their waiting as users get them."""
    rows = []
    for busy in (False, True):
        with contextlib.ExitStack() as stack:
            if busy:
                hog = stack.enter_context(subprocess.Popen((PYTHON, "-c", "while True: pass")))
                stack.callback(hog.kill)
            for mode in ("fp32", "amp_dynamic"):
                if mode != "fp32" and not has_native_half("float16"):
                    rows += [] if busy else [unavailable("C17", f"{mode}: {part}", _NO_FP16) for part in _Run._fields]
                    continue
                pairs = [(_ours(mode), _bare(mode)) for _ in range(1 if setting.rehearsal else _ROUNDS)]
                name = f"{mode}, beside a busy process" if busy else mode
                for part in _Run._fields:
                    ratio = estimate([getattr(ours, part) / getattr(bare, part) for ours, bare in pairs])
                    rows.append(measured("C17", f"{name}: {part}", ratio, judged=not busy))
    return rows


def default_threads(setting: Setting) -> list[Measurement]:
    """C19: seconds of training, with other numbers of threads and other ways to wait in turns."""
    others = {
        "one thread": {"OMP_NUM_THREADS": "1"},
        "spinning": {"OMP_WAIT_POLICY": "active"},
        "sleeping": {"OMP_WAIT_POLICY": "passive"},
    }
    rows = []
    for model, words in {"cnn": ("train.epochs=6",), "resnet18": (*RESNET18, "train.epochs=1")}.items():
        for mode in ("fp32", "amp_dynamic"):
            name = f"{model} {mode}"
            if mode != "fp32" and not has_native_half("float16"):
                rows.append(unavailable("C19", name, _NO_FP16))
                continue
            seconds: dict[str, list[float]] = {}
            for _ in range(1 if setting.rehearsal else _ROUNDS):
                for way, environment in {"default": {}, **others}.items():
                    seconds.setdefault(way, []).append(_ours(mode, *words, **environment).training)
            best = min(others, key=lambda way: estimate(seconds[way]).value)
            speed = estimate([other / own for other, own in zip(seconds[best], seconds["default"], strict=True)])
            rows.append(measured("C19", name, speed))
            rows += [
                measured("C19", f"{name}: seconds, {way}", estimate(spent), judged=False)
                for way, spent in seconds.items()
            ]
    return rows


def _ours(mode: str, *more: str, **environment: str) -> _Run:
    with tempfile.TemporaryDirectory() as folder:
        words = (f"precision={mode}", "device=cpu", f"run.root={folder}", "run.name=run", *more)
        wall, _ = _on_all_cores("mptrain", *words, **environment)
        return _Run(wall, json.loads((Path(folder) / "run" / "summary.json").read_text())["train_seconds"])


def _bare(mode: str) -> _Run:
    wall, printed = _on_all_cores("benchmarks.programs.bare_training", mode)
    return _Run(wall, float(printed))


def _on_all_cores(*words: str, **environment: str) -> tuple[float, str]:
    """Seconds of a program, and what it printed; only the given variables decide about threads."""
    free = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    started = time.perf_counter()
    done = subprocess.run(
        (PYTHON, "-m", *words), cwd=ROOT, env={**free, **environment}, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - started, done.stdout


def _in_turns(commands: Mapping[str, tuple[str, ...]], folder: str, setting: Setting) -> Times:
    blocks = {name: process(words, folder) for name, words in commands.items()}
    found: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(2 if setting.rehearsal else 1 + _ROUNDS):
        for name, block in blocks.items():
            seconds = block(1)
            if number:  # the first round warms up
                found[name].append(seconds)
    return Times(found)


def write_run(root: Path, steps: int) -> None:
    """Write the run directory of a run with dynamic loss scaling, whose gradients come and go."""
    draws, paths = random.Random(0), RunPaths(root)
    root.mkdir(parents=True)
    directory = RunDirectory(paths)
    directory.write_state(RunState(id="run", argv=(), command="mptrain").begin().end("done", "", 0, steps))
    directory.write_config(compose(["precision=fp16_dynamic", "model=mlp"]).yaml, ())
    writer, scale, clean, updates = RecordWriter(paths), 2.0**16, 0, 0
    for step in range(1, steps + 1):
        overflow = scale >= 2.0 ** (18 + 2 * math.sin(step / 9000) + draws.gauss(0, 0.3))
        updates += not overflow
        norm = math.inf if overflow else 1 + draws.random()
        loss = 2.3 * math.exp(-step / steps) + 0.1 * draws.random()
        writer.take(StepRecord("main", step, updates, step // 45, loss, scale, overflow, overflow, norm, 0.1))
        clean = 0 if overflow else clean + 1
        if overflow:
            scale /= 2
        elif clean == 2000:
            scale, clean = scale * 2, 0
    writer.close()


CASES = (
    Case("peak memory", ("C14",), peak_memory, 3),
    Case("long records", ("C15",), long_records, 3),
    Case("default command", ("C17",), default_command, 4),
    Case("default threads", ("C19",), default_threads, 4),
    Case("short sweep", ("C16",), short_sweep, 2),
)
