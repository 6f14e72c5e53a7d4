"""One look at a configuration: does its model train rightly in its precision? Nothing is trained and nothing written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mptrain.config.build import build
from mptrain.config.schema import Config
from mptrain.engine.parts import Parts
from mptrain.errors import ConfigError, DataError
from mptrain.inspection import scale_check_gradients as passes
from mptrain.inspection.findings import Finding
from mptrain.inspection.module_tensors import Outputs
from mptrain.inspection.observations import CLOSE
from mptrain.inspection.scale_check_findings import findings, wrong_gradients, wrong_outputs
from mptrain.inspection.scale_check_observation import half_weights, inspect_step
from mptrain.inspection.scale_check_ranges import ModuleScaling, ScalingEvidence, by_module
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.census import dtype_name
from mptrain.precision.policy import Policy
from mptrain.precision.support import require_support, resolve_device
from mptrain.workloads.base.batch import Batch

#: The scales that are tried: 2^0 to this power of two; every second one where a pass takes longer than so many seconds.
HIGHEST, SLOW = 24, 5.0

_FP32 = Policy(name="fp32", parameters="float32", compute="float32", autocast=False, master_weights=False)


@dataclass(frozen=True)
class ScalingReport:
    """Result of a scale check.

    Attributes:
        evidence: What the findings are made of.
        findings: What is wrong, causes first; nothing where all is in order.
        modules: Gradients by module in the order of their call; empty where the passes could not be done.
        reference: What gradients were compared with: ``float64`` or ``float32``.
        samples: Of the batch.
        notes: What was done differently from training, one sentence each.
    """

    evidence: ScalingEvidence
    findings: Sequence[Finding]
    modules: Sequence[ModuleScaling]
    reference: str
    samples: int
    notes: tuple[str, ...]


def check_scaling(config: Config, tell: Callable[[str], None]) -> ScalingReport:
    """Compare the first step's gradients in a configuration's precision with those in FP64, at many loss scales.

    Args:
        config: Checked; its precision computes in FP16 or BF16.
        tell: Is told what is being done, for whoever waits.

    Raises:
        ConfigError: The precision is no half precision, or parts do not go together.
        EnvironmentRefused: The device cannot do it.
        DataError: The data is missing or unusable.
    """
    policy = config.precision
    if not policy.half:
        raise ConfigError(
            f"precision={policy.name} computes nothing in half precision: there is nothing to check",
            "choose another one, for example precision=amp_dynamic or precision=fp16_dynamic",
        )
    if config.inject.step is not None:
        raise ConfigError(
            f"inject.step={config.inject.step}: the doctor looks at a model as it is",
            "leave inject out, or look at the step that has the fault with mptrain diagnose",
        )
    require_support(policy, resolve_device(config.device))
    form = FORMATS[policy.compute]
    tell(f"one step in {policy.name}")
    parts, batch = _first_batch(config)
    started = time.perf_counter()
    inspection = inspect_step(parts, parts.prepare(batch), form)
    step = 2 if time.perf_counter() - started > SLOW else 1
    evidence = inspection.evidence
    if evidence.refused:
        return ScalingReport(evidence, findings(evidence), (), "", batch.samples, ())
    del parts  # one model at a time
    tell("its gradients in FP32 and FP64")
    wide, _ = build(replace(config, precision=_FP32))
    if not passes.is_finite(wide, wide.prepare(batch)):
        breaking = passes.breaking_operators(wide, wide.prepare(batch))
        evidence = replace(evidence, fp32_finite=False, breaks_fp32=breaking)
        return ScalingReport(evidence, findings(evidence), (), "", batch.samples, ())
    reference = passes.compute_reference(wide, wide.prepare(batch), form, inspection.outputs, inspection.weights)
    del wide
    tell("its gradients at loss scales from 2^0 to 2^24")
    parts, _ = build(config)
    prepared = parts.prepare(batch)
    measured = passes.compare_scales(parts, prepared, reference, range(0, HIGHEST + 1, step))
    modules = by_module(measured, form, inspection.order)
    breaks = reference.breaks or _breaks_in_half(parts, prepared, modules)
    evidence = replace(evidence, modules=modules, outputs=reference.outputs)
    if wrong_outputs(evidence):
        breaking = passes.breaking_operators(parts, prepared)
        evidence = replace(evidence, breaks_half=[one for one in breaking if one.phase == "forward"])
    lost = {  # what FP32 has and the format cannot hold, where it is kept in that: clamped, or infinite
        name: exact
        for name, value in inspection.values.items()
        if form.max < (exact := reference.values.get(name, math.inf)) < math.inf and value != exact
    }
    evidence = replace(evidence, lost_values=lost, breaks=breaks)
    if not breaks and (suspects := wrong_gradients(modules)):
        wide, _ = build(replace(config, precision=_FP32))
        scale, weights = 2.0 ** suspects[0], half_weights(parts.model)
        breaks, right = passes.compare_backward(
            (parts, prepared),
            lambda: (wide, wide.prepare(batch)),
            inspection.outputs,
            scale,
            suspects[1],
            form,
            weights,
        )
        keep = tuple(dict.fromkeys(passes.holding_gradients(right, name, scale, form) for name in breaks))
        evidence = replace(evidence, breaks=breaks, keep_backward=keep)
    notes = (
        reference.notes if step == 1 else (*reference.notes, "every second scale was tried, since a step takes long")
    )
    notes = (*notes, *_near_the_top(reference, inspection.outputs, form))
    return ScalingReport(evidence, findings(evidence), modules, reference.dtype, batch.samples, notes)


def _near_the_top(reference: passes.Reference, said: Outputs, form: Format) -> tuple[str, ...]:
    """Return a sentence about the output that is closest to the largest number of the format, where later steps may leave it."""
    inside = [
        (errors.largest, name)
        for name, errors in reference.outputs.items()
        if any(dtype_name(one) == form.name for one in said.get(name, ())) and errors.largest <= form.max
    ]
    largest, name = max(inside, default=(0.0, ""))
    if largest < CLOSE * form.max:
        return ()
    share = f"{100 * largest / form.max:.0f} % of the largest number of {form.name}: later steps may leave the range"
    return (f"what {name or 'the model'} says reaches {largest:.3g}, {share}",)


def _first_batch(config: Config) -> tuple[Parts, Batch]:
    parts, _ = build(config)
    loader = parts.loaders["train"]
    batch = next(iter(loader.batches(0)), None)
    loader.close()
    if batch is None:
        raise DataError("the training split has no usable sample", "see dataset.on_error, and mptrain list dataset")
    return parts, batch


def _breaks_in_half(parts: Parts, batch: Batch, modules: Sequence[ModuleScaling]) -> tuple[str, ...]:
    """Return the modules in which gradients stop being in proportion in half precision alone, if any do."""
    drifting = [module for module in modules if module.drifts]
    if not drifting:
        return ()
    first = drifting[-1]
    scales = 2.0 ** min(first.errors, key=lambda one: first.errors[one]), 2.0 ** max(first.finite)
    return passes.find_breaks(parts, batch, scales, [module.name for module in drifting], first.tolerance)
