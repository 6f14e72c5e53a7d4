"""Auxiliary head of Inception v3 for images of any size. Importing this module imports torchvision."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from torchvision.models.inception import InceptionAux

_PUBLISHED_SIDE = 17  # side of the head's feature map at 299 pixels


class FittingAux(InceptionAux):  # type: ignore[misc]
    """Auxiliary classification head of Inception v3 that first enlarges feature maps that are too small for it.

    The 5x5 pool with stride 3 and the 5x5 convolution of torchvision's published head need a map of 17x17. A smaller
    map, from images below about 290 pixels, is enlarged to this size by nearest-neighbour interpolation. At the
    published size the head is unchanged.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Classify intermediate feature maps, enlarged to 17x17 if they are smaller.

        Args:
            features: Feature maps ``[N, 768, H, W]`` of an inner block of Inception v3.

        Returns:
            Logits ``[N, classes]``, for the auxiliary loss.
        """
        if features.shape[-1] < _PUBLISHED_SIDE:
            features = F.interpolate(features, size=(_PUBLISHED_SIDE, _PUBLISHED_SIDE), mode="nearest")
        logits: Tensor = super().forward(features)
        return logits
