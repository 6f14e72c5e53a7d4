"""``run.json``: what a run is, how it stands, and every attempt to get it done.

The values here are frozen; a change of state is a new value. Reading and writing the file goes through
`mptrain.runlog.directory.RunDirectory`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from mptrain.fields import NonNegativeInt
from mptrain.runlog.schema_checks import build
from mptrain.runlog.strict_json import damaged, read_object

SCHEMA = 2

Status = Literal["running", "done", "failed", "preempted"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that worked on a run.

    Attributes:
        started: UTC time, ISO 8601 with milliseconds.
        ended: The same for its orderly end; None while it runs and for a process that was killed.
        pid: Process id on its host.
        host: Host name.
        from_step: The step it continued after; 0 for a fresh start.
        to_step: The last step on record at its orderly end; None as well where it was ended at once, and saved nothing.
        exit_code: Exit code of its orderly end.
        changes: The keys that it changed of the run's configuration, one sentence each.
    """

    started: str
    ended: str | None
    pid: NonNegativeInt
    host: str
    from_step: NonNegativeInt
    to_step: NonNegativeInt | None = None
    exit_code: int | None = None
    changes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Its wall time; None where it has no end on record."""
        try:
            span = datetime.fromisoformat(self.ended or "") - datetime.fromisoformat(self.started)
        except (ValueError, TypeError):  # it has no end, or another hand wrote these
            return None
        return max(0.0, span.total_seconds())


@dataclass(frozen=True, slots=True)
class RunState:
    """The content of ``run.json``.

    Attributes:
        id: The run's directory relative to the root of all runs, its name for people.
        status: ``running`` (or killed while running), ``done``, ``failed``, ``preempted``.
        reason: Why it ended, one sentence; empty while it runs.
        hint: What to do about that, as it was said at the terminal; empty where nothing was.
        exit_code: Exit code of the last attempt that ended in order.
        argv: The arguments of the process, without the program.
        command: The line that does the same again, quoted for a shell.
        git_sha: Commit of the source tree; None where there is none.
        versions: Name to version of what computes: python, torch, mptrain, CUDA.
        device: The device in words.
        precision: Which dtype everything has, in words.
        ranks: Processes that train it.
        attempts: Every process that worked on it, in order.
        schema: Version of this layout.
    """

    id: str
    argv: tuple[str, ...]
    command: str
    status: Status = "running"
    reason: str = ""
    hint: str = ""
    exit_code: int | None = None
    git_sha: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    precision: str = ""
    ranks: NonNegativeInt = 1
    attempts: tuple[Attempt, ...] = ()
    schema: int = SCHEMA

    @property
    def started(self) -> str:
        """Time at which work on the run last began, UTC; empty before the first attempt."""
        return self.attempts[-1].started if self.attempts else ""

    def begin(self, from_step: int = 0, changes: Sequence[str] = ()) -> RunState:
        """The state once this process works on the run, continuing after the given step, with changed keys or not."""
        attempt = Attempt(now(), None, os.getpid(), socket.gethostname(), from_step, changes=tuple(changes))
        return replace(self, status="running", reason="", hint="", exit_code=None, attempts=(*self.attempts, attempt))

    def end(self, status: Status, reason: str, exit_code: int, to_step: int | None, hint: str = "") -> RunState:
        """The state once the current attempt has ended in order."""
        attempts = self.attempts
        if attempts:
            last = replace(attempts[-1], ended=now(), to_step=to_step, exit_code=exit_code)
            attempts = (*attempts[:-1], last)
        return replace(self, status=status, reason=reason, hint=hint, exit_code=exit_code, attempts=attempts)

    def to_json(self) -> str:
        """The text of ``run.json``: indented strict JSON."""
        fields = asdict(self)
        return json.dumps({"schema": fields.pop("schema"), **fields}, indent=2, allow_nan=False) + "\n"


def read_state(path: Path) -> RunState | None:
    """Return the state that a ``run.json`` holds; None where there is no such file.

    Raises:
        StorageError: It cannot be read, is not JSON, has fields missing or of a wrong type, or is of another schema.
    """
    if not (fields := read_object(path, SCHEMA, missing_ok=True)):
        return None
    try:
        return build(RunState, fields, lenient=True)
    except ValueError as error:
        raise damaged(path, f"{error}") from error


def now() -> str:
    """The current UTC time, ISO 8601 with milliseconds: text that sorts by time."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
