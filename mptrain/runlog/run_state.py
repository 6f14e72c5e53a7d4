"""``run.json`` (identity, status and attempts of a training run) and ``summary.json`` (its final numbers)."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from mptrain.runlog.atomic_files import readable_bytes, write_atomically
from mptrain.runlog.strict_json import damaged, indented_json, read_object, restore_nonfinite
from mptrain.system.errors import StorageError, UsageError
from mptrain.system.fields import NonNegativeInt
from mptrain.system.validation import build

SCHEMA = 2

Status = Literal["running", "done", "failed", "preempted"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that worked on a training run: its start, or one of its resumptions.

    Attributes:
        started: Start time in UTC, ISO 8601 with milliseconds.
        ended: End time in the same format; None while the process runs or if it was killed.
        pid: Process id on its host.
        from_step: Number of the step after which it started; 0 for a fresh start.
        to_step: Number of the last recorded step; None while the process runs, if it was killed, or if it
            ended without saving.
        exit_code: Exit code; None while the process runs or if it was killed.
        changes: Changes of the configuration that its command made, each as ``KEY was A, now B``; and of the data.
        config_digest: Digest of its configuration; empty if unknown.
    """

    started: str
    ended: str | None
    pid: NonNegativeInt
    host: str
    from_step: NonNegativeInt
    to_step: NonNegativeInt | None = None
    exit_code: int | None = None
    changes: tuple[str, ...] = ()
    config_digest: str = ""

    @property
    def seconds(self) -> float | None:
        """Wall time of the process in seconds; None if no end is recorded."""
        try:
            span = datetime.fromisoformat(self.ended or "") - datetime.fromisoformat(self.started)
        except (ValueError, TypeError):  # no end yet, or the file was edited by hand
            return None
        return max(0.0, span.total_seconds())


@dataclass(frozen=True, slots=True)
class RunState:
    """Identity, status and attempts of a training run: the content of its ``run.json``.

    Attributes:
        id: The run directory relative to ``run.root``; the name shown to users.
        status: ``running`` (or killed while running), ``done``, ``failed`` or ``preempted``.
        reason: Reason why the run ended, one sentence; empty while it runs.
        hint: The hint shown at the terminal with the reason; empty if there was none.
        exit_code: Exit code of the last attempt that was not killed; None while the run runs.
        argv: The arguments of the process, without the program name.
        command: The command line that repeats the run, quoted for a shell.
        flags: Its flags, such as ``--config-dir DIR``, as separate words.
        git_sha: Commit of the source tree; None outside a Git repository.
        versions: Versions by name: python, torch, mptrain, CUDA.
        backends: Driver, cuDNN and arithmetic settings of torch's CUDA backends by name; empty on other devices.
        parts: Descriptions of the run's parts by name: model, dataset, precision, scaler, optimizer and so on.
        ranks: World size: number of processes that train the run together.
        schema: Version of the file's layout.
    """

    id: str
    argv: tuple[str, ...]
    command: str
    flags: tuple[str, ...] = ()
    status: Status = "running"
    reason: str = ""
    hint: str = ""
    exit_code: int | None = None
    git_sha: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    backends: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    ranks: NonNegativeInt = 1
    attempts: tuple[Attempt, ...] = ()
    schema: int = SCHEMA

    @property
    def started(self) -> str:
        """Start time of the run's last attempt, UTC in ISO 8601; empty before the first attempt."""
        return self.attempts[-1].started if self.attempts else ""

    def begin(self, from_step: int = 0, changes: Sequence[str] = (), config_digest: str = "") -> RunState:
        """Return the state of the run with a new, running attempt of this process (fields as in `Attempt`)."""
        host, changed = socket.gethostname(), tuple(changes)
        attempt = Attempt(now(), None, os.getpid(), host, from_step, changes=changed, config_digest=config_digest)
        return replace(self, status="running", reason="", hint="", exit_code=None, attempts=(*self.attempts, attempt))

    def end(self, status: Status, reason: str, exit_code: int, to_step: int | None, hint: str = "") -> RunState:
        """Return the state with a new status, and with its current attempt ended (fields as in `Attempt`)."""
        attempts = self.attempts
        if attempts:
            last = replace(attempts[-1], ended=now(), to_step=to_step, exit_code=exit_code)
            attempts = (*attempts[:-1], last)
        return replace(self, status=status, reason=reason, hint=hint, exit_code=exit_code, attempts=attempts)

    def to_json(self) -> str:
        """Return the content of ``run.json`` as indented strict JSON."""
        fields = asdict(self)
        return json.dumps({"schema": fields.pop("schema"), **fields}, indent=2, allow_nan=False) + "\n"


