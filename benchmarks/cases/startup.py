"""Whole processes: time to the first step and to help, and the cost of a process for each job of a sweep (C6 to C8)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cases.case import Case, Setting
from benchmarks.results import Measurement, measured
from benchmarks.timing import estimate, take_turns
from mptrain.cli.train import train
from mptrain.config.compose import compose

if TYPE_CHECKING:
    from benchmarks.timing import Block

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

IMPORT_TORCH = (PYTHON, "-c", "import torch")
FIRST_STEP = (PYTHON, "-m", "benchmarks.programs.first_step", "device=cpu", "precision=fp32")
BARE_SCRIPT = (PYTHON, "-m", "benchmarks.programs.bare_script")
EMPTY_HYDRA = (PYTHON, "-m", "benchmarks.programs.empty_hydra", "--help")
HELP = (PYTHON, "-m", "mptrain", "--help")


def process(command: tuple[str, ...], folder: str) -> Block:
    """Runs of a command, one after the other."""

    def block(runs: int) -> float:
        started = time.perf_counter()
        for _ in range(runs):
            subprocess.run(
                command, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        return time.perf_counter() - started

    return block


def first_step(setting: Setting) -> list[Measurement]:
    """C6."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {"torch": IMPORT_TORCH, "ours": FIRST_STEP, "bare": BARE_SCRIPT}
        times = take_turns({name: process(words, folder) for name, words in commands.items()}, setting.seconds, least=4)
    return [
        measured("C6", "", times.ratio("ours", "torch")),
        measured("C6", "bare script / import torch", times.ratio("bare", "torch"), judged=False),
        measured("C6", "seconds of import torch", times.of("torch").value, judged=False),
    ]


def help_text(setting: Setting) -> list[Measurement]:
    """C7."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {"hydra": EMPTY_HYDRA, "ours": HELP}
        times = take_turns({name: process(words, folder) for name, words in commands.items()}, setting.seconds, least=5)
    return [
        measured("C7", "", times.ratio("ours", "hydra")),
        measured("C7", "seconds of an empty Hydra application", times.of("hydra").value, judged=False),
    ]


def isolation(setting: Setting) -> list[Measurement]:
    """C8: time from the start of a job to the start of the next, beyond that of runs in one process."""
    jobs = 6 if setting.rehearsal else 30
    words = ("model=mlp", "device=cpu", "threads=1", "precision=fp32", "train.max_steps=1", f"seed=range({jobs})")
    with tempfile.TemporaryDirectory() as folder:
        process((PYTHON, "-m", "mptrain", "-m", *words), folder)(1)
        attempts = [json.loads(path.read_text())["attempts"][0] for path in Path(folder).rglob("run.json")]
        alone = [_run_here((*words[:-1], f"run.root={folder}/here")) for _ in range(jobs // 2)]
    spans = sorted((moment(one["started"]), moment(one["ended"])) for one in attempts)
    within = estimate(alone[2:]).value
    paces = [after[0] - before[0] for before, after in itertools.pairwise(spans)]
    return [
        measured("C8", "", estimate([pace - within for pace in paces])),
        measured(
            "C8",
            "seconds between the end of a run and the start of the next",
            estimate([after[0] - before[1] for before, after in itertools.pairwise(spans)]),
            judged=False,
        ),
        measured("C8", "seconds of a run among others in one process", within, judged=False),
    ]


def _run_here(words: tuple[str, ...]) -> float:
    """Seconds of a whole run in this process."""
    started = time.perf_counter()
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        train(compose(words))
    return time.perf_counter() - started


def moment(text: str) -> float:
    """Seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


CASES = (
    Case("first step", ("C6",), first_step, 3),
    Case("help", ("C7",), help_text, 1),
    Case("isolation of jobs", ("C8",), isolation, 1),
)
