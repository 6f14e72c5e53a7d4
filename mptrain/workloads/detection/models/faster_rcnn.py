"""Faster R-CNN from torchvision's parts, with box operations in FP32. Importing this module imports torchvision.

Only the backbone and the matrix products of the heads use the model's dtype. Anchors, proposals, ROI coordinates,
ROI interpolation, non-maximum suppression and losses are FP32, because FP16 cannot represent half pixels above 512.

torchvision synchronises with the device several times per image (number of proposals, sampled indices), in training
too. Its lists of varying length make this unavoidable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import faster_rcnn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign
from typing_extensions import override

_SIZES = ((32,), (64,), (128,), (256,), (512,))  # anchor sizes in pixels, one per map (Lin et al. 2017, section 4.1)
_RATIOS = ((0.5, 1.0, 2.0),) * len(_SIZES)
_CHANNELS, _POOLED, _HIDDEN = 256, 7, 1024  # channels of a map, side of a pooled region, width of the box head


class WideAnchors(AnchorGenerator):  # type: ignore[misc]
    """Anchor generator of Faster R-CNN with FP32 anchors for feature maps of any dtype, such as FP16."""

    @override
    def forward(self, images: ImageList, maps: list[Tensor]) -> list[Tensor]:
        """Return for each image the anchors of all maps in pixels, float32 ``[A, 4]``: left, upper, right, lower."""
        shapes = [features.new_empty((0, *features.shape[-2:]), dtype=torch.float32) for features in maps]
        anchors: list[Tensor] = super().forward(images, shapes)
        return anchors


class WideRPNHead(RPNHead):  # type: ignore[misc]
    """Region proposal head of Faster R-CNN with FP32 outputs; its convolutions use the model's dtype."""

    @override
    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return object logits ``[N, A, H, W]`` and offsets ``[N, 4 * A, H, W]`` of each map, for A anchors a place."""
        logits, offsets = super().forward(maps)
        return [level.float() for level in logits], [level.float() for level in offsets]


class WideRoIAlign(MultiScaleRoIAlign):  # type: ignore[misc]
    """RoIAlign on several feature maps that interpolates in FP32 and returns the dtype of the feature maps."""

    @override
    def forward(self, maps: Mapping[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]) -> Tensor:
        """Return features ``[R, C, 7, 7]`` of the R regions of all images."""
        pooled: Tensor = super().forward({name: features.float() for name, features in maps.items()}, boxes, sizes)
        return pooled.to(next(iter(maps.values())).dtype)


class WidePredictor(faster_rcnn.FastRCNNPredictor):  # type: ignore[misc]
    """Output layers of Faster R-CNN for the classes and box offsets of regions, with FP32 outputs."""

    @override
    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[R, 1 + classes]``, those of the background first, and offsets ``[R, 4 * (1 + classes)]``."""
        logits, offsets = super().forward(features)
        return logits.float(), offsets.float()


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm with fixed statistics, gains and biases as buffers, in training mode too; it has no parameters.

    torchvision's class of this name multiplies in the dtype of its buffers, which in FP16 means rounded statistics.
    This class stays in FP32 like every BatchNorm, and torch's kernel accepts half-precision input.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels, eps=eps, affine=False)
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            delattr(self, name)
            self.register_buffer(name, torch.full((channels,), value))
        self.num_batches_tracked = None
        self.track_running_stats = False  # otherwise loading adds num_batches_tracked to old state dicts

    @override
    def forward(self, features: Tensor) -> Tensor:
        return F.batch_norm(features, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class FasterRCNN(nn.Module):
    """Faster R-CNN detector (Ren et al. 2015) on a ResNet-50 feature pyramid (Lin et al. 2017), for images of one size.

    State dicts are compatible with torchvision's network, because the parts have the same names.
    """

    def __init__(self, num_classes: int, *, frozen_norms: bool, trained_stages: int) -> None:
        super().__init__()
        built: Any = faster_rcnn.FasterRCNN(
            resnet_fpn_backbone(
                backbone_name="resnet50",
                weights=None,
                norm_layer=FrozenBatchNorm2d if frozen_norms else nn.BatchNorm2d,
                trainable_layers=trained_stages,
            ),
            rpn_anchor_generator=WideAnchors(_SIZES, _RATIOS),
            rpn_head=WideRPNHead(_CHANNELS, len(_RATIOS[0])),
            box_roi_pool=WideRoIAlign(["0", "1", "2", "3"], _POOLED, sampling_ratio=2),
            box_head=faster_rcnn.TwoMLPHead(_CHANNELS * _POOLED**2, _HIDDEN),
            box_predictor=WidePredictor(_HIDDEN, num_classes + 1),
        )
        self.backbone: nn.Module = built.backbone
        self.rpn: nn.Module = built.rpn
        self.roi_heads: nn.Module = built.roi_heads

    @override
    def forward(
        self, images: Tensor, boxes: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return the training losses of each image if true boxes are given, otherwise the detections in each image.

        The losses are those of torchvision for each image separately: means over 256 sampled anchors and 512 sampled
        regions per image. Sampling uses torch's default generator.
        """
        maps: Mapping[str, Tensor] = self.backbone(images)
        size = (images.shape[2], images.shape[3])
        if boxes is None or labels is None:
            outputs = self._heads(images, maps, [size] * len(images), None)[0]
            return [{**output, "labels": output["labels"] - 1} for output in outputs]
        losses: dict[str, list[Tensor]] = {}
        for number in range(len(images)):
            present = labels[number] >= 0
            truth = {"boxes": boxes[number][present], "labels": labels[number][present] + 1}
            own = {name: features[number : number + 1] for name, features in maps.items()}
            for name, loss in self._heads(images[number : number + 1], own, [size], [truth])[1].items():
                losses.setdefault(name, []).append(loss)
        return {name: torch.stack(values) for name, values in losses.items()}

    def _heads(
        self, images: Tensor, maps: Mapping[str, Tensor], sizes: list[tuple[int, int]], truth: Any
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Return detections and losses. The mode of the heads only selects which of the two they compute."""
        modes = [(head, head.training) for head in (self.rpn, self.roi_heads)]
        for head, _ in modes:
            head.train(truth is not None)
        try:
            proposals, losses = self.rpn(ImageList(images, sizes), maps, truth)
            detections, more = self.roi_heads(maps, proposals, sizes, truth)
        finally:
            for head, mode in modes:
                head.train(mode)
        return detections, {**losses, **more}
