"""Times things that take turns, and compares them pair by pair.

A machine's speed drifts by far more than the differences that matter. So contenders run in short blocks in the order
A B C ... C B A, a round; a ratio is taken within each round, and the median of the rounds is what is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Sequence

Block = Callable[[int], float]

#: Seconds of a block that make the clock and the call around it negligible.
BLOCK_SECONDS = 0.04
#: Times that contenders with short steps are built anew. The same loop built twice may differ by 5 % while it lives.
PLACES = 5


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval.

    Attributes:
        value: Median of the rounds.
        low: Lower end of the bootstrap interval of that median.
        high: Upper end.
        rounds: How many rounds it comes from.
    """

    value: float
    low: float
    high: float
    rounds: int


def estimate(samples: Sequence[float]) -> Estimate:
    """The median of some samples with a percentile bootstrap interval."""
    values = np.asarray(samples, dtype=float)
    middle = float(np.median(values))
    if len(values) < 3 or np.ptp(values) == 0:
        return Estimate(middle, float(values.min()), float(values.max()), len(values))
    found = stats.bootstrap((values,), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(0))
    return Estimate(middle, float(found.confidence_interval.low), float(found.confidence_interval.high), len(values))


@dataclass(frozen=True)
class Times:
    """Seconds of one step of each contender, by round.

    Attributes:
        seconds: Name to one number for each round.
    """

    seconds: dict[str, list[float]]

    def of(self, name: str) -> Estimate:
        """Seconds a step."""
        return estimate(self.seconds[name])

    def ratio(self, one: str, other: str) -> Estimate:
        """Time of ``one`` over time of ``other``, paired by round."""
        return estimate([a / b for a, b in zip(self.seconds[one], self.seconds[other], strict=True)])

    def difference(self, one: str, other: str) -> Estimate:
        """Seconds by which ``one`` takes longer than ``other``, paired by round."""
        return estimate([a - b for a, b in zip(self.seconds[one], self.seconds[other], strict=True)])


def take_turns(contenders: Mapping[str, Block], seconds: float, *, least: int = 5, most: int = 200) -> Times:
    """Time contenders in turns until the time is used up.

    Args:
        contenders: Name to a function that does a number of steps and returns the seconds they took.
        seconds: How long to go on, warm-up not counted.
        least: Rounds to take at least, however long they last.
        most: Rounds to take at most.
    """
    steps = {name: _steps_for(block) for name, block in contenders.items()}
    order = [*contenders, *reversed(list(contenders))]
    found: dict[str, list[float]] = {name: [] for name in contenders}
    until = time.perf_counter() + seconds
    for number in range(most):
        if number >= least and time.perf_counter() > until:
            break
        total = dict.fromkeys(contenders, 0.0)
        for name in order:
            total[name] += contenders[name](steps[name])
        for name, spent in total.items():
            found[name].append(spent / (2 * steps[name]))
    return Times(found)


def in_several_places(turns: Callable[[float], Times], seconds: float, places: int) -> Times:
    """Time contenders that are made anew several times: where their tensors lie in memory makes them slow or fast, too.

    Args:
        turns: Makes the contenders and has them take turns for so many seconds.
        seconds: For all places together.
        places: How many.
    """
    found = [turns(seconds / places).seconds for _ in range(places)]
    return Times({name: [one for times in found for one in times[name]] for name in found[0]})


def _steps_for(block: Block) -> int:
    """How many steps make a block of `BLOCK_SECONDS`; what comes before them warms up."""
    steps, spent = 1, block(3) / 3
    while spent < BLOCK_SECONDS and steps < 100_000:
        steps = max(steps + 1, min(10 * steps, round(1.1 * steps * BLOCK_SECONDS / max(spent, 1e-9))))
        spent = block(steps)
    return steps


def timed(step: Callable[[int], object], wait: Callable[[], object] = lambda: None) -> Block:
    """A block out of a function of the step's number, counted up over all blocks.

    Args:
        step: One step.
        wait: Waits for the device.
    """
    number = 0

    def block(steps: int) -> float:
        nonlocal number
        wait()
        started = time.perf_counter()
        for index in range(number, number + steps):
            step(index)
        wait()
        spent = time.perf_counter() - started
        number += steps
        return spent

    return block
