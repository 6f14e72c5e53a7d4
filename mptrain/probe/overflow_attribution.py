"""Tells the kinds of overflow apart, and names the tensors that overflowed.

Dynamic scaling overflows by design: at the start, while the scale descends from its first value to where it belongs, and each
time growth probes a higher one. Those are no failures, and are labelled so that the others can be seen. The rule:

- *calibrating*: no scale has lasted `SETTLED` clean steps in a row yet; or the scale has never grown, so that it is still on
  its way down from the first one, and none has lasted `DESCENDED` clean steps.
- *growth probe*: after that, and the scale in force was reached by growth.
- *unexpected*: any other. So is, at any time, an overflow that a lower scale would not fix: the loss itself is not finite,
  or the scale is at its floor (a static one always is).

A scale that starts at 2^16 may overflow at step 1, at step 66 and at step 81, each time a step after which the gradients are larger
than ever before. A rule that grows after 2,000 clean steps accepts one overflow in 2,000 steps; so until a scale has
lasted as long, each overflow says that it has not come down far enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mptrain.records import MAX_TENSORS, Phase

#: Clean steps in a row after which a scale counts as settled, once it has grown.
SETTLED = 50

#: Clean steps in a row after which a scale that never grew counts as settled: the growth interval of `torch.amp.GradScaler`.
DESCENDED = 2000


@dataclass
class OverflowHistory:
    """State that tells the kinds of one learner's overflows apart; the rule is in the module's docstring.

    Attributes:
        floor: The lowest scale that the scaler can reach.
        consecutive: Overflowed steps in a row until now.
        clean: Clean steps in a row until now.
        settled: A scale has lasted `SETTLED` clean steps.
        descended: A scale has lasted `DESCENDED` clean steps, or has grown: the descent from the first scale is over.
        grown: The scale in force was reached by growth.
        counts: Overflows so far by phase.
    """

    floor: float = 0.0
    consecutive: int = 0
    clean: int = 0
    settled: bool = False
    descended: bool = False
    grown: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def observe(self, *, overflow: bool, loss: float, scale: float, next_scale: float) -> Phase | None:
        """Take in one step.

        Args:
            overflow: A gradient was not finite.
            loss: The unscaled loss.
            scale: The scale in force.
            next_scale: That of the next step.

        Returns:
            The phase of its overflow; None for a clean step.
        """
        phase: Phase | None = None
        if overflow:
            if not math.isfinite(loss) or scale <= self.floor:
                phase = "unexpected"
            else:
                calibrated = self.settled and self.descended
                phase = "calibrating" if not calibrated else "growth probe" if self.grown else "unexpected"
            self.counts[phase] = self.counts.get(phase, 0) + 1
            self.consecutive += 1
            self.clean = 0
        else:
            self.consecutive = 0
            self.clean += 1
            self.settled = self.settled or self.clean >= SETTLED
            self.descended = self.descended or self.clean >= DESCENDED
        if next_scale != scale:
            self.grown = next_scale > scale
            self.descended = self.descended or self.grown
        return phase

    def state_dict(self) -> dict[str, Any]:
        """All fields, plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any], floor: float) -> OverflowHistory:
        """The history that `state_dict` described, under the floor of the present scaler."""
        return cls(**{**saved, "floor": floor})


def nonfinite_parameters(names: Sequence[str], norms: Sequence[float]) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Return the parameters with non-finite gradients.

    Args:
        names: P parameter names.
        norms: P gradient norms; inf means inf elements, NaN means NaN elements (or inf of both, which no norm tells).

    Returns:
        How many there were, and name and kind of the first `MAX_TENSORS` of them.
    """
    found = [
        (name, "nan" if math.isnan(norm) else "inf")
        for name, norm in zip(names, norms, strict=True)
        if not math.isfinite(norm)
    ]
    return len(found), tuple(found[:MAX_TENSORS])
