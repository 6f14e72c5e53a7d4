"""Reading of a learning rate range test (Smith 2017): the rates at which the loss falls, is lowest, and explodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from typing_extensions import override

from mptrain.report import plotting
from mptrain.report.notebook import Shown
from mptrain.report.page import Block, Bullets, Cell, Code, Facts, Page, Plot, Plots, facts, section
from mptrain.system.errors import DataError
from mptrain.system.records import StepRecord
from mptrain.system.words import number

#: Weight of the past in the moving mean of the loss; updates at the beginning without which it says little; and
#: standard deviations of noise that the steepest fall exceeds, as hardly one of a few hundred does by chance.
_PAST, _BEGIN, _CLEAR = 0.95, 10, 4.0

#: Multiple of the lowest mean loss, above the loss at the beginning, that counts as exploding; and the usual distance
#: of a rate that trains well from that of the lowest loss.
_EXPLODES, _BELOW = 2.0, 10.0


@dataclass(frozen=True, repr=False)
class RangeTest(Shown):
    """Result of a learning rate range test.

    Attributes:
        rates: Learning rate of each update, ascending.
        losses: Loss of each update, and ``means`` its moving mean, corrected for its beginning.
        lowest: Rate at which the moving mean was lowest.
        steepest: Rate at which the loss fell fastest, over updates beside one another; None if no fall stands out of
            the noise of the losses.
        explodes: Rate from which it grew without end or was not finite; None if no rate did it.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    means: tuple[float, ...]
    lowest: float
    steepest: float | None
    explodes: float | None

    @property
    def suggested(self) -> float:
        """A tenth of the rate of the lowest loss, with two digits."""
        return float(f"{self.lowest / _BELOW:.1e}")

    @override
    def blocks(self) -> tuple[Plots, Facts, Bullets]:
        tried = f"{len(self.rates):,} updates, from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        explodes = f"{self.explodes:.2g}" if self.explodes is not None else "at no rate that was tried"
        rates = facts(
            ("suggested", f"{self.suggested:g}, a tenth of that of the lowest loss"),
            ("lowest loss", f"at {self.lowest:.2g}: {number(min(self.means[_BEGIN:]))}, moving mean"),
            ("falls fastest", f"at {self.steepest:.2g}" if self.steepest else "not clear: no fall exceeds the noise"),
            ("explodes", explodes),
            ("tried", tried),
        )
        cut = self.explodes is None and self.lowest == self.rates[-1]
        falling = ("The loss was still falling at the highest rate tried: raise schedule.last.",) if cut else ()
        worth = "A range test shows at which rates training begins and breaks soon, not which is best in the end."
        figure = Plot("range-test", "Loss while the learning rate rises, update by update.", self.plot().svg)
        return Plots((figure,)), rates, Bullets((*falling, worth))

    def plot(self) -> plotting.Drawing:
        """Return the figure: the loss over the learning rate, and the rate that is suggested."""
        with plotting.drawing("range-test", 2.9) as figure:
            (axes,) = figure.panels()
            axes.plot(self.rates, self.losses, color=plotting.GREY, alpha=0.4, linewidth=0.8)
            axes.plot(self.rates, self.means, color=plotting.SERIES[0])
            top = 1.3 * max(self.means[0], min(self.means))
            axes.set_ylim(min(0.0, 1.1 * min(self.means)), top)
            axes.set_xscale("log")
            decades = range(math.ceil(math.log10(self.rates[0])), math.floor(math.log10(self.rates[-1])) + 1)
            plotting.ticks_at(axes.xaxis, [10.0**exponent for exponent in decades], lambda rate: f"{rate:g}")
            axes.minorticks_off()
            axes.axvline(self.suggested, color=plotting.SERIES[2], linestyle="--")
            figure.label("loss", color=plotting.GREY, alpha=0.4)
            figure.label("moving mean", color=plotting.SERIES[0])
            figure.label("suggested rate", color=plotting.SERIES[2], linestyle="--")
            axes.set_xlabel("learning rate")
            axes.set_ylabel("loss")
        return figure


def read_range_test(steps: Iterable[StepRecord]) -> RangeTest:
    """Read a range test from the records of a run with ``schedule=range_test``: those of its first learner.

    Raise DataError if the loss did not fall, so that no rate can be suggested.
    """
    rates, losses, means = [], [], []
    mean, exploded, learner = 0.0, None, None
    for step in steps:
        if step.learner != (learner := learner or step.learner):
            continue
        if not math.isfinite(step.loss):
            exploded = step.lr
            break
        if step.skipped:  # for its gradients: the scaler looks for a scale
            continue
        mean = _PAST * mean + (1 - _PAST) * step.loss
        rates.append(step.lr)
        losses.append(step.loss)
        means.append(mean / (1 - _PAST ** len(rates)))
    if len(rates) <= 2 * _BEGIN:
        raise DataError(
            f"a range test of {len(rates)} updates says nothing",
            "choose a smaller optimizer.lr, or more train.max_steps",
        )
    best = min(range(_BEGIN, len(means)), key=means.__getitem__)
    if best == _BEGIN or means[best] > 0.99 * means[0]:
        raise DataError(
            f"the loss did not fall at any rate from {rates[0]:.1e} to {rates[-1]:.1e}",
            "check the model and the data with mptrain doctor, or try another optimizer.lr as the middle of the range",
        )
    limit = max(_EXPLODES * means[best], means[0])
    exploded = next((rates[at] for at in range(best, len(means)) if means[at] > limit), exploded)
    steepest = _steepest(rates, losses[: best + 1])
    return RangeTest(tuple(rates), tuple(losses), tuple(means), rates[best], steepest, exploded)


def _steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate from which on `_BEGIN` losses are lower than as many before it, by most; None if noise may do so.

    The noise of a difference of two losses is estimated from neighbours, in which a slow fall hardly counts.
    """
    tried = range(_BEGIN, len(losses) - _BEGIN + 1)
    falls = {rates[at]: sum(losses[at - _BEGIN : at]) - sum(losses[at : at + _BEGIN]) for at in tried}
    noise = math.sqrt(sum((after - before) ** 2 for before, after in pairwise(losses)) / len(losses))
    clear = (rate for rate, fall in falls.items() if fall > _CLEAR * noise * math.sqrt(_BEGIN))
    return max(clear, key=falls.__getitem__, default=None)


def range_test_page(title: str, range_test: RangeTest, command: str) -> Page:
    """Return the page of a range test; ``command`` trains with the suggested rate."""
    return Page(
        over="mptrain learning rate range test",
        title=title,
        status=Cell(""),
        lead=f"Suggested learning rate: {range_test.suggested:g}.",
        sections=(section("Rates", range_test.blocks()[0], *result_blocks(range_test, command)),),
    )


def result_blocks(range_test: RangeTest, command: str) -> list[Block]:
    """Return the rates that were found, what they are worth, and the command that trains with the suggested one."""
    _, rates, worth = range_test.blocks()
    return [rates, Code(command, "sh"), worth]
