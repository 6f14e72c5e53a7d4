"""A step that something is wrong with, which can be done again under other words, or at another loss scale.

What is to be tried on it is the business of `mptrain.campaign.remedies`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mptrain.config.build import build
from mptrain.config.compose import reload
from mptrain.config.trust import fetches
from mptrain.diagnostics.remarkable import underflows
from mptrain.engine.revisit import look, stand_at
from mptrain.errors import ConfigError, EnvironmentRefused
from mptrain.precision.apply import set_products

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.diagnostics.findings import Cause
    from mptrain.diagnostics.observation import Observation
    from mptrain.diagnostics.observer import Operation
    from mptrain.engine.job import Parts
    from mptrain.engine.learner import Learner
    from mptrain.engine.revisit import Moment


@dataclass(frozen=True)
class Case:
    """A step that something is wrong with.

    Attributes:
        config: It was done under.
        parts: Built from that, and brought to the moment.
        moment: The step.
        seen: What was seen of it.
        cause: What is wrong.
        ended: It ended its run, because of the refused steps in a row.
        ceiling: The lowest loss scale at which the run overflowed on record; infinite where there was none.
    """

    config: Config
    parts: Parts
    moment: Moment
    seen: Observation
    cause: Cause
    ended: bool = False
    ceiling: float = math.inf

    def again(self, *words: str, scale: float | None = None) -> Observation:
        """The same step under other words.

        Args:
            words: As on the command line. Another precision brings its own scaler, and with it its first scale.
            scale: The loss scale of all learners, in place of that.

        Raises:
            EnvironmentRefused: This device cannot do that.
            ConfigError: The words do not fit the configuration.
        """
        config = reload(self.config.yaml, words, allow=self.config.extensions.allow, fetch=fetches(self.config))
        parts, _ = build(config, weights=False, micro_batches=self.parts.plan.accumulate)
        stand_at(parts, self.moment)
        scales = None
        if scale is not None:
            scales = {learner.name: scale for learner in parts.learners}
        elif any(word.startswith("precision=") for word in words):
            scales = {one.name: float(one.scaler.initial(parts.device)["scale"]) for one in parts.learners}
        return of_learner(look(parts, self.moment, scales), self.seen.learner)

    def at_scale(self, scale: float) -> Observation:
        """The same step at another loss scale of the learner whose step it is."""
        set_products(self.config.precision)  # what was built in between may have chosen others, for the whole process
        scales = {**self.moment.scales, self.seen.learner: scale}
        return of_learner(look(self.parts, self.moment, scales), self.seen.learner)

    @property
    def learner(self) -> Learner:
        """That whose step it is."""
        return next(learner for learner in self.parts.learners if learner.name == self.seen.learner)

    @cached_property
    def exact(self) -> Observation | None:
        """The same step in FP32 without a loss scale; None where that cannot be had."""
        if not self.config.precision.half:
            return self.at_scale(1.0)
        try:
            return self.again("precision=fp32", scale=1.0)
        except (EnvironmentRefused, ConfigError):
            return None

    @cached_property
    def lost(self) -> list[Operation]:
        """The operators of the forward pass that lose to underflow what FP32 has, the worst first."""
        return underflows(self.seen, self.exact) if underflows(self.seen) else []


def of_learner(seen: tuple[Observation, ...], learner: str) -> Observation:
    """What was seen of one learner."""
    return next(one for one in seen if one.learner == learner)
