"""Run directory of a watched training loop, which the commands that read runs take like any other."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from mptrain.integrations.passes import world_size
from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.directory import create_run
from mptrain.runlog.record_writer import RecordWriter
from mptrain.runlog.run_paths import WATCHED, RunPaths
from mptrain.runlog.run_state import RunState, write_summary
from mptrain.system.errors import StorageError
from mptrain.system.process_state import cuda_backends, device_in_words, git_commit, versions_now
from mptrain.system.records import (
    EvalRecord,
    EventRecord,
    HistogramRecord,
    OverflowRecord,
    Record,
    StepRecord,
    TensorKind,
)

#: Losses of training whose mean stands for the result of a loop that is not evaluated.
_LAST_LOSSES = 100


class RecordFiles:
    """Sink that writes the records of one rank into a folder, which it makes for the first of them.

    Args:
        root: The folder.
        kinds: Kinds of the events to write, and nothing else; None to write everything.
    """

    def __init__(self, root: Path, kinds: frozenset[str] | None = None) -> None:
        self._root, self._kinds = root, kinds
        self._writer: RecordWriter | None = None

    def take(self, record: Record) -> None:
        """Write a record, unless it is left out."""
        if self._kinds is not None and not (isinstance(record, EventRecord) and record.kind in self._kinds):
            return
        if self._writer is None:
            with storage_errors(self._root):
                self._root.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(RunPaths(self._root))
        self._writer.take(record)

    def flush(self) -> None:
        """Write the records so far to their files."""
        if self._writer is not None:
            self._writer.flush()

    def drop_histograms(self) -> bool:
        """Remove the histograms, to have room for other records; return whether there are any."""
        return self._writer is not None and self._writer.drop_histograms()

    def close(self) -> None:
        """Write what is left; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def rank_files(root: Path, rank: int, *, sharded: bool) -> RecordFiles:
    """Return the sink of a rank above 0 in a run directory.

    Of sharded parameters each rank has records of its own, which are merged when they are read. Else rank 0 has those
    of all, and the others have the overflows of their own gradients, and what they have not looked at.
    """
    return RecordFiles(
        RunPaths(root).ranks / str(rank), None if sharded else frozenset({"rank_overflow", "not_looked_at"})
    )


@dataclass(frozen=True)
class WatchedLoop:
    """Description of a watched loop for its run directory.

    Attributes:
        parts: One line for each part by name, as for a run of mptrain: model, precision, scaler, optimizer.
        scaler: Hyper-parameters of its `torch.amp.GradScaler`, named as those of `mptrain.scaler.DynamicScaler`.
        sharded: Its parameters are sharded (FSDP2).
        steps: Steps of the training before it, as of one that is resumed.
        inside: Classes of modules with parameters that are none of torch, and whose own operators were not looked at.
    """

    parts: dict[str, str]
    scaler: dict[str, float]
    device: torch.device
    sharded: bool
    steps: int = 0
    inside: str = ""


