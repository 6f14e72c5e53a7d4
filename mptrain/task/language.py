"""Language modelling: which token comes next. Cross-entropy over tokens, perplexity.

Logits become FP32 before the loss: a sum over thousands of tokens and over a vocabulary overflows FP16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.task.base import Objective, Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from mptrain.dataset.batch import Batch


@dataclass(frozen=True)
class Language(Task):
    """The next token, at every place of a window of text.

    The model is called with a batch's inputs and, by name, with what else the batch carries: the lane of each sample
    and whether it begins anew, where state is carried from batch to batch.

    Attributes:
        vocabulary_size: How many tokens there are.
        label_smoothing: Share of the target's probability that is spread over all tokens while training (0.1 in
            Vaswani et al. 2017, section 5.4). What is measured is the plain loss.
    """

    vocabulary_size: PositiveInt
    label_smoothing: BelowOneOrZero = 0.0

    metric = "perplexity"
    higher_is_better = False
    term = "tokens"

    def objectives(self) -> tuple[Objective, ...]:
        """One loss for all parameters."""
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the logits over all tokens; float32 scalar."""
        logits, targets = self._answers(model, batch)
        return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Summed loss, and the count of tokens that were the best guess."""
        logits, targets = self._answers(model, batch)
        return {
            "loss": F.cross_entropy(logits, targets, reduction="sum").double(),
            "top1": (logits.argmax(1) == targets).sum(dtype=torch.float64),
        }

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Mean loss in nats a token, its exponential, and the fraction of tokens guessed."""
        loss = sums["loss"] / terms
        try:
            perplexity = math.exp(loss)
        except OverflowError:  # above 709 nats
            perplexity = math.inf
        return {"loss": loss, "perplexity": perplexity, "top1": sums["top1"] / terms}

    def _answers(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits float32 ``[N * T, V]`` and targets ``[N * T]``."""
        logits = model(batch.inputs, **batch.more)
        return logits.float().flatten(0, 1), batch.targets.flatten()
