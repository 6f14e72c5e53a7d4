"""What a case is: some goals, and a function that measures for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.results import Measurement


@dataclass(frozen=True)
class Setting:
    """What a case measures with.

    Attributes:
        seconds: About how long it may measure.
        device: ``cpu`` or ``cuda``.
        rehearsal: Take sizes that are done in a moment, whose numbers mean nothing.
        peers: Measure other frameworks as well.
    """

    seconds: float
    device: str
    rehearsal: bool = False
    peers: bool = True


@dataclass(frozen=True)
class Case:
    """Something that is measured in one go.

    Attributes:
        name: For people, unique.
        goals: Which goals its measurements belong to.
        measure: Measures.
        weight: Its share of the budget, against the others'.
    """

    name: str
    goals: tuple[str, ...]
    measure: Callable[[Setting], list[Measurement]]
    weight: float = 1.0
