"""``run.json`` of a run directory: identity, status and attempts (processes) of one training run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from mptrain.runlog.strict_json import damaged, read_object
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
        host, told = socket.gethostname(), tuple(changes)
        attempt = Attempt(now(), None, os.getpid(), host, from_step, changes=told, config_digest=config_digest)
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
