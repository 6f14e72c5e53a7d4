"""Learning rate range test as a run: its overrides, for ``mptrain find lr`` and for `mptrain.find_lr` in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mptrain.api.run import Run, in_python
from mptrain.api.train import train
from mptrain.lab.pages.rate_range import RangeTest, read_range_test
from mptrain.system.errors import NumericsError, UsageError

#: Overrides of a range test; those of the user follow, and may change the number of updates and the range.
WORDS = (
    "schedule=range_test",
    "run.root=range_tests",  # not among the trainings
    "train.max_steps=200",
    "train.epochs=100000",
    "train.max_consecutive_overflows=10",
    "checkpoint.every_epochs=null",
)


def range_test_words(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a range test and those of the user; raise UsageError for another schedule."""
    if odd := [word for word in overrides if str(word).lstrip("+~").startswith("schedule=")]:
        raise UsageError(f"{odd[0]} has no effect: a range test has its own schedule", "leave it out")
    return [*WORDS, *overrides]


@dataclass(frozen=True, repr=False)
class FoundRate(RangeTest):
    """Result of `find_lr`, which a notebook shows with its figure: the rates that were found, and the run.

    Attributes:
        run: The run that tried the rates, below ``range_tests``.
    """

    run: Run


@in_python
def find_lr(*overrides: str, **arguments: Any) -> FoundRate:
    """Train a few hundred updates with a rising learning rate, and return which rates train, as ``mptrain find lr``.

    Args:
        overrides: Those of `mptrain.train`, but for a schedule. ``train.max_steps`` is the number of updates, by
            default 200, and ``schedule.first`` and ``schedule.last`` are the range, by default 1e-4 and 100, as factors
            of ``optimizer.lr``.
        arguments: Further arguments of `mptrain.train`. A network that is given as ``model`` keeps its weights.

    Returns:
        Rates: ``suggested``, a tenth of that of the lowest loss; ``lowest``, where the loss was lowest; ``steepest``,
        where it fell fastest, None if that is not clear; ``explodes``, from which it grew without end, None if no rate
        did it. ``plot()`` is the figure, and ``run`` the run.

    Raises:
        DataError: The loss did not fall at any rate, so that none can be suggested.
        MptrainError: The configuration is invalid, or the run failed for another reason than its loss.
    """
    if isinstance(arguments.get("model"), nn.Module):
        arguments["update_model"] = False
    try:
        run = train(*range_test_words(overrides), **arguments)
    except NumericsError as error:  # a rate that is too high ends the run, which is what the test is for
        ended: Run | None = getattr(error, "run", None)
        if ended is None:
            raise
        run = ended
    return FoundRate(**vars(read_range_test(run.steps())), run=run)
