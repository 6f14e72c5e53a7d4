"""Doctor and diagnosis of one step of a training loop that is not mptrain's, with remedies in terms of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from mptrain.config.schema import Config
from mptrain.lab.diagnosis import diagnose_config
from mptrain.lab.doctor import check_scaling
from mptrain.lab.doctor_findings import why_no_range
from mptrain.lab.doctor_ranges import scales_of
from mptrain.lab.doctor_words import scale_notes, verdict
from mptrain.lab.findings import Finding, label
from mptrain.lab.loop_parts import LossFunction, loop_config
from mptrain.lab.pages.diagnosis_page import NAMES
from mptrain.numerics.formats import scale_in_words
from mptrain.numerics.words import listed
from mptrain.probe.module_trail import LOSS, unwrapped
from mptrain.runlog.diagnosis_file import Examination
from mptrain.system.errors import EXIT_NUMERICS, EXIT_OK

#: Phrases about mptrain's own runs, and what they are for another loop.
_PHRASES: Final = {
    "with mptrain diagnose and precision=fp32": 'with mptrain.diagnose(..., precision="fp32")',
    "set scaler=static scaler.scale=": "set a constant loss scale of ",
    "mptrain recommend evaluates more steps": "mptrain.watch and mptrain.recommend evaluate more steps",
    "checkpoint, with scaler.on_overflow=skip": "checkpoint, and skip updates that overflow",
    "a lower optimizer.lr or train.clip_norm": "a lower learning rate or gradient clipping",
    "clean data, or dataset.on_error=skip if the data set detects such samples": "clean data",
    " (standardise them in the data set)": "",
    "step 1 is finite": "the step is finite",
}


@dataclass(frozen=True)
class LoopReport:
    """Result of `doctor` or `diagnose`; ``str`` gives it as text for people.

    Attributes:
        summary: The result in one sentence.
        findings: Problems, causes first, and minor findings, which are notes; empty if nothing is wrong. Each has
            ``kind``, ``module`` (all in ``where``), ``operator``, ``what``, ``hint`` (a remedy in terms of
            torch; empty if none is known) and ``minor``. Modules have qualified names, empty for the model itself and
            ``(loss)`` for the loss function outside the model.
        notes: Further observations, one sentence each.
        loss_scales: Powers of two at which the gradients of every module are right, ascending; empty if there are
            none, and for a diagnosis.
    """

    summary: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    loss_scales: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no finding is a problem."""
        return all(one.minor for one in self.findings)

    @property
    def exit_code(self) -> int:
        """Exit code of ``mptrain doctor`` with these findings: 0 if ``ok``, else 4."""
        return EXIT_OK if self.ok else EXIT_NUMERICS

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {"ok": self.ok, "exit_code": self.exit_code, **asdict(self)}

    def __str__(self) -> str:
        lines = [self.summary]
        for one in self.findings:
            names = listed(["the loss" if name == LOSS else label(name) for name in one.where])
            lines.append(f"{'note' if one.minor else 'problem'}: {names}{': ' * bool(names)}{one.what}")
            lines += [f"  remedy: {one.hint}"] if one.hint else []
        return "\n".join([*lines, *(f"note: {sentence}" for sentence in self.notes)])


def doctor(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    precision: str = "amp_dynamic",
    optimizer: torch.optim.Optimizer | None = None,
) -> LoopReport:
    """Check whether a model's training step is right in a half precision, as ``mptrain doctor`` does.

    The gradients at loss scales from 2^0 to 2^24 are compared with those in FP64, or in FP32 where the model does not
    run in FP64. It takes some 40 steps. Copies of the model compute them, without dropout: weights, buffers, gradients,
    modes and random numbers stay as they are.

    Args:
        model: The model with FP32 parameters, on any one device; wrapped by DDP or compiled, what is inside counts.
        loss_fn: Function of the model and the batch: the loss, a tensor with one element. It uses the model that it is
            given, and neither autocast, nor ``backward``, nor a loss scale.
        batch: The batch, on any device: dense tensors in nested lists, tuples and mappings, which are moved to that of
            the model. If parameters are in half precision, so are the floating-point tensors that the model is given.
        precision: Mode of ``mptrain list precision``. ``amp_dynamic`` and ``amp_bf16`` are autocast with FP16 and
            BF16, ``fp16_dynamic`` and ``bf16`` parameters in these with FP32 norm layers and master weights.
        optimizer: Optimizer, whose parameters alone are trained; None for all that require gradients.

    Raises:
        ConfigError: The precision is unknown or not half, the model is not FP32 or cannot be copied, or ``loss_fn``
            returns no tensor with one element. An error that it raises in FP32 is raised as it is.
        EnvironmentRefused: The device does not support the precision.
    """
    with loop_config(model, loss_fn, batch, optimizer, _words(precision, None)) as config:
        report = check_scaling(config, lambda _: None, lambda word: _in_torch(config, [word]))
    good = scales_of(report.modules).good if not why_no_range(report.evidence, report.findings) else ()
    return LoopReport(
        summary=f"{type(unwrapped(model)).__name__} in {precision}: {verdict(report)}",
        findings=tuple(map(_phrased, (*report.findings, *report.minor))),
        notes=(*scale_notes(report), *report.notes[: len(report.notes) - len(report.minor)]),
        loss_scales=tuple(2.0**one for one in good),
    )


