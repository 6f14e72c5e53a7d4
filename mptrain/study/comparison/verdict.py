"""Decision on an arm against the reference of a comparison. *Undecided* is a valid verdict."""

from __future__ import annotations

from dataclasses import dataclass

from mptrain.study.comparison.evidence import PairedEvidence
from mptrain.study.comparison.results import ArmVerdict, Interval, Word
from mptrain.study.comparison.verdict_words import Reason, incomplete, why

#: Level of every test.
ALPHA = 0.05


@dataclass(frozen=True)
class Facts:
    """Facts that decide about an arm, of runs that are paired or not, from run directories or logs.

    Attributes:
        difference: Mean of arm minus reference, with the interval for "better" and "worse"; None without values.
        inside: The tests of equivalence, or of no inferiority (``one_sided``), all hold.
        failed: Runs of the arm failed, and ``reference_failed`` those of the reference.
        failure_p: The p value of a test that the arm does not fail more often.
        paired: Failures of the reference leave out runs of both arms.
        unlearned: Neither arm has learned.
        bound: Difference that "better" and "worse" are relative to.
        alpha: Level of the test of failures.
    """

    difference: Interval | None
    inside: bool
    higher_is_better: bool
    failed: bool
    reference_failed: bool
    failure_p: float
    paired: bool = True
    one_sided: bool = False
    unlearned: bool = False
    bound: float = 0.0
    alpha: float = ALPHA


def decide(evidence: PairedEvidence) -> ArmVerdict:
    """Decide whether an arm is better than, equivalent to or worse than the reference of a comparison, or undecided.

    The evidence may have a bound other than zero, and a number in place of a reference (`PairedEvidence`). Better and
    worse are then relative to the bound, and to the number. If some pairs are incomplete, the sentence says how many
    are complete.
    """
    word, reason = judge(
        Facts(
            evidence.difference,
            evidence.equivalence is not None and evidence.equivalence.holds,
            evidence.higher_is_better,
            bool(evidence.failed),
            bool(evidence.reference_failed),
            evidence.failure_p,
            unlearned=bool(evidence.unlearned),
            bound=evidence.bound,
        )
    )
    return ArmVerdict(word, why(reason, evidence) + incomplete(evidence))


def judge(facts: Facts) -> tuple[Word, Reason]:
    """Return the verdict on an arm, and what decided: the only rule of all comparisons with a reference.

    Numerical failures come first: if the arm fails more often than by chance, it is worse (of pairs, by a sign test of
    those in which exactly one run failed, McNemar 1947). If any run failed, the remaining runs are a biased selection,
    so the arm is never better or equivalent. Then, with at least two values, two one-sided tests decide equivalence: t
    tests and, where a sample is skewed, bootstrap-t tests too. Arms of which neither has learned are not equivalent:
    they agree whatever differs. Otherwise the arms differ if the interval of the difference excludes zero. In all other
    cases the verdict is undecided.
    """
    difference, bound = facts.difference, facts.bound
    if facts.failure_p < facts.alpha:
        return "worse", "failures"
    if difference is None or difference.n < 2:
        return "undecided", "few pairs"
    excludes_bound = difference.low > bound or difference.high < bound
    is_worse = excludes_bound and (difference.mean > bound) != facts.higher_is_better
    if is_worse and not facts.inside and (facts.paired or not facts.reference_failed):
        return "worse", "worse difference"
    if facts.failed or facts.reference_failed:
        return "undecided", "biased selection"
    if facts.inside:
        if facts.unlearned:
            return "neither has learned", "unlearned"
        return ("not inferior" if facts.one_sided else "equivalent"), "equivalence"
    if excludes_bound and not facts.one_sided:
        return "better", "better difference"
    return "undecided", "wide interval"
