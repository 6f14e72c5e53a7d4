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
from typing import Any, Literal, get_args

from mptrain.errors import OlderLayout, StorageError
from mptrain.runlog.schema_checks import Kind, each, is_count, is_text, is_whole, mapping, misfit, optional
from mptrain.runlog.strict_json import parse_strict

SCHEMA = 2

#: The release that wrote files whose schema number is below that of today, where they do not say it themselves.
_OLDER = "0.1"
Status = Literal["running", "done", "failed", "preempted"]

_STATE_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("id", "command", "status", "reason", "hint", "device", "precision"), is_text),
    "argv": each(is_text),
    "exit_code": optional(is_whole),
    "git_sha": optional(is_text),
    "versions": mapping(is_text),
    "ranks": is_count,
}
_ATTEMPT_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("started", "host"), is_text),
    "ended": optional(is_text),
    **dict.fromkeys(("pid", "from_step"), is_count),
    "to_step": optional(is_count),
    "exit_code": optional(is_whole),
    "changes": each(is_text),
}


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
    pid: int
    host: str
    from_step: int
    to_step: int | None = None
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
    ranks: int = 1
    attempts: tuple[Attempt, ...] = ()
    schema: int = SCHEMA

    @property
    def started(self) -> str:
        """When work on the run last began, UTC; empty before the first attempt."""
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


def parse_state(text: str, path: Path) -> RunState:
    """The state that a ``run.json`` holds.

    Args:
        text: The content of the file.
        path: Where it came from, for the message.

    Raises:
        StorageError: Not JSON, fields missing or of a wrong type, or of another schema.
    """
    fields = parse_object(text, path)
    check_schema(fields, SCHEMA, path)
    try:
        attempts = tuple(
            Attempt(**{**_only(Attempt, item), "changes": tuple(item["changes"])}) for item in fields["attempts"]
        )
        known = {**_only(RunState, fields), "argv": tuple(fields["argv"]), "attempts": attempts}
        state = RunState(**known)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{error}") from error
    if wrong := misfit(fields, _STATE_KINDS) or next(
        filter(None, (misfit(one, _ATTEMPT_KINDS) for one in fields["attempts"])), ""
    ):
        raise _damaged(path, f"'{wrong}' holds a value of another kind")
    if state.status not in get_args(Status):
        raise _damaged(path, f"status {state.status!r} is none of {', '.join(get_args(Status))}")
    return state


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in a small file that is always written whole.

    Raises:
        StorageError: Not a JSON object.
    """
    try:
        fields = parse_strict(text)
    except ValueError as error:
        raise _damaged(path, f"{error}") from error
    if not isinstance(fields, dict):
        raise _damaged(path, "not a JSON object")
    return fields


def check_schema(fields: dict[str, Any], known: int, path: Path) -> None:
    """Refuse a file of another layout than this version writes.

    Raises:
        OlderLayout: An older mptrain wrote it; names the folder that it lies in.
        StorageError: No schema number, or a newer one than ``known``.
    """
    schema = fields.get("schema")
    if type(schema) is not int or schema < 1:
        raise _damaged(path, "no schema number")
    if schema > known:
        raise StorageError(
            f"{path} has schema {schema}, this mptrain reads {known}",
            "use the newer mptrain that wrote it",
        )
    if schema < known:
        versions = fields.get("versions")
        named = versions.get("mptrain") if isinstance(versions, dict) else None
        raise OlderLayout({path.parent: named if isinstance(named, str) and named else _OLDER})


def now() -> str:
    """The current UTC time, ISO 8601 with milliseconds: text that sorts by time."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _only(kind: type[Attempt] | type[RunState], fields: dict[str, Any]) -> dict[str, Any]:
    """The entries that the dataclass has; later versions may write more."""
    return {key: value for key, value in fields.items() if key in kind.__dataclass_fields__}


def _damaged(path: Path, why: str) -> StorageError:
    return StorageError(f"{path} is damaged: {why}", "restore the file from a copy, or start the run again")