def diagnose(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    precision: str = "amp_dynamic",
    loss_scale: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> LoopReport:
    """Find the operator in which a training step becomes inf or NaN, or wrong, and try remedies on the step.

    Call it when a step has overflowed, before anything changes the weights: with the model, the batch and the scale of
    that step. Random numbers are other ones than those of the step. Nothing of the caller's is changed, as by `doctor`,
    which has the arguments and errors that are not described here.

    Args:
        model: As for `doctor`.
        loss_fn: As for `doctor`.
        batch: As for `doctor`.
        precision: As for `doctor`, or ``fp32``.
        loss_scale: Loss scale of the step (``scaler.get_scale()``); None for the first of a ``torch.amp.GradScaler``,
            2^16, or none in precisions without a scaler.
        optimizer: As for `doctor`.

    Returns:
        Report whose first finding is the first cause, with the remedy that helped on this batch. An overflow that the
        scaler ends by itself is a note.
    """
    with loop_config(model, loss_fn, batch, optimizer, _words(precision, loss_scale)) as config:
        found = diagnose_config(config).found
        findings = _causes(config, found)
    failed = [one for one in found.remedies if one.helped is False]
    at = f" at loss scale {scale_in_words(found.loss_scale)}" if found.loss_scale != 1 and findings else ""
    result = f"the step fails in {NAMES[found.cause]}" if findings else _in_other_words(found.verdict)
    result = "the step is skipped, as usual" if findings and findings[0].minor else result
    notes = (*found.notes, *(f"tried without success: {one.text}: {one.outcome}" for one in failed))
    summary = f"{type(unwrapped(model)).__name__} in {precision}{at}: {result}"
    return LoopReport(summary, findings, tuple(map(_in_other_words, notes)))


def _words(precision: str, loss_scale: float | None) -> list[str]:
    dynamic = precision.endswith("_dynamic")
    words = [f"precision={precision}", *(["scaler=torch"] if dynamic or loss_scale is not None else [])]
    return words if loss_scale is None else [*words, f"scaler.init_scale={float(loss_scale)!r}"]


def _causes(config: Config, found: Examination) -> tuple[Finding, ...]:
    """Return the first cause of a step's failure with the remedy that helped or is advised, and the other causes."""
    if found.cause == "none":
        return ()
    untried = (one for one in found.remedies if one.helped is None and not one.words)
    advised = [one for one in untried if not one.outcome.startswith("not advised")]
    remedy = next(iter((*(one for one in found.remedies if one.helped), *advised)), None)
    hint, what = "", found.verdict
    if remedy is not None:
        hint = f"{_in_torch(config, remedy.words) or remedy.text}: {remedy.outcome}"
    by_itself = bool(found.cause == "backward" and remedy is not None and remedy.helped and not remedy.words)
    if by_itself:
        what = what.rpartition("; until then ")[2]
    first = (found.cause, found.module, found.operator, what, hint)
    several: list[tuple[str, str | None, str, str, str]] = [first]
    several += [(one.cause, one.module, one.operator, one.sentence, "") for one in found.also]
    return tuple(
        _phrased(Finding(kind, () if module is None else (module,), what, hint, (), operator, minor=by_itself))
        for kind, module, operator, what, hint in several
    )


def _phrased(finding: Finding) -> Finding:
    return replace(finding, what=_in_other_words(finding.what), hint=_in_other_words(finding.hint))


def _in_other_words(sentence: str) -> str:
    for phrase, other in _PHRASES.items():
        sentence = sentence.replace(phrase, other)
    return sentence


def _in_torch(config: Config, words: Iterable[str]) -> str:
    """Return what overrides of a run are in a loop of torch, such as ``precision=amp_bf16``; empty for unknown ones."""
    return " and ".join(filter(None, (_word_in_torch(config, word) for word in words)))


def _word_in_torch(config: Config, word: str) -> str:
    key, _, value = word.partition("=")
    autocast = f'torch.autocast("{torch.device(config.device).type}"'
    if key == "precision.keep_fp32":
        entries = [one for one in re.split(r"[\[\],]", value) if one and one not in config.precision.keep_fp32]
        names = " and ".join("the norm layers" if one == "norms" else one for one in entries)
        in_autocast = f"with {autocast}, enabled=False): module(x.float())"
        how = in_autocast if config.precision.autocast else "module.float()(x.float()).to(x.dtype)"
        return f"compute {names} in FP32 ({how})"
    if key in ("scaler.scale", "scaler.init_scale"):
        return f"set a loss scale of {value} (GradScaler(init_scale={value}))"
    return {
        "precision=fp32": "compute all in FP32",
        "precision=bf16": "use torch.bfloat16 in place of torch.float16, without a loss scaler",
        "precision=amp_bf16": f"use {autocast}, torch.bfloat16), without a loss scaler",
        "precision=amp_dynamic": f"keep the weights in FP32, with {autocast}, torch.float16) and torch.amp.GradScaler",
        "scaler=dynamic": "use torch.amp.GradScaler",
    }.get(word, "")
