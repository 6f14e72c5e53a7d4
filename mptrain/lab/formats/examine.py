"""Examination of a configuration, a run or a loop of others in all number formats: `mptrain.formats`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mptrain.config.schema import Config
from mptrain.engine.module_trail import unwrapped
from mptrain.engine.parts import Parts
from mptrain.lab.diagnosis.diagnose import step_of_run, step_to_repeat
from mptrain.lab.formats.layers import KeptLayers, layers_to_keep
from mptrain.lab.formats.look import Look
from mptrain.lab.formats.report import BANDS, FormatsReport, StepFormats, band_of, require_formats
from mptrain.lab.other_loop import LossFunction, loop_config
from mptrain.lab.step.repetition import SavedStep, restore_step, with_overrides
from mptrain.precision.apply import input_dtype
from mptrain.run.build.parts import build
from mptrain.system.errors import UsageError
from mptrain.system.process_state import settings_restored

#: Formats that are looked at unless others are asked for.
USUAL = ("fp16", "bf16", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp8_floor", "mxfp4", "nvfp4")

#: Steps trained before the look at a new network: the gradients of its first step, above all through batch norm, are
#: unlike those of all later ones.
WARM_UP = 20


@settings_restored()
def formats_of_config(
    config: Config, steps: Sequence[int], names: Sequence[str], budget: float, tell: Callable[[str], None]
) -> FormatsReport:
    """Return what number formats do to a new network's gradients; nothing is written.

    Args:
        config: Validated configuration, in whose precision the network is trained in memory.
        steps: Numbers of the steps to look at, from 1, ascending; earlier ones are trained. Empty for the one after
            `WARM_UP` steps, or the last one of a shorter training.
        names: Formats; `USUAL` for none.
        budget: Largest share of the FLOPs in layers that are kept in FP32; 0 looks for none.
        tell: Called with progress messages.

    Raises:
        MptrainError: The data or the device is missing, a format is unknown, or gradients in FP32 are not finite.
    """
    names = require_formats(names or USUAL)
    looks: list[StepFormats] = []
    parts, options = build(config)
    saved: SavedStep | None = None
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    for step in steps or (max(1, min(WARM_UP + 1, planned)),):
        tell(f"training up to step {step:,}")
        if looks:
            parts, options = build(config, weights=False)
        saved = step_to_repeat(config, parts, options, saved.state if saved is not None else None, step)
        look_parts, more = _look_at(config, saved, names, budget, tell)
        looks.append(more)
    return FormatsReport(config.model_title, tuple(looks), _shared(look_parts.model), _linear(look_parts.model))


@settings_restored()
def formats_of_run(
    run: str, overrides: Sequence[str], names: Sequence[str], budget: float, tell: Callable[[str], None]
) -> FormatsReport:
    """Return what number formats do to the gradients of a run's step after its last checkpoint; nothing is written.

    ``run`` is a run directory. The other arguments and errors are those of `formats_of_config`.
    """
    names = require_formats(names or USUAL)
    tell("loading the last checkpoint")
    config, located = step_of_run(run, overrides)
    parts, look = _look_at(config, located.saved_step, names, budget, tell)
    return FormatsReport(config.model_title, (look,), _shared(parts.model), _linear(parts.model), located.remarks)


def formats(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    formats: Sequence[str] = (),
    keep: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> FormatsReport:
    """Look at which number formats a model can be trained in, by the gradients of one step, on any device.

    The products of all layers are computed from operands rounded to each format, forward and backward, and the
    gradients compared with those in FP32. Each format takes the time of two to seven steps. Nothing of the caller's is
    changed. Call it after some training: at the first step networks with batch norm mislead.

    Args:
        model: The model with FP32 parameters, on any one device; wrapped by DDP or compiled, what is inside counts.
        loss_fn: Function of the model and the batch: the loss, a tensor with one element. It uses the model that it is
            given, and neither autocast, nor ``backward``, nor a loss scale.
        batch: The batch, in the form in which ``loss_fn`` takes it; its tensors are moved to the model's device.
        formats: Names of formats, such as ``mxfp8`` and ``nvfp4``; all usual ones for none.
        keep: Largest share of the products' FLOPs, from 0 to 1, in layers that stay in FP32 or BF16. With it, the
            layers are looked for that take most of a format's error away, six candidates for each. 0 looks for none.
        optimizer: Optimizer, whose parameters alone are trained; None for all that require gradients.

    Returns:
        Report: ``print`` shows it; ``verdict(format)``, ``keep(format)`` and ``filter(format)``, for torchao.

    Raises:
        ConfigError: The model is not FP32 or cannot be copied, ``loss_fn`` returns no tensor with one element, or no
            product is a layer's. An error that ``loss_fn`` raises is raised as it is.
        UsageError: A format is unknown.
        NumericsError: The gradients are not finite in FP32, or all are zero.
    """
    names = [formats] if isinstance(formats, str) else formats
    if not isinstance(keep, int | float) or not 0 <= keep <= 1:
        raise UsageError(f"keep={keep!r}", "give a share of the FLOPs from 0 to 1")
    with loop_config(model, loss_fn, batch, optimizer, ("precision=fp32",)) as config:
        report = formats_of_config(config, (1,), names, keep, lambda _: None)
    return replace(report, subject=type(unwrapped(model)).__name__, steps=(replace(report.last, step=None),))


def _look_at(
    config: Config, saved: SavedStep, names: Sequence[str], budget: float, tell: Callable[[str], None]
) -> tuple[Parts, StepFormats]:
    """Look at a saved step in FP32 and in each format."""
    parts, _ = build(with_overrides(config, "precision=fp32"), weights=False)
    restore_step(parts, saved)
    tell("computing the step in FP32")
    look = Look.at(parts, saved.batch.cast(input_dtype(parts.policy)))
    errors, keep = [], dict[str, KeptLayers]()
    for name in names:
        tell(f"computing the step in {name}")
        errors.append(look.errors(name))
        if budget and band_of(errors[-1]) != BANDS[0]:
            tell(f"looking for layers to keep in FP32 for {name}")
            keep[name] = layers_to_keep(look, errors[-1], budget, BANDS[0].most)
    compared = len(look.gradients) - len(look.nothing)
    nothing = tuple(sorted(look.nothing))
    seen = StepFormats(
        saved.step,
        saved.batch.samples,
        compared,
        look.compared,
        nothing,
        look.coverage,
        tuple(errors),
        keep if budget else None,
    )
    return parts, seen


def _linear(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _shared(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Return the other modules that have the weight of a module, by its name, as a head tied to an embedding."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    tied = [list(dict.fromkeys(names)) for names in owners.values()]
    return {name: tuple(each for each in names if each != name) for names in tied if len(names) > 1 for name in names}
