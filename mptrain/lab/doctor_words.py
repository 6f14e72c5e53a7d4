"""Sentences of ``mptrain doctor`` on a model as a whole: the number of problems, and the usable loss scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mptrain.lab.doctor import ScalingReport
from mptrain.lab.doctor_findings import why_no_range
from mptrain.lab.doctor_ranges import UsableScales, is_spoiled, result_error, scales_of
from mptrain.lab.findings import label
from mptrain.numerics.formats import scale_in_words
from mptrain.numerics.words import counted, listed, share


def verdict(report: ScalingReport) -> str:
    """Summarise a check of a model's gradients in one sentence: the number of problems and the usable loss scales.

    Where errors that no module is to blame for exceed what the check accepts, it is no all-clear.
    """
    count = len(report.findings)
    wrong = f"{counted(count, 'problem')} found"
    if not count and (doubt := _doubt(report)):
        wrong = f"nothing is found that keeps it from training, but {doubt}"
    zero = [label(module.name) for module in report.modules if module.reference == 0]
    if not count and zero:
        wrong = f"{wrong} (not seen: {listed(zero, 3)}, with gradients of zero)"
    if why := why_no_range(report.evidence, report.findings):
        return f"{wrong}; {why}"
    scales = scales_of(report.modules)
    if not scales.good:
        return f"{wrong}; no loss scale is usable for all modules"
    return f"{wrong}; usable loss scales: {powers(scales.good)}, middle 2^{scales.best}"


def _doubt(report: ScalingReport) -> str:
    """Return what a check without findings leaves open, as a clause; empty for nothing."""
    evidence = report.evidence
    if report.modules and is_spoiled(evidence.outputs, report.modules, evidence.form):
        gradients = min((one.expected for one in report.modules if one.judged), default=0.0)
        sums = (
            f"rounding errors of many modules add up to {error_share(max(result_error(evidence.outputs), gradients))}"
        )
        return f"{sums} of its result: train it to see whether it learns"
    if inexact := [one for one in report.modules if one.wrong]:
        largest = error_share(max(one.best for one in inexact))
        return (
            f"gradients of {counted(len(inexact), 'module')} are off by up to {largest}, which training usually bears"
        )
    return ""


def scale_notes(report: ScalingReport) -> list[str]:
    """Return sentences on the largest gradient error, and on the configured loss scales among the usable ones."""
    return [*_largest_error(report), *_about_scales(report)]


def _largest_error(report: ScalingReport) -> list[str]:
    """Return a sentence on the module whose gradients half precision changes most; nothing if none is judged."""
    errors = {one.name: math.hypot(one.expected, one.best) for one in report.modules if one.judged}
    worst = max(errors, key=lambda one: errors[one], default=None)
    if worst is None or math.isinf(errors[worst]):
        return []
    return [f"gradients are off by up to {error_share(errors[worst])}, most in {label(worst)}"]


def _about_scales(report: ScalingReport) -> list[str]:
    """Return sentences that compare the configured loss scales with the usable ones."""
    if why_no_range(report.evidence, report.findings):
        return []
    scales = scales_of(report.modules)
    sentences = [_configured(scales, name, *scale) for name, scale in report.evidence.scales.items()]
    if scales.overflows is not None:
        sentences.insert(0, f"gradients overflow at 2^{scales.overflows} and above")
    return list(dict.fromkeys(sentence for sentence in sentences if sentence))


def _configured(scales: UsableScales, learner: str, scale: float, constant: bool) -> str:
    whose = "" if learner == "main" else f" of the {learner}"
    suits = scales.suits(scale)
    if not scales.good or (constant and not suits):  # an unusable constant scale is already a finding
        return ""
    how = "is usable"
    if suits is None:
        how = "is outside the tested range"
    elif not suits:
        how = "is too high and will decrease" if scale > 2.0 ** scales.good[-1] else "is too low and will grow"
    return f"{'the constant scale' if constant else 'the initial scale'}{whose}, {scale_in_words(scale)}, {how}"


def powers(exponents: Sequence[int]) -> str:
    """Format a range of loss scales, given by ascending base-2 exponents, such as ``2^3 to 2^19``."""
    if not exponents:
        return "none"
    return f"2^{exponents[0]}" if len(exponents) == 1 else f"2^{exponents[0]} to 2^{exponents[-1]}"


def error_share(error: float) -> str:
    """Format a relative error as a percentage, or as ``inf``."""
    return "inf" if math.isinf(error) else share(error)
