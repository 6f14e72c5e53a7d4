"""Training step under diagnosis, which can be repeated with other overrides or at another loss scale.

`mptrain.lab.diagnosis.remedies` chooses the repetitions to try.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mptrain.config.schema import Config
from mptrain.engine.observer import Observation, Operation
from mptrain.engine.parts import Parts
from mptrain.engine.rehearsal import rehearse, rounded_tensors
from mptrain.engine.step import Learner
from mptrain.lab.diagnosis.causes import (
    NEVER_ZERO,
    compare_with_fp32,
    describe_errors,
    find_causes,
    inexact,
    no_fault,
    underflows,
)
from mptrain.lab.finding import Finding
from mptrain.lab.step.accuracy import StepAccuracy, measure_accuracy
from mptrain.lab.step.repetition import SavedStep, observe_step, restore_step, with_overrides
from mptrain.numerics.tensors import limited
from mptrain.precision.apply import input_dtype, set_matmul_precision
from mptrain.run.build.parts import build
from mptrain.system.errors import CheckpointError, ConfigError, DataError, EnvironmentRefused
from mptrain.system.words import listed


def with_fp32_values(config: Config, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the FP32 values of those tensors that are still what a newly built model is cast to.

    Such a tensor is a constant, such as a table of positions in a buffer, or not trained yet. In half precision its
    values are rounded and clamped, and FP32 would otherwise start from them too. ``state`` is that of a checkpoint.
    """
    dtypes = {getattr(tensor, "dtype", None) for tensor in (*state["model"].values(), *state["carried"].values())}
    if (half := next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in dtypes), None)) is None:
        return dict(state)
    try:
        wide = with_overrides(config, "precision=fp32")
        try:
            parts, _ = build(wide)
        except (CheckpointError, DataError):  # the file that the run started from is gone
            parts, _ = build(wide, weights=False)
    except (EnvironmentRefused, ConfigError):
        return dict(state)
    finally:
        # Building parts in FP32 has changed this process-wide setting.
        set_matmul_precision(config.precision)
    model, carried = (
        {name: _unrounded(tensor, built.get(name), half) for name, tensor in state[at].items()}
        for at, built in (("model", parts.model.state_dict()), ("carried", parts.carried()))
    )
    return {**state, "model": model, "carried": carried}


def _unrounded(value: Any, exact: Any, half: torch.dtype) -> Any:
    """Return an exact tensor if a value is its cast, which is clamped to the range of a dtype; else the value."""
    both = all(isinstance(tensor, torch.Tensor) and tensor.is_floating_point() for tensor in (value, exact))
    return exact if both and torch.equal(limited(exact, half).to(value), value) else value


