"""The shipped precision modes, read from their files, and networks small enough to try each of them on."""

from __future__ import annotations

import typing
from pathlib import Path

import torch
import yaml
from torch import nn

from mptrain.precision.policy import Policy

FOLDER = Path(__file__).parents[2] / "configs" / "precision"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def mode(name: str, **changed) -> Policy:
    """A shipped mode, with some of its facts changed."""
    facts = {**yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["precision"], **changed}
    assert facts.keys() <= typing.get_type_hints(Policy).keys()
    return Policy(**{**facts, "keep_fp32": tuple(facts["keep_fp32"])})


class Named(nn.Sequential):
    """Convolutions, normalisations with and without statistics, and a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Identity(),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.GroupNorm(2, 8),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(32),
            nn.Linear(32, 5),
        )


def images(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
