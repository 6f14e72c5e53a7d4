"""How a good picture becomes a bad one: on the device, in FP32, from what the host has drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from mptrain.workloads.base.random_streams import normals

Kind = Literal["downsample", "noise"]


@dataclass(frozen=True)
class Degradation:
    """What is done to pictures, and is to be undone.

    Attributes:
        kind: ``downsample`` or ``noise``.
        factor: How many times smaller a downsampled picture is.
        sigma: Standard deviation of Gaussian noise, of 255.
    """

    kind: Kind
    factor: int
    sigma: float

    @property
    def upscale(self) -> int:
        """How many times larger the good picture is than the bad one."""
        return self.factor if self.kind == "downsample" else 1

    def apply(self, pictures: Tensor, words: Tensor) -> Tensor:
        """The bad pictures.

        Downsampling is bicubic with antialiasing, as Pillow's and MATLAB's is, and rounds to 8 bits, as a
        file would. Noise is neither rounded nor clipped, as in Zhang et al. 2017.

        Args:
            pictures: float32 ``[N, C, H, W]`` from 0 to 1, sides multiples of ``factor``.
            words: What `mptrain.workloads.base.random_streams.keys` gave for each, int64 ``[N]``.

        Returns:
            float32, ``[N, C, H / upscale, W / upscale]``.
        """
        if self.kind == "noise":
            drawn = normals(words, pictures[0].numel()).view(pictures.shape)
            return pictures + drawn * (self.sigma / 255)
        if self.factor == 1:
            return pictures
        size = (pictures.shape[-2] // self.factor, pictures.shape[-1] // self.factor)
        small = F.interpolate(pictures, size=size, mode="bicubic", antialias=True)
        return (small * 255).round().clamp(0, 255) / 255

    def card(self) -> dict[str, Any]:
        """What is done, as JSON values."""
        if self.kind == "noise":
            return {"kind": "noise", "sigma": self.sigma, "range": 255}
        return {"kind": "downsample", "factor": self.factor, "mode": "bicubic", "antialias": True, "bits": 8}