@dataclass(frozen=True)
class DiagnosisCase:
    """Training step of one learner under diagnosis, with its observation.

    Attributes:
        config: Configuration with which the step is computed.
        parts: Model, optimizers and data built from ``config``, with the saved state restored.
        saved_step: State of the run before the step, with its batch and loss scales.
        seen: Observation of the step's operators, gradients and loss.
        ended: Whether the step ended its run, after too many skipped steps in a row.
        ceiling: Lowest loss scale at which the run's records show an overflow of gradients only; infinite if none does.
        faulted: Whether a fault is injected. Such a step cannot be compared with the same step in FP32.
        original: Case that this one repeats with other overrides or at another scale; None for an original.
    """

    config: Config
    parts: Parts
    saved_step: SavedStep
    seen: Observation
    ended: bool = False
    ceiling: float = math.inf
    faulted: bool = False
    original: DiagnosisCase | None = None

    def with_overrides(self, *words: str, scale: float | None = None) -> DiagnosisCase:
        """Repeat the step with overrides, and return the new case.

        ``scale`` is the loss scale of all learners; None keeps the scales, but another precision brings its own scaler,
        which starts at its first scale. Raises EnvironmentRefused if the device does not support the configuration, and
        ConfigError if the overrides are invalid.
        """
        config = with_overrides(self.config, *words)
        parts = self._built(config)
        scales = dict(self.saved_step.scales)
        if scale is not None:
            scales = {learner.name: scale for learner in parts.learners}
        elif any(word.startswith("precision=") for word in words):
            scales = {learner.name: float(learner.scaler.initial(parts.device)["scale"]) for learner in parts.learners}
        return self._another(config, parts, scales)

    def at_scale(self, scale: float) -> DiagnosisCase:
        """Repeat the step at another loss scale of the learner under diagnosis, and return the new case."""
        # Parts that were built in between may have changed this process-wide setting.
        set_matmul_precision(self.config.precision)
        return self._another(self.config, self.parts, {**self.saved_step.scales, self.seen.learner: scale})

    def _another(self, config: Config, parts: Parts, scales: dict[str, float]) -> DiagnosisCase:
        saved_step = replace(self.saved_step, scales=scales)
        seen = without_initial_nonfinite(observation_of(observe_step(parts, saved_step), self.seen.learner), config)
        original = self.original or self
        return replace(self, config=config, parts=parts, saved_step=saved_step, seen=seen, original=original)

    def _built(self, config: Config) -> Parts:
        parts, _ = build(config, weights=False, micro_batches=self.parts.plan.accumulate)
        restore_step(parts, self.saved_step)
        return parts

    def in_fp32(self) -> Parts:
        """Return newly built parts in ``precision=fp32`` with the saved state restored."""
        return self._built(with_overrides(self.config, "precision=fp32"))

    @functools.cached_property
    def rounded(self) -> tuple[str, ...]:
        """Half-precision buffers and frozen parameters in which small changes of the forward pass are lost."""
        if not self._comparable or self.seen.refusal is not None:
            return ()
        try:
            batch = self.saved_step.batch.cast(input_dtype(self.parts.policy))
            return rounded_tensors(self.parts, batch, rehearse(self.parts, batch))
        except (EnvironmentRefused, ConfigError):
            return ()

    def refusal(self) -> str:
        """Return the reason why a run with this configuration would end before its first step; empty if it starts."""
        try:
            rehearse(self.parts, self.saved_step.batch.cast(input_dtype(self.parts.policy)))
        except (EnvironmentRefused, ConfigError) as error:
            return f"training refuses it: {error}"
        return ""

    @property
    def learner(self) -> Learner:
        """The learner under diagnosis."""
        return next(learner for learner in self.parts.learners if learner.name == self.seen.learner)

    @functools.cached_property
    def causes(self) -> tuple[Finding, ...]:
        """All causes of the step's failure that do not follow from another cause; empty if the step is correct.

        A step in half precision or an emulated format is correct if it is finite and agrees with the same step in FP32.
        """
        exact = self.exact if self._comparable and self._suspicious else None
        if not self.config.precision.reduced and not self.faulted:
            exact = self.seen  # an FP32 step is its own reference
        causes = find_causes(self.seen, exact)
        return compare_with_fp32(self.seen, causes, self.accuracy, self.lost) if self.accuracy is not None else causes

    @property
    def cause(self) -> Finding:
        """First cause of the step's failure, or a finding of kind ``none`` if there is no cause."""
        return next(iter(self.causes), no_fault(self.seen, self.accuracy))

    @property
    def is_sound(self) -> bool:
        """True if the loss and all gradients of the step are finite and no cause of failure is found.

        In half precision, outputs or gradients that differ from FP32 by more than rounding explains are such a cause.
        """
        return self.seen.finite and not self.causes

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user on a sound step, one sentence each; empty for any other step.

        They name infinities of the forward pass without effect, inexact gradients, and tensors that are `rounded`.
        """
        if not self.seen.finite or not self.is_sound:
            return ()
        agree = f"; {describe_errors(self.accuracy)}" if self.accuracy is not None else ""
        infinite = [f"{finding.what}{agree}" for finding in find_causes(self.seen)]
        more = inexact(self.seen, self.accuracy) if self.accuracy is not None else []
        if self.rounded:
            dtype = self.config.precision.parameters
            more.append(f"forward passes change {listed(self.rounded)} in {dtype}, which rounds small changes away")
        return (*infinite, *more)

    @property
    def _suspicious(self) -> bool:
        return not self.seen.finite or any(operation.breaks for operation in self.seen.of("forward"))

    @property
    def _comparable(self) -> bool:
        seen = self.seen
        return self.config.precision.reduced and not (self.faulted or seen.inputs or seen.weights)

    @functools.cached_property
    def accuracy(self) -> StepAccuracy | None:
        """Errors of the step's module outputs and gradients in half precision against FP64; None if not measured.

        They are measured only in half precision, not in emulated formats, and for the first learner. They are not if
        the loss of the step, the batch or the weights are not finite, an operator raises an error, a fault is injected,
        the step has infinities in FP32 too, or FP32 is not supported.
        """
        seen = self.seen
        if not self._comparable or seen.refusal is not None or not math.isfinite(seen.loss):
            return None
        if not self.config.precision.half:  # how far emulated formats may be off is not known
            return None
        if seen.learner != self.parts.learners[0].name:  # its step follows the updates of earlier learners
            return None
        if self._suspicious and (self.exact is None or not self.exact.finite):
            return None
        try:
            fp32 = with_overrides(self.config, "precision=fp32")
            half, wide = (functools.partial(self._built, config) for config in (self.config, fp32))
            return measure_accuracy(half, wide, self.saved_step, seen.learner, seen.loss_scale)
        except (EnvironmentRefused, ConfigError):
            return None
        finally:
            set_matmul_precision(self.config.precision)

    @functools.cached_property
    def exact(self) -> Observation | None:
        """Observation of the same step in FP32 without a loss scale; None if FP32 is not supported."""
        if self.original is not None:
            return self.original.exact
        if not self.config.precision.reduced:
            return self.at_scale(1.0).seen
        try:
            return self.with_overrides("precision=fp32", scale=1.0).seen
        except (EnvironmentRefused, ConfigError):
            return None

    @property
    def fp32_fails(self) -> bool:
        """True if the loss or a gradient of the step is not finite in FP32 either."""
        return self.exact is not None and self.exact.refusal is None and not self.exact.finite

    @functools.cached_property
    def lost(self) -> list[Operation]:
        """Forward operator calls whose FP16 results lose values to underflow, compared with FP32, the worst first."""
        return underflows(self.seen, self.exact) if underflows(self.seen) else []

    @property
    def underflow_matters(self) -> bool:
        """True if values that the forward pass loses to underflow are likely to affect training.

        If outputs agree with FP64 despite the loss, for example because a bias of 1e-6 follows, only losses of
        exponentials and probabilities matter, because these become smaller while a network learns.
        """
        modules = [operation.module for operation in self.lost]
        if self.accuracy is None or self.accuracy.lost_output(modules) is not None:
            return bool(self.lost)
        return any(operation.operator in NEVER_ZERO for operation in self.lost)


def observation_of(seen: tuple[Observation, ...], learner: str) -> Observation:
    """Return the observation of the named learner among those of all learners in a step."""
    return next(observation for observation in seen if observation.learner == learner)


def without_initial_nonfinite(seen: Observation, config: Config) -> Observation:
    """Return an observation without the buffers that are non-finite in a newly built model, such as a mask of -inf.

    They are removed from ``seen.weights``, which lists parameters and buffers that are not finite.
    """
    if not seen.weights:
        return seen
    fresh, _ = build(config, weights=False)
    built = {name for name, buffer in fresh.model.named_buffers() if not bool(buffer.isfinite().all())}
    return replace(seen, weights=tuple(tensor for tensor in seen.weights if tensor.name not in built))
