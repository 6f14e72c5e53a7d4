"""A small classifier of a data set, trained when something asks for it: a yardstick, no run, and never part of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from mptrain.random_state import other_random_numbers
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.classification.models.convnet import cnn

if TYPE_CHECKING:
    from mptrain.workloads.base.dataset import Dataset

#: Passes over at most so many of the training samples, at a rate that falls to zero in a straight line.
EPOCHS, SAMPLES, BATCH, RATE = 4, 10_000, 64, 0.003

_SEED = 0  # never a run's own: one that follows the run would be another yardstick for each


def train_classifier(dataset: Dataset, device: torch.device) -> nn.Module:
    """A `cnn` that knows the classes of a data set, trained in FP32 with Adam on the training split.

    Its weights follow from the data and the machine alone. The generators of random numbers are left as they were, so it
    can be made in the middle of a run, in an evaluation too.

    Args:
        dataset: Pictures with class indices; it must say ``num_classes`` and ``in_channels``.
        device: Where it is trained.

    Returns:
        The network, whose inputs are what ``dataset`` prepares.
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
