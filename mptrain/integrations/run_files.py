"""Run directory of a watched training loop, which the commands that read runs take like any other."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.directory import create_run
from mptrain.runlog.record_writer import RecordWriter, event_fields
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_state import RunState
from mptrain.runlog.summary_file import write_summary
from mptrain.system.environment import cuda_backends, device_in_words, git_commit, versions_now
from mptrain.system.errors import StorageError
from mptrain.system.records import EventRecord, OverflowRecord, Record, StepRecord, as_json


class RunFiles:
    """Sink that writes a new run directory: identity, steps, events and, at the end, counts.

    Raises StorageError if the directory exists.
    """

    def __init__(self, root: Path, parts: Mapping[str, str], device: torch.device) -> None:
        root = root.absolute()
        if root.exists():
            raise StorageError(f"{root} exists", "choose another folder for each run")
        self._directory = create_run(root.parent, "", root.name)
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(self._directory.lock())
        self._directory.write_config(f"watched: {json.dumps(dict(parts))}\n", ())
        words = tuple(sys.argv)
        self._state = RunState(
            id=root.name,
            argv=words[1:],
            command=shlex.join(["python", *words]),
            git_sha=git_commit(),
            versions=versions_now(),
            device=device_in_words(device),
            backends=cuda_backends(device),
            parts=dict(parts),
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
        ).begin()
        self._directory.write_state(self._state)
        self._writer = RecordWriter(self._directory.paths)
        self._learners: dict[str, dict[str, Any]] = {}
        self._steps = 0

    def take(self, record: Record) -> None:
        """Write a record, and count steps and overflows for the summary."""
        self._writer.take(record)
        if isinstance(record, StepRecord):
            self._steps, scale = max(self._steps, record.step), record.loss_scale
            first = {"overflows": {}, "scale": {"first": scale, "min": scale, "max": scale}}
            found = self._learners.setdefault(record.learner, first)
            skipped = record.step - record.updates
            found |= {"updates": record.updates, "skipped": skipped, "skip_rate": skipped / record.step}
            path = found["scale"]
            path |= {"min": min(path["min"], scale), "max": max(path["max"], scale), "last": scale}
        elif isinstance(record, OverflowRecord):
            phases = self._learners[record.learner]["overflows"]
            phases[record.phase] = phases.get(record.phase, 0) + 1

    def close(self) -> None:
        """Write the summary, and record that the loop has ended; a second call does nothing."""
        if self._state.status != "running":
            return
        self._writer.close()
        write_summary(self._directory.paths.summary, {"steps": self._steps, "learners": self._learners})
        error = sys.exc_info()[1]
        if error is None:
            self._state = self._state.end("done", "", 0, self._steps)
        else:
            self._state = self._state.end("failed", f"{type(error).__name__}: {error}", 1, self._steps)
        self._directory.write_state(self._state)
        self._lock.close()


class RankEvents:
    """Sink of a rank other than 0: it writes the overflows of the rank's own gradients into the run directory."""

    def __init__(self, root: Path, rank: int) -> None:
        self._path = RunPaths(root.absolute()).ranks / f"{rank}.jsonl"

    def take(self, record: Record) -> None:
        """Write an overflow of this rank, and ignore other records, which rank 0 has too."""
        if isinstance(record, EventRecord) and record.kind == "rank_overflow":
            with storage_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(as_json(event_fields(record)) + "\n")

    def close(self) -> None:
        """Do nothing: everything is written."""
