"""Auxiliary head of Inception v3 for images of any size. Importing this module imports torchvision."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from torchvision.models.inception import InceptionAux
from typing_extensions import override

_PUBLISHED_SIDE = 17  # side of the head's feature map at 299 pixels


class FittingAux(InceptionAux):  # type: ignore[misc]
    """Auxiliary head of Inception v3 that first enlarges feature maps ``[N, 768, H, W]`` that are too small for it.

    The 5x5 pool with stride 3 and the 5x5 convolution of torchvision's published head need a map of 17x17. A smaller
    map, from images below about 290 pixels, is enlarged to this size by nearest-neighbour interpolation. At the
    published size the head is unchanged.
    """

    @override
    def forward(self, features: Tensor) -> Tensor:
        if features.shape[-1] < _PUBLISHED_SIDE:
            features = F.interpolate(features, size=(_PUBLISHED_SIDE, _PUBLISHED_SIDE), mode="nearest")
        logits: Tensor = super().forward(features)
        return logits