class RunFiles(RecordFiles):
    """Sink that writes a new run directory: identity, records and, at the end, counts.

    Raises StorageError if the directory exists.
    """

    def __init__(self, root: Path, loop: WatchedLoop) -> None:
        root = root.absolute()
        super().__init__(RunPaths(root).ranks / "0" if loop.sharded else root)
        with storage_errors(root, "read"):
            if root.exists():
                raise StorageError(f"{root} exists", "choose another folder for each run")
        self._directory = create_run(root.parent, "", root.name)
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(self._directory.lock())
        self._loop = loop
        self._precision: dict[str, Any] = {}
        self._write_config()
        words = tuple(sys.argv)
        self._state = RunState(
            id=root.name,
            argv=words[1:],
            command=shlex.join(["python", *words]),
            git_sha=git_commit(),
            versions=versions_now(),
            device=device_in_words(loop.device),
            backends=cuda_backends(loop.device),
            parts=loop.parts,
            ranks=world_size(),
        ).begin(from_step=loop.steps)
        self._directory.write_state(self._state)
        self._learners: dict[str, dict[str, Any]] = {}
        self._losses: dict[str, deque[float]] = {}
        self._error = getattr(sys, "last_value", None)  # of an earlier cell, in a notebook
        self._not_looked_at: list[str] = []
        self._evaluated = False
        self._steps = 0

    @override
    def take(self, record: Record) -> None:
        """Write a record, and count steps and overflows for the summary; after the end an evaluation is added."""
        super().take(record)
        if self._state.status != "running" and isinstance(record, EvalRecord):
            super().close()
            self._evaluated = True
            write_summary(self._directory.paths.summary, self._summary())
            return
        if isinstance(record, StepRecord):
            self._steps, scale = max(self._steps, record.step), record.loss_scale
            totals = self._of(record.learner)
            made = record.step - self._loop.steps
            skipped = made - record.updates
            totals |= {"updates": record.updates, "skipped": skipped, "skip_rate": skipped / made}
            path = totals.setdefault("scale", {"first": scale, "min": scale, "max": scale})
            path |= {"min": min(path["min"], scale), "max": max(path["max"], scale), "last": scale}
            if math.isfinite(record.loss):
                self._losses.setdefault(record.learner, deque(maxlen=_LAST_LOSSES)).append(record.loss)
        elif isinstance(record, OverflowRecord):
            phases = self._of(record.learner)["overflows"]
            phases[record.phase] = phases.get(record.phase, 0) + 1
            if not record.skipped and record.loss not in ("finite", "unknown"):  # so its mean is not finite either
                self._losses.setdefault(record.learner, deque(maxlen=_LAST_LOSSES)).append(math.nan)
        elif isinstance(record, EvalRecord):
            self._evaluated = True
        elif isinstance(record, HistogramRecord) and not self._precision:
            self._take_dtypes(record)
        elif isinstance(record, EventRecord) and record.kind == "not_looked_at":
            self._not_looked_at.append(record.fields["what"])
        elif isinstance(record, EventRecord) and record.kind in ("abandoned", "abandoned_passes"):
            totals = self._of(record.fields["learner"])
            if record.kind == "abandoned_passes":
                totals["left_out"] = record.fields["count"]
            else:
                totals["left_out"] = totals.get("left_out", 0) + 1

    def _of(self, learner: str) -> dict[str, Any]:
        return self._learners.setdefault(learner, {"overflows": {}})

    @override
    def drop_histograms(self) -> bool:
        if there := super().drop_histograms():
            self._not_looked_at.append("histograms, for which there was no room")
        return there

    def _take_dtypes(self, record: HistogramRecord) -> None:
        """Put the dtypes that were seen on record, which options of frameworks may not say."""
        self._precision = _dtypes(record)
        not_seen = f"operators inside of {self._loop.inside} not looked at" if self._loop.inside else ""
        if not_seen:
            self._precision["note"] = not_seen
        self._write_config()
        seen = {name: ", ".join(counts) for name, counts in self._precision.items() if isinstance(counts, dict)}
        words = "; ".join([*(f"{name} {dtypes}" for name, dtypes in seen.items() if dtypes), *filter(None, [not_seen])])
        self._state = replace(self._state, parts={**self._state.parts, "precision": words})
        self._directory.write_state(self._state)

    def _summary(self) -> dict[str, Any]:
        """Return counts, and without evaluations the mean of the last losses as what comparisons judge."""
        counts: dict[str, Any] = {"steps": self._steps}
        if not self._loop.sharded:  # there a rank cannot count the overflows of the others
            counts["learners"] = self._learners
        if self._evaluated or len(self._losses) != 1:  # the losses of several learners are of several kinds
            return counts
        (losses,) = self._losses.values()
        loss = sum(losses) / len(losses)
        metric = {"metric": loss, "metric_name": "loss", "metric_split": "train", "higher_is_better": False}
        return {**counts, **metric, "train": {"loss": loss}}

    def _write_config(self) -> None:
        sections = {
            WATCHED: {name: self._loop.parts[name] for name in ("model", "optimizer")},
            "seed": torch.initial_seed(),
            "scaler": self._loop.scaler,
            "precision": self._precision,
        }
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in sections.items() if value != {}]
        self._directory.write_config("".join(lines), ())

    @override
    def close(self) -> None:
        """Write the summary, and record that the loop has ended; a second call does nothing."""
        if self._state.status != "running":
            return
        super().close()
        write_summary(self._directory.paths.summary, self._summary())
        last = getattr(sys, "last_value", None)  # what ended the process, if nobody closed the watch
        error = sys.exc_info()[1] or (last if last is not self._error else None)
        if error is None:
            reason = f"not looked at: {'; '.join(self._not_looked_at)}" if self._not_looked_at else ""
            self._state = self._state.end("done", reason, 0, self._steps)
        else:
            self._state = self._state.end("failed", f"{type(error).__name__}: {error}", 1, self._steps)
        self._directory.write_state(self._state)
        self._lock.close()


def _dtypes(record: HistogramRecord) -> dict[str, Any]:
    """Return the numbers of tensors by dtype as they were seen, not as an option says, and the dtype of products."""
    kinds: dict[str, TensorKind] = {"parameters": "weights", "gradients": "weight_gradients", "outputs": "activations"}
    seen = {
        name: dict(Counter(histogram.dtype for histogram in record.tensors.get(kind, {}).values()))
        for name, kind in kinds.items()
    }
    half = [dtype for dtype in ("float16", "bfloat16") if dtype in seen["outputs"]]
    compute = half[0] if half else "float32"
    return {"name": compute, "compute": compute, **seen} if seen["outputs"] else seen
