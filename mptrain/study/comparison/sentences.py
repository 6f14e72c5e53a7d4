"""Sentences of verdicts, one set for run directories, recipes and logs: why an arm is better, equivalent or undecided.

`mptrain.study.comparison.verdict` decides, and `why` puts what decided into words. Each kind of comparison gives the
facts and numbers that it knows as `Grounds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mptrain.study.comparison.results import Equivalence, Form, Interval, Reason, Word
from mptrain.system.words import confidence, counted, percent

#: Reason that stands in place of a verdict's at the reference itself.
OF_REFERENCE = "the other arms are compared with it"

#: Reason for no verdict on arms whose runs tell nothing of how much runs differ.
ALIKE = "the runs of each arm all end at one value, as copies or runs of one seed do"

#: Verdicts that have a verb of their own.
_WITH_VERB = ("neither has learned", "beats target", "misses target")


def signed(value: float) -> str:
    """Format a difference of a metric with its sign and three digits; a rounding error around zero becomes +0."""
    return f"{round(value, 12) + 0.0:+.3g}"


def p_value(value: float) -> str:
    """Format the p value of a test: ``p = 0.012``, ``p < 0.0001``."""
    return f"p = {value:.2g}" if value >= 1e-4 else "p < 0.0001"


@dataclass(frozen=True)
class Grounds:
    """Facts and numbers that the sentence of a verdict names, of runs that are paired or not.

    Attributes:
        metric: Name of the metric, or of another measure of the runs.
        higher_is_better: Direction of the metric.
        difference: Mean of arm minus reference, or minus ``number``, with the interval for "better" and "worse", or of
            the one-sided bounds for a target; None without values.
        tests: Tests of equivalence, or the one of them of no inferiority; None if neither is an answer. Their ``p`` is
            NaN if only the interval is known, and ``unseen`` if it stands elsewhere.
        form: The claim, and ``alpha`` the level of each one-sided test.
        paired: Runs are compared in pairs.
        number: Number in place of the reference, a target too; None for a reference.
        bound: Difference that "better" and "worse" are relative to.
        failed: Failed runs in words, empty for none; ``failure_p`` is the p value of their test.
        few: Number of pairs or runs in words, if they are fewer than two.
        needed_as_other: Standard deviation of the other arm, and the runs of each arm that equivalence would need with
            it (None for more than 1,000), if only one arm has too few runs; None if unknown.
        unlearned: Why neither arm has learned, in words.
        alike: All pairs have the same difference, or all runs the same value beside a number.
        p_bootstrap: The p value of a bootstrap-t test for a target; None if the sample does not look skewed.
        signed: Formats a difference with its sign.
    """

    metric: str
    higher_is_better: bool
    difference: Interval | None = None
    tests: Equivalence | None = None
    form: Form = "equivalent"
    alpha: float = 0.05
    paired: bool = True
    number: float | None = None
    bound: float = 0.0
    failed: str = ""
    failure_p: float = 1.0
    few: str = ""
    needed_as_other: tuple[float, int | None] | None = None
    unlearned: str = ""
    alike: bool = False
    p_bootstrap: float | None = None
    signed: Callable[[float], str] = signed

    @property
    def quantity(self) -> str:
        """The compared quantity with its article."""
        if self.number is not None:
            return f"the difference of {self.metric} from {self.number:g}"
        return f"the {'paired ' * self.paired}difference in {self.metric}"

    @property
    def one_sided(self) -> bool:
        """True if the claim is that the arm is not inferior."""
        return self.form == "not inferior"

    @property
    def values(self) -> str:
        """Name of the values whose skewness is looked at."""
        return "differences" if self.paired else "values"

    def size(self, difference: Interval) -> str:
        """Return the number of pairs, or of runs beside a number; empty for unpaired arms, each with its own."""
        if self.number is not None:
            return f"{difference.n} runs"
        return counted(difference.n, "pair") if self.paired else ""

    def worst(self, tests: Equivalence) -> float:
        """Return how much worse the arm may be at most, by the interval of the one-sided tests."""
        return -tests.low if self.higher_is_better else tests.high


def line(name: str, word: Word, reason: str) -> str:
    """Return the verdict on an arm with its reason as one line of a list: ``fp16 is worse: ...``."""
    return f"{name} {word if word in _WITH_VERB else f'is {word}'}: {reason.rstrip('.')}."


def unfair(objection: str) -> str:
    """Return why an unfair comparison decides nothing."""
    return f"the comparison is unfair: {objection}"


def why(reason: Reason, grounds: Grounds) -> str:
    """Return the reason of a verdict as a sentence."""
    failed, difference, tests = grounds.failed, grounds.difference, grounds.tests
    if reason == "failures":
        test = "exact sign test" if grounds.paired else "Fisher's exact test"
        return f"{failed}, more than by chance ({test}, {p_value(grounds.failure_p)})"
    if reason == "no spread":
        return ALIKE
    if reason == "few pairs" or difference is None:
        return "; ".join(filter(None, (failed, _few(grounds))))
    if reason == "biased selection":
        return f"{failed}: the runs that are left are a biased selection"
    if reason == "unlearned":
        return f"{grounds.unlearned}, and arms that learn nothing agree whatever differs"
    if reason == "worse difference":
        return _different(grounds, difference) + (f"; also, {failed}" if failed else "")
    if reason == "better difference":
        return _different(grounds, difference) + _unseen(tests)
    if grounds.form == "beats target":
        return _from_target(grounds, difference)
    if tests is None:
        return _beside_bound(grounds, difference, "includes")
    if reason == "equivalence":
        return _within(grounds, difference, tests) + _unseen(tests)
    return _undecided(grounds, difference, tests)


def _few(grounds: Grounds) -> str:
    units, spread = ("seeds", "seeds") if grounds.paired else ("runs of each arm", "runs")
    have = f"{grounds.few}, and a verdict needs at least two {units} to estimate the spread over {spread}"
    if grounds.needed_as_other is None:
        return have
    of_other, needed = grounds.needed_as_other
    return f"{have}; with that of the other arm (standard deviation {of_other:.3g}), {_for_80(needed, grounds)} power"


def _beside_bound(grounds: Grounds, difference: Interval, verb: str) -> str:
    size = grounds.size(difference)
    return (
        f"{grounds.quantity} is {grounds.signed(difference.mean)}, and its {_ci(grounds, difference, '(')}) {verb} "
        f"{grounds.signed(grounds.bound) if grounds.bound else 'zero'}{f' ({size})' if size else ''}"
    )


def _different(grounds: Grounds, difference: Interval) -> str:
    tests, text = grounds.tests, _beside_bound(grounds, difference, "excludes") + _alike(grounds, difference)
    if tests is not None and tests.p_bootstrap is not None:
        more = f"far more than {confidence(1 - difference.level)}"
        text += f"; the {grounds.values} are skewed, and with a long tail such a CI excludes a true zero in {more}"
    if tests is not None and abs(difference.mean) < tests.margin:
        text += f"; the true difference may be within the margin of ±{tests.margin:.3g}"
    return text


def _limit(grounds: Grounds, tests: Equivalence) -> str:
    margin = f"{tests.margin:.3g}"
    return f"below the margin of {margin}" if grounds.one_sided else f"within the margin of ±{margin}"


def _within(grounds: Grounds, difference: Interval, tests: Equivalence) -> str:
    worst, kind = "", f"two one-sided {confidence(tests.alpha)} tests"
    if grounds.one_sided:
        worst, kind = f"at most {grounds.worst(tests):.4g} worse, ", f"a one-sided {confidence(tests.alpha)} test"
    p = "" if math.isnan(tests.p) else p_value(tests.p)
    skewed = f"; skewed {grounds.values}, bootstrap-t {p_value(tests.p_bootstrap)}" if tests.p_bootstrap else ""
    text = (
        f"{grounds.quantity} is {grounds.signed(difference.mean)} ({confidence(1 - 2 * tests.alpha)} CI "
        f"{grounds.signed(tests.low)} to {grounds.signed(tests.high)}), {worst}{_limit(grounds, tests)} "
        f"({', '.join(filter(None, (kind, p, grounds.size(difference))))}{skewed}){_alike(grounds, difference)}"
    )
    excludes_zero = difference.low < difference.high and not difference.low <= 0 <= difference.high
    if excludes_zero and not grounds.one_sided:
        text += f"; its {_ci(grounds, difference, '(')}) excludes zero, but the difference is below the margin"
    return text


def _undecided(grounds: Grounds, difference: Interval, tests: Equivalence) -> str:
    """Say what the tests leave open, and how many runs would decide it."""
    worst, margin, size = grounds.worst(tests), tests.margin, grounds.size(difference)
    what = grounds.quantity if grounds.number is not None else f"the {'paired ' * grounds.paired}difference"
    what += f" is {grounds.signed(difference.mean)}"
    inside = worst < margin if grounds.one_sided else -margin < tests.low and tests.high < margin
    if inside and tests.p_bootstrap is not None:
        p = "" if math.isnan(tests.p) else f" ({p_value(tests.p)})"
        bootstrap = ", ".join(filter(None, ("bootstrap-t", p_value(tests.p_bootstrap), size)))
        skewed = f"the {grounds.values} are skewed, and a test that follows their shape does not ({bootstrap})"
        return f"{what}, and t tests put it {_limit(grounds, tests)}{p}, but {skewed}"
    doubt = f"the true difference may be zero or exceed the margin of ±{margin:.3g}"
    if grounds.one_sided:
        doubt = f"the arm may be {worst:.4g} worse, which is not below the margin of {margin:.3g}"
    text = f"{what} ({_ci(grounds, difference)}): {doubt}{_alike(grounds, difference)}"
    if math.isnan(tests.power):
        return text
    of, claim = size if grounds.paired else "runs", "not inferior" if grounds.one_sided else "equivalent"
    enough = grounds.paired and tests.pairs_for_80 is not None and tests.pairs_for_80 <= difference.n
    more = "so the number of pairs is sufficient" if enough else f"and {_for_80(tests.pairs_for_80, grounds)}"
    return f"{text}; with {of} of this spread, the power to find equal arms {claim} is {percent(tests.power)}, {more}"


def _from_target(grounds: Grounds, difference: Interval) -> str:
    tail = "of a long tail, which few runs show, more than 5 % are wrong"
    if grounds.p_bootstrap is not None:
        tail = f"the {grounds.values} are skewed, bootstrap-t {p_value(grounds.p_bootstrap)}"
    mean, low, high = map(grounds.signed, (difference.mean, difference.low, difference.high))
    return f"{grounds.quantity} is {mean}, one-sided {confidence(1 - grounds.alpha)} bounds {low} and {high}; {tail}"


def _ci(grounds: Grounds, interval: Interval, bracket: str = "") -> str:
    ends = f"{grounds.signed(interval.low)} to {grounds.signed(interval.high)}"
    return f"{confidence(interval.level)} CI {bracket}{ends}"


def _for_80(needed: int | None, grounds: Grounds) -> str:
    what = "pairs" if grounds.paired else "runs of each arm"
    return f"even 1,000 {what} would not reach 80 %" if needed is None else f"{needed:,} {what} would reach 80 %"


def _alike(grounds: Grounds, difference: Interval) -> str:
    if not grounds.alike:
        return ""
    if difference.low < difference.high:
        return "; all pairs have the same difference, and the CI reflects the rounding of values"
    if grounds.number is not None:
        return "; all runs have the same value"
    if difference.mean == 0:
        return "; all pairs are bitwise equal, so both arms probably ran the same computation"
    return "; all pairs have exactly the same difference, so the true spread is unknown"


def _unseen(tests: Equivalence | None) -> str:
    """Describe what runs none of which failed cannot exclude, with 95 % confidence."""
    if tests is None or math.isnan(tests.unseen):
        return ""
    rare = f"a failure, or a difference larger than any of these, in up to {percent(tests.unseen)} of runs"
    return f"; no run failed; {rare} cannot be excluded"
