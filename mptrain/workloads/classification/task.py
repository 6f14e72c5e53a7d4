"""Classification task: cross-entropy, optional mixup, and top-1 and (for more than five classes) top-5 accuracy.

And that of several labels of each sample: binary cross-entropy, macro F1 and mean average precision.

Logits are cast to FP32 before the loss, because sums of FP16 logits over a batch overflow at 65504. Mixed targets are
FP32, and images are mixed in FP32 before they are rounded.

`train_classifier` makes a small classifier of a data set on demand, to evaluate generative models; it is no run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import in_widest, widest
from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, NonNegativeFloat, PositiveInt
from mptrain.system.process_state import other_random_numbers
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.dataset import Dataset
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.task import OneNetworkTask, OutputsTask, Table
from mptrain.workloads.classification.models.convnet import cnn


@dataclass(frozen=True)
class Classify(OneNetworkTask):
    """Image classification task: cross-entropy loss and accuracy, for one class per sample.

    Attributes:
        class_names: Names of the classes in predictions; if empty, their indices.
        aux_weight: Weight of the loss of each auxiliary head (0.3 in GoogLeNet, Szegedy et al. 2014).
        label_smoothing: Fraction of the target's probability that is spread over all classes in training (0.1 in
            Inception v3, Szegedy et al. 2015, section 7). Evaluation uses the plain loss.
        mixup: Parameter of the Beta distribution for mixup (Zhang et al. 2018, who use 0.1 to 0.4 on ImageNet); 0
            disables it. Training then uses mixtures ``k x + (1 - k) y`` of two images of a micro-batch and of their
            targets, with k drawn from Beta(mixup, mixup): for each image, unlike in the paper, so that its distribution
            does not depend on the split into micro-batches. A micro-batch of one image is not mixed.
    """

    num_classes: PositiveInt
    class_names: tuple[str, ...] = ()
    aux_weight: NonNegativeFloat = 0.3
    label_smoothing: BelowOneOrZero = 0.0
    mixup: NonNegativeFloat = 0.0

    metric = "top1"
    higher_is_better = True
    shares = ("top1", "top5")
    refuses = ("boxes", "target_mean", "label_counts")  # targets [N, K] of a data set that also names classes

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a micro-batch plus weighted auxiliary losses, after mixup and smoothing.

        The network returns logits ``[N, num_classes]``, or a tuple of these and those of its auxiliary heads.
        """
        if self.mixup > 0:
            if not batch.inputs.is_floating_point():
                raise ConfigError(f"task.mixup={self.mixup}: token numbers cannot be mixed", "set task.mixup=0")
            batch = mixed(batch, self.num_classes, self.mixup)
        output = model(batch.inputs)
        logits, *auxiliary = output if isinstance(output, tuple) else (output,)
        if logits.dim() > 1 and logits.shape[1] < self.num_classes:
            raise ConfigError(
                f"{type(model).__name__} returns {logits.shape[1]} outputs, and the data have {self.num_classes} "
                f"classes, 0 to {self.num_classes - 1}",
                "give its last layer num_classes outputs; targets count from 0: if yours count from 1, subtract 1",
            )
        loss = self._cross_entropy(logits, batch.targets)
        for extra in auxiliary:
            if extra is not None:
                loss = loss + self.aux_weight * self._cross_entropy(extra, batch.targets)
        return loss

    @override
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the ``loss`` in nats and the hits (0 or 1) ``top1`` and, for more than five classes, ``top5``."""
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

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the ``class``, its ``probability``, and ``top``: up to five classes with theirs, most probable first.

        The class of an output that is not finite is None.
        """
        output = model(batch.inputs)
        logits = (output[0] if isinstance(output, tuple) else output).float()
        values, indices = (part.tolist() for part in logits.softmax(1).topk(min(5, logits.shape[1]), dim=1))
        names = (*self.class_names, *map(str, range(len(self.class_names), logits.shape[1])))  # of more outputs too
        answers: list[dict[str, Any]] = []
        for shares, classes in zip(values, indices, strict=True):
            if not math.isfinite(shares[0]):
                answers.append({"class": None, "probability": math.nan, "top": []})
                continue
            top = [(names[number], share) for number, share in zip(classes, shares, strict=True)]
            answers.append({"class": top[0][0], "probability": top[0][1], "top": top})
        return answers

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class MultiLabel(OutputsTask):
    """Task of K labels, each of which a sample has or has not: binary cross-entropy of logits in FP32, their mean.

    The best checkpoint is that of ``map``, which ranks samples: as long as no probability of a rare label reaches a
    half, ``macro_f1`` is 0 and cannot tell one checkpoint from another.

    Attributes:
        label_counts: Numbers of training samples with each label, which only data sets of labels know.
    """

    label_counts: tuple[int, ...]

    metric = "map"
    higher_is_better = True

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    @override
    def score_of(self, outputs: Table, targets: Table) -> dict[str, float]:
        """Return ``macro_f1`` of the labels with a probability of a half or more, and ``map``, as scikit-learn does.

        The F1 of a label that no sample has and none is given is 0. ``map``, the mean average precision, is over the
        labels that a sample has; it is NaN without any. Both are NaN if an output is.
        """
        if np.isnan(outputs).any():
            return {"macro_f1": math.nan, "map": math.nan}
        predicted, positives = outputs >= 0, targets.sum(0)
        f1 = 2 * (predicted * targets).sum(0) / np.maximum(predicted.sum(0) + positives, 1)
        precision = average_precision(outputs[:, positives > 0], targets[:, positives > 0])
        return {"macro_f1": float(f1.mean()), "map": float(precision.mean()) if len(precision) else math.nan}

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the ``labels`` with a probability of a half or more, and the ``probabilities`` of all by name."""
        rows = [dict(zip(self.names, row, strict=True)) for row in self.outputs(model, batch).sigmoid().tolist()]
        return [{"labels": [name for name in row if row[name] >= 0.5], "probabilities": row} for row in rows]


def average_precision(scores: Table, targets: Table) -> Table:
    """Return the average precision of each label, float64 ``[K]``, from scores and targets 0 or 1, both ``[N, K]``.

    It is the mean over a label's samples of the precision among those with their score or a higher one.
    """
    order = np.argsort(-scores, axis=0, kind="stable")
    scores, targets = np.take_along_axis(scores, order, 0), np.take_along_axis(targets, order, 0)
    ranks = np.arange(len(scores))[:, None]
    last = np.where(scores != np.roll(scores, -1, 0), ranks, len(scores) - 1)
    last = np.minimum.accumulate(last[::-1], 0)[::-1]  # of the samples with the same score
    hits = np.take_along_axis(targets.cumsum(0), last, 0)
    return np.asarray((targets * hits / (last + 1)).sum(0) / targets.sum(0), dtype=np.float64)


def mixed(batch: Batch, num_classes: int, alpha: float) -> Batch:
    """Mix each image with another image of its batch, and their targets likewise (mixup, Zhang et al. 2018).

    Inputs, floating-point ``[N, ...]``, keep their dtype; class indices become targets float32 ``[N, num_classes]``,
    whose rows sum to 1. ``alpha`` is both parameters of the Beta distribution of the mixing weight; smaller values mix
    less. Random numbers come from torch's default generator on the device, and the host reads no values.
    """
    device, samples = batch.inputs.device, batch.samples
    shape = torch.full((samples,), alpha, device=device)
    # Validating the arguments would read them on the host.
    share = torch.distributions.Beta(shape, shape, validate_args=False).sample()
    partner = torch.randperm(samples, device=device)
    classes = torch.zeros(samples, num_classes, device=device).scatter_(1, batch.targets.unsqueeze(1), 1.0)
    wide = batch.inputs.to(torch.promote_types(batch.inputs.dtype, torch.float32))
    inputs = _between(wide, wide[partner], share).to(batch.inputs.dtype)
    return replace(batch, inputs=inputs, targets=_between(classes, classes[partner], share))


def _between(first: Tensor, other: Tensor, share: Tensor) -> Tensor:
    share = share.view(-1, *(1,) * (first.dim() - 1))
    return first * share + other * (1.0 - share)


#: Epochs, limit of training samples per epoch, batch size, and initial learning rate, which decays linearly to zero.
EPOCHS, SAMPLES, BATCH, RATE = 4, 10_000, 64, 0.003

_SEED = 0  # the same for all runs, so that all are evaluated by the same classifier


def train_classifier(dataset: Dataset, device: torch.device) -> nn.Module:
    """Train a small convolutional classifier (`cnn`) on the training split of a data set, in FP32 with Adam.

    It evaluates other models, such as the images of a GAN, and is returned in evaluation mode; its inputs are batches
    prepared by ``dataset``. The weights depend on the data and the machine only. The states of the random number
    generators are restored, so this can be called in the middle of a run, also during an evaluation.
    """
    facts = dataset.facts()
    with other_random_numbers(device, _SEED), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        model = cnn(num_classes=facts["num_classes"], in_channels=facts["in_channels"]).to(device).train()
        loader = Loader(dataset.train, BATCH, _SEED, shuffle=True)
        steps = min(loader.steps_per_epoch, SAMPLES // BATCH)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, EPOCHS * steps)
        for epoch in range(EPOCHS):
            for batch, _ in zip(loader.batches(epoch), range(steps), strict=False):
                prepared = dataset.prepare(batch, device, torch.contiguous_format)
                if prepared.samples > 1:  # BatchNorm cannot normalise a single sample of one pixel
                    optimizer.zero_grad()
                    F.cross_entropy(model(prepared.inputs), prepared.targets).backward()
                    optimizer.step()
                    decay.step()
    return model.eval()
