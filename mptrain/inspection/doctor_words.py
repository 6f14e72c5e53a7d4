"""Sentences of ``mptrain doctor`` on a model as a whole: the number of problems, and the usable loss scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mptrain.inspection.doctor import ScalingReport
from mptrain.inspection.doctor_findings import why_no_range
from mptrain.inspection.doctor_ranges import UsableScales, scales_of
from mptrain.inspection.findings import label
from mptrain.numerics.formats import scale_in_words
from mptrain.numerics.words import counted, share


def verdict(report: ScalingReport) -> str:
    """Summarise a check of a model's gradients in one sentence: the number of problems and the usable loss scales."""
    count = len(report.findings)
    wrong = f"{counted(count, 'problem')} found"
    if why := why_no_range(report.evidence, report.findings):
        return f"{wrong}; {why}"
    scales = scales_of(report.modules)
    if not scales.good:
        return f"{wrong}; no loss scale is usable for all modules"
    return f"{wrong}; usable loss scales: {powers(scales.good)}, middle 2^{scales.best}"


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
