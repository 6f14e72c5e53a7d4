"""Train a model and a data set of your own: classes of this file, which two YAML files in configs/ name.

`PYTHONPATH` lets mptrain find this file, and `extensions.allow` permits to call what is in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset, random_split


class Net(nn.Module):
    """A small network; the data set gives `num_classes` and `in_channels`, and configs/model/net.yaml gives `width`."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [N, num_classes] for images [N, C, H, W]."""
        return self.head(self.conv(images).relu().amax((2, 3)))


def parity(split_seed: int) -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Return train, val and test of the handwritten digits, with the classes even (0) and odd (1)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8], 0 to 1
    samples = TensorDataset(images, torch.tensor(digits.target) % 2)
    return random_split(samples, [0.7, 0.1, 0.2], torch.Generator().manual_seed(split_seed))


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    allowed = ["--config-dir", str(here / "configs"), "extensions.allow=[own_parts.*]"]
    words = [*allowed, "model=net", "dataset=parity", "precision=amp_bf16", "train.epochs=3"]
    path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    subprocess.run([sys.executable, "-m", "mptrain", *words], check=True, env={**os.environ, "PYTHONPATH": path})
