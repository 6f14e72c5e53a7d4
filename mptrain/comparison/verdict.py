"""Decision on an arm against the reference of a comparison. *Undecided* is a valid verdict."""

from __future__ import annotations

from mptrain.comparison.evidence import PairedEvidence
from mptrain.comparison.results import ArmVerdict, Word
from mptrain.comparison.verdict_words import Reason, incomplete, why

#: Level of every test.
ALPHA = 0.05


def decide(evidence: PairedEvidence) -> ArmVerdict:
    """Decide whether an arm is better than, equivalent to or worse than the reference of a comparison, or undecided.

    Numerical failures come first: an exact sign test (McNemar 1947) of the pairs in which exactly one run failed
    decides whether the arm fails more often than by chance. If any run failed, the remaining runs are a biased
    selection, so the arm is never better or equivalent. Then, with at least two complete pairs, two one-sided tests
    decide equivalence: t tests and, where the differences are skewed, bootstrap-t tests too. Otherwise the arms differ
    if the 95 % CI of the difference excludes zero. In all other cases the verdict is undecided. If some pairs are
    incomplete, the sentence says how many are complete.

    The evidence may have a bound other than zero, and a number in place of a reference (`PairedEvidence`). Better and
    worse are then relative to the bound, and to the number.
    """
    word, reason = _decide(evidence)
    return ArmVerdict(word, why(reason, evidence) + incomplete(evidence))


def _decide(evidence: PairedEvidence) -> tuple[Word, Reason]:
    difference, equivalence = evidence.difference, evidence.equivalence
    if evidence.failure_p < ALPHA:
        return "worse", "failures"
    if difference is None or difference.n < 2:
        return "undecided", "few pairs"
    excludes_bound = difference.low > evidence.bound or difference.high < evidence.bound
    inside = equivalence is not None and equivalence.holds
    if excludes_bound and not inside and (difference.mean > evidence.bound) != evidence.higher_is_better:
        return "worse", "worse difference"
    if evidence.failed or evidence.reference_failed:
        return "undecided", "biased selection"
    if inside:
        return "equivalent", "equivalence"
    return ("better", "better difference") if excludes_bound else ("undecided", "wide interval")
