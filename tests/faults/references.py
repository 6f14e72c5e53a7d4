"""Undisturbed runs, one for each configuration, and what is compared with them."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass

from tests.faults import pictures
from tests.faults.attempts import attempt, computed

NAME = "run"

#: Columns of epochs.csv that depend on the clock.
TIMES = ("seconds", "terms_per_second")

#: Events that say what training did; the others say how often it was broken off.
EVENTS = ("data_order", "overflow", "scale", "evaluation", "injected")


@dataclass(frozen=True)
class Result:
    """What a finished run left behind, as far as it does not depend on the clock."""

    steps: bytes  # of ``steps.jsonl``
    epochs: list  # rows of ``epochs.csv``
    events: list  # lines of ``events.jsonl`` that say what training did
    state: dict  # a digest for each part of the last checkpoint


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: its result, how often it passed which place, how long it took, how large it is in bytes."""

    result: Result
    counts: dict
    seconds: float
    size: int


class References:
    """Makes each reference when it is first asked for."""

    def __init__(self, folder):
        self._folder = folder
        self._known = {}

    def of(self, setting):
        if setting.number not in self._known:
            self._known[setting.number] = self._make(setting)
        return self._known[setting.number]

    def _make(self, setting):
        folder = self._folder / f"reference-{setting.number}"
        folder.mkdir()
        if setting.pictures:
            pictures.make(folder / "data")
        done = attempt((*setting.words, f"run.name={NAME}"), folder)
        assert done.code == 0, done.describe()
        run = folder / "outputs" / NAME
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        return Reference(result_of(run), done.trace.counts, done.seconds, size)


def result_of(run):
    """The result of a finished run."""
    with (run / "epochs.csv").open(newline="", errors="backslashreplace") as file:
        epochs = [{key: value for key, value in row.items() if key not in TIMES} for row in csv.DictReader(file)]
    # Sorted: when overflows are read off the device, between two other events, is the clock's business.
    events = sorted(line for line in (run / "events.jsonl").read_bytes().splitlines() if _kind_of(line) in EVENTS)
    return Result((run / "steps.jsonl").read_bytes(), epochs, events, computed(state_of, run))


def _kind_of(line):
    try:
        return json.loads(line)["event"]
    except (ValueError, KeyError, TypeError):  # damaged: it counts as a difference
        return EVENTS[0]


def state_of(run):
    """A digest for each part of the last checkpoint that does not depend on the clock."""
    import hashlib
    from pathlib import Path

    import torch

    newest = max(Path(run, "checkpoints").glob("step-*.json"))
    manifest = json.loads(newest.read_text())
    state = torch.load(newest.with_name(manifest["file"]), weights_only=True)
    digests = {}

    def visit(value, place):
        if isinstance(value, dict):
            for key, one in value.items():
                if not (key == "shape" and "__part__" in value):  # which the tensor itself has
                    visit(one, f"{place}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, one in enumerate(value):
                visit(one, f"{place}.{index}")
        elif isinstance(value, torch.Tensor):
            words = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            digests[place] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(words).hexdigest()}"
        else:
            digests[place] = repr(value)

    visit(state, "")
    if manifest.get("parts"):
        folder = newest.with_name(manifest["parts"])
        ranks = [
            torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(len(manifest["part_files"]))
        ]
        visit({name: torch.cat([parts[name] for parts in ranks]) for name in ranks[0]}, "parts")
    clocks = ("seconds", "waited", "joules", "energy", "steady")
    return {
        place: digest
        for place, digest in digests.items()
        if not (place.startswith(".progress") and any(word in place for word in clocks))
    }
