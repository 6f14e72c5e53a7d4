"""An auxiliary head for Inception v3 that also fits small images. Importing this imports torchvision."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from torchvision.models.inception import InceptionAux

_PUBLISHED_SIDE = 17  # of the feature map that the head sees when images have 299 pixels


class FittingAux(InceptionAux):  # type: ignore[misc]
    """The published head, except that a feature map too small for it is enlarged first.

    Its 5x5 pool with stride 3 and 5x5 convolution need a map of 17x17. A smaller one, from images below about
    290 pixels, is enlarged to that by repeating its values; at the published size nothing differs.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[N, classes]`` from features ``[N, 768, H, W]``."""
        if features.shape[-1] < _PUBLISHED_SIDE:
            features = F.interpolate(features, size=(_PUBLISHED_SIDE, _PUBLISHED_SIDE), mode="nearest")
        logits: Tensor = super().forward(features)
        return logits
