"""What was measured, as JSON that is whole after every case."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.timing import Estimate

SCHEMA = 1

State = Literal["measured", "void", "n/a"]


@dataclass(frozen=True)
class Measurement:
    """One number beside its goal.

    Attributes:
        goal: Which goal it belongs to (`benchmarks.goals`).
        what: Which number of that goal, in words; empty where there is one.
        value: The number.
        low: Lower end of its 95 % interval; None where it is counted, not sampled.
        high: Upper end.
        rounds: Rounds behind the interval.
        state: ``void`` where a check of the measurement itself failed, ``n/a`` where this machine cannot measure it.
        why: Why it is void or not there; empty otherwise.
        judged: Whether the goal is about this number; others stand beside it.
    """

    goal: str
    what: str
    value: float | None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    state: State = "measured"
    why: str = ""
    judged: bool = True


def measured(goal: str, what: str, found: Estimate | float, *, judged: bool = True, void: str = "") -> Measurement:
    """A measurement out of an estimate, or of a number that was counted."""
    state: State = "void" if void else "measured"
    if isinstance(found, Estimate):
        return Measurement(goal, what, found.value, found.low, found.high, found.rounds, state, void, judged)
    return Measurement(goal, what, found, state=state, why=void, judged=judged)


def unavailable(goal: str, what: str, why: str, *, judged: bool = True) -> Measurement:
    """A number that this machine, or this environment, cannot give."""
    return Measurement(goal, what, None, state="n/a", why=why, judged=judged)


@dataclass
class Results:
    """All of a run of the harness.

    Attributes:
        suite: What was asked for.
        machine: Where: `benchmarks.machine.facts`.
        measurements: In the order in which they came.
        seconds: Name of each case to the seconds that it took.
        failures: Name of each case that raised, to what it said.
        rehearsal: Whether sizes were small, so that numbers mean nothing.
    """

    suite: str
    machine: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    rehearsal: bool = False

    def write(self, path: Path) -> None:
        """Replace the file, so that a run that is cut short keeps what it has."""
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def read(path: Path) -> Results:
    """What `Results.write` wrote.

    Raises:
        ValueError: It is something else, or of another schema.
        OSError: It cannot be read.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("schema") == SCHEMA:
            fields["measurements"] = [Measurement(**item) for item in fields["measurements"]]
            return Results(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} was not written by this harness, or is damaged") from error
    raise ValueError(f"{path} was written by another version of this harness")
