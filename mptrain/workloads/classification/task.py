"""Classification: one class per sample, cross-entropy, top-1 and, of more than five classes, top-5 accuracy; mixup in training where asked for.

Logits become FP32 before the loss: FP16 logits summed up over a batch overflow at 65504. Mixed targets are FP32, and
images are mixed in FP32 before they are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.device import in_widest, widest
from mptrain.fields import BelowOneOrZero, NonNegativeFloat, PositiveInt
from mptrain.workloads.base.task import Objective, Task

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class Classify(Task):
    """One class per sample.

    Attributes:
        num_classes: How many classes there are.
        aux_weight: Weight of the loss of each auxiliary head (0.3 in GoogLeNet, Szegedy et al. 2014).
        label_smoothing: Share of the target's probability that is spread over all classes while training (0.1 in
            Inception v3, Szegedy et al. 2015, section 7). What is measured is the plain loss.
        mixup: Train on mixtures ``k x + (1 - k) y`` of two images and their targets, where k is drawn from
            Beta(mixup, mixup) (Zhang et al. 2018; 0.1 to 0.4 on ImageNet there); 0 mixes nothing. Unlike theirs, k is
            drawn for each image, so that its distribution is the same however a batch is cut into micro-batches;
            the other image comes from the same micro-batch, so one of a single image is left as it is.
    """

    num_classes: PositiveInt
    aux_weight: NonNegativeFloat = 0.3
    label_smoothing: BelowOneOrZero = 0.0
    mixup: NonNegativeFloat = 0.0

    metric = "top1"
    higher_is_better = True
    shares = ("top1", "top5")
    refuses = ("boxes",)

    def objectives(self) -> tuple[Objective, ...]:
        """One loss for all parameters."""
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the logits and, weighted, of each auxiliary head's; float32 scalar."""
        if self.mixup > 0:
            batch = mixed(batch, self.num_classes, self.mixup)
        output = model(batch.inputs)
        logits, *auxiliary = output if isinstance(output, tuple) else (output,)
        loss = self._cross_entropy(logits, batch.targets)
        for extra in auxiliary:
            if extra is not None:
                loss = loss + self.aux_weight * self._cross_entropy(extra, batch.targets)
        return loss

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of each sample, and 1 where its class is the best or among the five best guesses; float64 ``[N]``.

        Of five classes or fewer each is among the five best, so ``top5`` is left out.
        """
        output = model(batch.inputs)
        logits = (output[0] if isinstance(output, tuple) else output).float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.targets.unsqueeze(1)
        measured = {
            "loss": in_widest(F.cross_entropy(logits, batch.targets, reduction="none")),
            "top1": in_widest(best[:, 0]),
        }
        if self.num_classes > 5:
            measured["top5"] = best.sum(dim=1, dtype=widest(best.device))
        return measured

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Mean loss in nats and accuracies as fractions."""
        return {name: total / terms for name, total in sums.items()}


def mixed(batch: Batch, num_classes: int, alpha: float) -> Batch:
    """Each image mixed with another one of its batch, drawn from torch's default generator on their device.

    Args:
        batch: Floating-point inputs ``[N, ...]`` and class indices int64 ``[N]``.
        num_classes: Length of the targets that come out.
        alpha: Both parameters of the Beta distribution; the smaller, the less is mixed.

    Returns:
        Inputs in the dtype they had, and targets float32 ``[N, num_classes]`` whose rows sum to 1. The host reads nothing.
    """
    device, samples = batch.inputs.device, batch.samples
    shape = torch.full((samples,), alpha, device=device)
    # Checking the arguments would read them on the host.
    share = torch.distributions.Beta(shape, shape, validate_args=False).sample()
    partner = torch.randperm(samples, device=device)
    classes = torch.zeros(samples, num_classes, device=device).scatter_(1, batch.targets.unsqueeze(1), 1.0)
    wide = batch.inputs.to(torch.promote_types(batch.inputs.dtype, torch.float32))
    inputs = _between(wide, wide[partner], share).to(batch.inputs.dtype)
    return replace(batch, inputs=inputs, targets=_between(classes, classes[partner], share))


def _between(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    share = share.view(-1, *(1,) * (one.dim() - 1))
    return one * share + other * (1.0 - share)
