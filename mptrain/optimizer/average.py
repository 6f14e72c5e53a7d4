"""Exponential moving average of weights, which often evaluates better than the weights themselves.

    decay(n) = min(decay, (1 + n) / (10 + n))          n: updates applied so far, this one included
    average <- average + (1 - decay(n)) * (weight - average)

The decay grows, so that the random initial weights leave the average quickly. The rule is that of TensorFlow's
`tf.train.ExponentialMovingAverage` with ``num_updates``. The average is in FP32 and follows the master weights if there
are any. A skipped update does not change the average (except that -0 may become 0). On a CPU the host reads count and
verdict, and one kernel moves the average, with one rounding less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from mptrain.numerics.shards import as_part_of, part, part_for
from mptrain.system.device import in_widest
from mptrain.system.torch_private import foreach_add_, foreach_lerp_, foreach_mul_, foreach_sub

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict
    from mptrain.optimizer.weights import Weights


class WeightAverage:
    """Exponential moving average of one learner's weights; ``decay`` is the largest share that an update keeps."""

    def __init__(self, weights: Weights, decay: float) -> None:
        self._weights = weights
        self._decay = decay
        self._values = {name: part(value).float().clone() for name, value in weights.masters.full_precision().items()}

    def follow(self, updates: Tensor, verdict: Verdict) -> None:
        """Move the average towards the weights after a step that was not skipped, without synchronising.

        ``updates`` is the number of updates applied so far, this one included: int64, shape (1,).
        """
        own = list(self._values.values())
        full = self._weights.masters.full_precision()
        current = [part(full[name]).float() for name in self._values]
        if verdict.known_finite:  # the host judged, so it may also read the count
            count = updates.item()
            foreach_lerp_(own, current, 1.0 - min((1.0 + count) / (10.0 + count), self._decay))
            return
        counted = in_widest(updates)
        kept = ((1.0 + counted) / (10.0 + counted)).clamp_(max=self._decay)
        weight = ((1.0 - kept) * verdict.applied).float()
        change = foreach_sub(current, own)
        foreach_mul_(change, weight.squeeze(0))
        foreach_add_(own, change)

    def values(self) -> dict[str, Tensor]:
        """Return the averaged weights by parameter name, float32; sharded tensors for sharded parameters."""
        like = self._weights.masters.full_precision()
        return {name: as_part_of(value, like[name]) for name, value in self._values.items()}

    def restart(self) -> None:
        """Set the average to the current weights, so that earlier ones no longer count."""
        for name, value in self._weights.masters.full_precision().items():
            self._values[name].copy_(part(value))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load averaged weights from a checkpoint, by parameter name and with the shape of the whole parameters.

        Call it after loading the weights: parameters without an average, frozen when it was saved, start from them.
        """
        like = self._weights.masters.full_precision()
        for name, value in self._values.items():
            value.copy_(part_for(saved[name], like[name]) if name in saved else part(like[name]))