def read_state(path: Path) -> RunState | None:
    """Read the state of a run from its ``run.json``; None if the file does not exist.

    Raises:
        OtherVersion: Another version of mptrain wrote the file.
        StorageError: The file cannot be read, is not JSON, has missing fields, wrong types or another schema.
    """
    if not (fields := read_object(path, SCHEMA, missing_ok=True)):
        return None
    try:
        return build(RunState, fields, lenient=True)
    except ValueError as error:
        raise damaged(path, f"{error}") from error


def now() -> str:
    """Return the current UTC time in ISO 8601 with milliseconds, a text that sorts by time."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class _Learner(TypedDict, total=False):
    updates: NonNegativeInt
    skipped: NonNegativeInt
    skip_rate: float
    overflows: dict[str, NonNegativeInt]
    scale: dict[str, float]


class _Summary(TypedDict, total=False):
    """Types of the fields that reports and comparisons read, where they are present. Other fields are not checked."""

    metric: float | None
    metric_name: str | None
    metric_split: str
    higher_is_better: bool | None
    best_val: float | None
    intervals: dict[str, tuple[float, float] | None] | None
    val_intervals: dict[str, tuple[float, float] | None] | None
    val: dict[str, float | None] | None
    test: dict[str, float | None] | None
    stopped_early: str | None
    steps: NonNegativeInt
    planned_steps: NonNegativeInt | None
    steady_steps: NonNegativeInt | None
    samples: NonNegativeInt | None
    learners: dict[str, _Learner]
    term: str
    terms_per_second: float | None
    steady_terms_per_second: float | None
    train_seconds: float | None
    data_wait: float | None
    energy_joules: float | None
    memory_before: NonNegativeInt | None
    peak_memory: NonNegativeInt | None
    memory_by_use: dict[str, NonNegativeInt] | None
    threads: NonNegativeInt | None
    unusable_samples: dict[str, NonNegativeInt] | None
    converted_files: dict[str, NonNegativeInt] | None
    facts: dict[str, Any] | None


def memory_in_words(by_use: Mapping[str, int]) -> str:
    """Return the counted memory of a training step in words, the sum first; empty if it was not counted."""
    if not by_use:
        return ""
    uses = [f"{readable_bytes(size)} {use.replace('_', ' ')}" for use, size in by_use.items() if size]
    later = "" if "optimizer_state" in by_use else "; without the optimizer's state, which it makes in its first update"
    return f"{readable_bytes(sum(by_use.values()))}: {', '.join(uses)}{later}"


def write_summary(path: Path, numbers: Mapping[str, Any]) -> None:
    """Write the final numbers of a run (metrics, counts of updates, times) atomically, as indented strict JSON.

    Non-finite numbers are read back unchanged. Raise ValueError if ``schema`` or ``nonfinite`` is among the names.
    """
    if reserved := {"schema", "nonfinite"} & set(numbers):
        raise ValueError(f"a summary must not contain {sorted(reserved)}")
    write_atomically(path, indented_json({"schema": SCHEMA, **numbers}))


def read_summary(path: Path) -> dict[str, Any]:
    """Read the final numbers of a run, by name and without the schema number; empty if they are not yet written.

    Fields that reports and comparisons use are checked. Raise OtherVersion if another version wrote the file.
    """
    if not (fields := read_object(path, SCHEMA, missing_ok=True)):
        return {}
    del fields["schema"]
    try:
        numbers = restore_nonfinite(fields)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged: its list of non-finite numbers is invalid", "restore it from a copy"
        ) from error
    try:
        build(_Summary, numbers, lenient=True)
    except ValueError as error:
        raise StorageError(f"{path} is damaged: {error}", "restore it from a copy") from error
    return numbers


#: Words in names of metrics, by which a direction is known.
_LOWER = re.compile(
    r"loss|losses|nll|ce|entropy|xent|mse|rmse|mae|mape|errors?|err|perplexity|ppl|nats|bits|bp[bcd]|[wct]er|eer|fid"
)
_HIGHER = re.compile(
    r"acc|accuracy|top\d+|f1|precision|recall|auc|auroc|map|ap|m?iou|dice|psnr|ssim|bleu|rouge|chrf|score|reward|return"
)


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better, as a word of its name says; raise UsageError if none does."""
    words = re.split(r"[^a-z0-9]+", metric.lower())
    lower, higher = any(map(_LOWER.fullmatch, words)), any(map(_HIGHER.fullmatch, words))
    if lower == higher or {"neg", "negative"} & {*words}:  # scikit-learn's neg_mean_squared_error
        raise UsageError(f"is a lower or a higher {metric} better?", "say it: --better lower, or --better higher")
    return lower
