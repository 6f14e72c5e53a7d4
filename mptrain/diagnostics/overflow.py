"""Says what kind of overflow an overflow is, and which tensors it was in.

Dynamic scaling overflows by design: at the start, while the scale comes down to where it belongs, and each time growth
probes a higher one. Those are no failures, and are labelled so that the others can be seen.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mptrain.records import MAX_TENSORS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mptrain.records import Phase

#: Clean steps in a row after which the first scales count as settled.
SETTLED = 50


@dataclass
class OverflowHistory:
    """What has to be remembered of one learner's steps to tell the kinds of overflow apart.

    - *calibrating*: no scale has yet survived `SETTLED` clean steps in a row.
    - *growth probe*: the scale in force was reached by growth.
    - *abnormal*: neither; or one that no lower scale would mend, because the loss itself is not finite or the scale
      cannot fall any more (a static one never can).

    Attributes:
        floor: The lowest scale that the scaler can reach.
        consecutive: Overflowed steps in a row until now.
        clean: Clean steps in a row until now.
        settled: Some scale has survived `SETTLED` clean steps.
        grown: The scale in force was reached by growth.
        counts: Overflows so far by phase.
    """

    floor: float = 0.0
    consecutive: int = 0
    clean: int = 0
    settled: bool = False
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
                phase = "abnormal"
            else:
                phase = "calibrating" if not self.settled else "growth probe" if self.grown else "abnormal"
            self.counts[phase] = self.counts.get(phase, 0) + 1
            self.consecutive += 1
            self.clean = 0
        else:
            self.consecutive = 0
            self.clean += 1
            self.settled = self.settled or self.clean >= SETTLED
        if next_scale != scale:
            self.grown = next_scale > scale
        return phase

    def state_dict(self) -> dict[str, Any]:
        """All fields, plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any], floor: float) -> OverflowHistory:
        """The history that `state_dict` described, under the floor of the present scaler."""
        return cls(**{**saved, "floor": floor})


def offenders(names: Sequence[str], norms: Sequence[float]) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Which parameters had non-finite gradients.

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
