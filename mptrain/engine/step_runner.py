"""Runner of training steps: all learners' steps on a batch, operator by operator or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mptrain.engine.step import train_step
from mptrain.engine.step_graphs import StepGraphs

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts
    from mptrain.engine.ring import Ring
    from mptrain.engine.step_graphs import Capture
    from mptrain.engine.step_values import StepValues
    from mptrain.probe.probe import Watch
    from mptrain.workloads.base.batch import Batch


class StepRunner:
    """Runner of training steps: runs every learner's step on one batch after another, and records its values.

    With ``capture``, steps become CUDA graphs (`StepGraphs`). ``notes`` are warnings for the user; the caller removes
    them once shown.
    """

    def __init__(self, parts: Parts, rings: Sequence[Ring], capture: Capture | None = None) -> None:
        self._parts, self._rings = parts, tuple(rings)
        self.notes: list[str] = []
        self._graphs = None if capture is None else StepGraphs(parts, capture, self.notes)

    def run(self, batch: Batch, watches: Sequence[Watch | None], *, as_usual: bool = True) -> None:
        """Run one training step of every learner on this rank's prepared part of a batch, and record its values.

        ``as_usual`` says that the step has no injected fault, so that it may be captured or replayed.
        """

        def step(batch: Batch) -> list[StepValues]:
            model, plan = self._parts.model, self._parts.plan
            pairs = zip(self._parts.learners, watches, strict=True)
            return [train_step(learner, model, batch, plan, watch) for learner, watch in pairs]

        usual = as_usual and not any(watches)
        values = step(batch) if self._graphs is None else self._graphs.run(batch, step, as_usual=usual)
        for ring, one in zip(self._rings, values, strict=True):
            ring.record(one)
