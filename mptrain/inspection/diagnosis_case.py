"""A step that something may be wrong with, which can be done again under other words, or at another loss scale.

What is to be tried on it is the business of `mptrain.inspection.remedies`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from mptrain.config.build import build
from mptrain.config.compose import reload
from mptrain.config.schema import Config
from mptrain.config.trust import allowed_downloads
from mptrain.engine.parts import Parts
from mptrain.engine.step import Learner
from mptrain.errors import ConfigError, EnvironmentRefused
from mptrain.inspection.findings import Finding, compare_with_fp32, find_causes, inexact, no_fault
from mptrain.inspection.observations import NEVER_ZERO, underflows
from mptrain.inspection.step_accuracy import StepAccuracy, measure_accuracy
from mptrain.inspection.step_replay import SavedStep, observe_step, restore_step
from mptrain.precision.apply import set_matmul_precision
from mptrain.probe.observer import Observation, Operation


def with_overrides(config: Config, *words: str) -> Config:
    """Return a configuration under other words, with the code that was let in.

    Raises:
        ConfigError: The words do not fit it.
    """
    return reload(config.yaml, words, allow=config.extensions.allow, fetch=allowed_downloads(config))


@dataclass(frozen=True)
class DiagnosisCase:
    """A step that something may be wrong with.

    Attributes:
        config: It was done under.
        parts: Built from that, and brought to the moment.
        saved_step: The step.
        seen: What was seen of it.
        ended: It ended its run, because of the refused steps in a row.
        ceiling: The lowest loss scale at which the run overflowed on record; infinite where there was none.
        faulted: A fault is put into it on purpose, so it cannot be compared with the same step in FP32.
        original: The case that this one is under other words, or at another scale; None where it is none.
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
        """The same step under other words.

        Args:
            words: As on the command line. Another precision brings its own scaler, and with it its first scale.
            scale: The loss scale of all learners, in place of that.

        Raises:
            EnvironmentRefused: This device cannot do that.
            ConfigError: The words do not fit the configuration.
        """
        config = with_overrides(self.config, *words)
        parts = self._built(config)
        scales = dict(self.saved_step.scales)
        if scale is not None:
            scales = {learner.name: scale for learner in parts.learners}
        elif any(word.startswith("precision=") for word in words):
            scales = {one.name: float(one.scaler.initial(parts.device)["scale"]) for one in parts.learners}
        return self._another(config, parts, scales)

    def at_scale(self, scale: float) -> DiagnosisCase:
        """The same step at another loss scale of the learner whose step it is."""
        set_matmul_precision(
            self.config.precision
        )  # what was built in between may have chosen others, for the whole process
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

    @property
    def learner(self) -> Learner:
        """That whose step it is."""
        return next(learner for learner in self.parts.learners if learner.name == self.seen.learner)

    @functools.cached_property
    def causes(self) -> tuple[Finding, ...]:
        """Return all causes that follow from no other one; none where the step is right.

        A step in half precision is right where it is finite and agrees with the same step in FP32.
        """
        exact = self.exact if self._comparable and self._suspicious else None
        if not self.config.precision.half and not self.faulted:
            exact = self.seen  # FP32 is what all else is compared with
        causes = find_causes(self.seen, exact)
        return compare_with_fp32(self.seen, causes, self.accuracy, self.lost) if self.accuracy is not None else causes

    @property
    def cause(self) -> Finding:
        """The first of them; one of kind ``no_fault`` where there is none."""
        return next(iter(self.causes), no_fault(self.seen, self.accuracy))

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is wrong."""
        return self.seen.finite and not self.causes

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what is no fault and worth knowing: infinities of the forward pass that change nothing, inexact gradients."""
        if not self.seen.finite or not self.is_sound:
            return ()
        agree = "; outputs and gradients agree with those of FP32" if self.accuracy is not None else ""
        infinite = [f"{one.what}{agree}" for one in find_causes(self.seen)]
        return (*infinite, *(inexact(self.seen, self.accuracy) if self.accuracy is not None else ()))

    @property
    def _suspicious(self) -> bool:
        return not self.seen.finite or any(operation.breaks for operation in self.seen.of("forward"))

    @property
    def _comparable(self) -> bool:
        seen = self.seen
        return self.config.precision.half and not (self.faulted or seen.inputs or seen.weights)

    @functools.cached_property
    def accuracy(self) -> StepAccuracy | None:
        """Return the distance of the step from FP64; None where there is nothing to compare with.

        That is where its loss or that of FP32 is not finite, where FP32 cannot be had, and for the later of several learners.
        """
        seen = self.seen
        if not self._comparable or seen.refusal is not None or not math.isfinite(seen.loss):
            return None
        if seen.learner != self.parts.learners[0].name:  # whose step is behind the updates of the others
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
        """The same step in FP32 without a loss scale; None where that cannot be had."""
        if self.original is not None:
            return self.original.exact
        if not self.config.precision.half:
            return self.at_scale(1.0).seen
        try:
            return self.with_overrides("precision=fp32", scale=1.0).seen
        except (EnvironmentRefused, ConfigError):
            return None

    @property
    def fp32_fails(self) -> bool:
        """Return whether FP32 is not finite either."""
        return self.exact is not None and self.exact.refusal is None and not self.exact.finite

    @functools.cached_property
    def lost(self) -> list[Operation]:
        """The operators of the forward pass that lose to underflow what FP32 has, the worst first."""
        return underflows(self.seen, self.exact) if underflows(self.seen) else []

    @property
    def underflow_matters(self) -> bool:
        """Return whether values that are lost are missed.

        Where outputs agree with FP64 all the same, as behind a bias of 1e-6, those of exponentials and shares are, which get smaller
        while a network learns.
        """
        modules = [operation.module for operation in self.lost]
        if self.accuracy is None or self.accuracy.lost_output(modules) is not None:
            return bool(self.lost)
        return any(operation.operator in NEVER_ZERO for operation in self.lost)


def observation_of(seen: tuple[Observation, ...], learner: str) -> Observation:
    """Return the observation of one learner."""
    return next(one for one in seen if one.learner == learner)


def without_initial_nonfinite(seen: Observation, config: Config) -> Observation:
    """Return what was seen without those buffers that are not finite from the beginning, such as a mask of -inf.

    Args:
        seen: A step.
        config: It was done under.
    """
    if not seen.weights:
        return seen
    fresh, _ = build(config, weights=False)
    built = {name for name, one in fresh.model.named_buffers() if not bool(one.isfinite().all())}
    return replace(seen, weights=tuple(one for one in seen.weights if one.name not in built))
