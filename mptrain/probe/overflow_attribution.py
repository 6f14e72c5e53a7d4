"""Classification of overflows (steps with inf or NaN in their gradients), and the parameters that overflowed.

Dynamic loss scaling overflows by design: at the start, while the scale descends from its first value, and whenever
growth tries a higher one. These overflows are no failures. They are labelled so that the others stand out:

- *calibrating*: no scale has lasted `SETTLED` clean steps in a row yet; or the scale has never grown, so that it is
  still descending from its first value, and none has lasted `DESCENDED` clean steps.
- *growth probe*: after calibration, if the current scale was reached by growth.
- *unexpected*: any other overflow. An overflow that a lower scale cannot fix is always unexpected: the loss itself is
  not finite, or the scale is at its floor (a static scale always is).

A scale that starts at 2^16 may overflow at steps 1, 66 and 81, each time because the gradients are larger than ever
before. A rule that grows after 2,000 clean steps accepts one overflow in 2,000 steps. Until a scale has lasted that
long, an overflow therefore means that the scale is still descending.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mptrain.numerics.formats import FLOAT32
from mptrain.system.records import MAX_TENSORS, Phase

#: Clean steps in a row after which a scale counts as settled, once it has grown.
SETTLED = 50

#: Clean steps in a row after which a scale that never grew counts as settled: the growth interval of
#: `torch.amp.GradScaler`.
DESCENDED = 2000


@dataclass
class OverflowHistory:
    """Record of one learner's overflows and clean steps, from which the next overflow is classified.

    Attributes:
        floor: Lowest loss scale that the scaler can reach.
        consecutive: Current number of overflows in a row; ``clean`` is that of clean steps.
        settled: A scale has lasted `SETTLED` clean steps.
        descended: The descent from the first scale is over: a scale has lasted `DESCENDED` clean steps, or has grown.
        grown: The current scale was reached by growth.
    """

    floor: float = 0.0
    consecutive: int = 0
    clean: int = 0
    settled: bool = False
    descended: bool = False
    grown: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def observe(self, *, overflow: bool, loss: float, scale: float, next_scale: float) -> Phase | None:
        """Add a training step, with its unscaled loss, and return the phase of its overflow; None without overflow."""
        phase: Phase | None = None
        if overflow:
            if not math.isfinite(loss) or scale <= self.floor * (1 + FLOAT32.epsilon):  # scales are rounded to FP32
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
        """Return all fields as plain values by name, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any], floor: float) -> OverflowHistory:
        """Return the history that a checkpoint has saved, with the present scaler's floor."""
        return cls(**{**saved, "floor": floor})


def nonfinite_parameters(names: Sequence[str], norms: Sequence[float]) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Return the number of parameters with non-finite gradients, and name and kind of the first `MAX_TENSORS`.

    ``nan`` means NaN elements or infinities of both signs.
    """
    found = [
        (name, "nan" if math.isnan(norm) else "inf")
        for name, norm in zip(names, norms, strict=True)
        if not math.isfinite(norm)
    ]
    return len(found), tuple(found[:MAX_TENSORS])


def boundary(names: Sequence[str], norms: Sequence[float]) -> tuple[str, str]:
    """Return the modules between which a backward pass ceased to be finite, or two empty names.

    ``names`` are in module order, and the backward pass goes through them from the last to the first. If the gradients
    of all parameters up to one are not finite and those of all later ones are, the modules of these two are returned. A
    norm of -1 stands for no gradient.
    """
    present = [
        (name, math.isfinite(norm)) for name, norm in zip(names, norms, strict=True) if norm >= 0 or norm != norm
    ]
    broken = sum(not finite for _, finite in present)
    if not 0 < broken < len(present) or any(finite for _, finite in present[:broken]):
        return "", ""
    before, after = (present[at][0].rpartition(".")[0] for at in (broken - 1, broken))
    return (before, after) if before != after else ("", "")
