"""Small classifier of a data set, trained on demand to evaluate generative models. It is never part of a run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mptrain.system.process_state import other_random_numbers
from mptrain.workloads.base.dataset import Dataset
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.classification.models.convnet import cnn

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
