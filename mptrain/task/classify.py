"""Classification: one class per sample, cross-entropy, top-1 and top-5 accuracy.

Logits become FP32 before the loss: FP16 logits summed up over a batch overflow at 65504.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mptrain.fields import BelowOneOrZero, NonNegativeFloat, PositiveInt
from mptrain.task.base import Objective, Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from mptrain.dataset.batch import Batch


@dataclass(frozen=True)
class Classify(Task):
    """One class per sample.

    Attributes:
        num_classes: How many classes there are.
        aux_weight: Weight of the loss of each auxiliary head (0.3 in GoogLeNet, Szegedy et al. 2014).
        label_smoothing: Share of the target's probability that is spread over all classes while training (0.1 in
            Inception v3, Szegedy et al. 2015, section 7). What is measured is the plain loss.
    """

    num_classes: PositiveInt
    aux_weight: NonNegativeFloat = 0.3
    label_smoothing: BelowOneOrZero = 0.0

    metric = "top1"
    higher_is_better = True

    def objectives(self) -> tuple[Objective, ...]:
        """One loss for all parameters."""
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the logits and, weighted, of each auxiliary head's; float32 scalar."""
        output = model(batch.inputs)
        logits, *auxiliary = output if isinstance(output, tuple) else (output,)
        loss = self._cross_entropy(logits, batch.targets)
        for extra in auxiliary:
            if extra is not None:
                loss = loss + self.aux_weight * self._cross_entropy(extra, batch.targets)
        return loss

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Summed loss, and counts of samples whose class is the best and among the five best guesses."""
        output = model(batch.inputs)
        logits = (output[0] if isinstance(output, tuple) else output).float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.targets.unsqueeze(1)
        return {
            "loss": F.cross_entropy(logits, batch.targets, reduction="sum").double(),
            "top1": best[:, 0].sum(dtype=torch.float64),
            "top5": best.sum(dtype=torch.float64),
        }

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Mean loss in nats and accuracies as fractions."""
        return {name: total / terms for name, total in sums.items()}
