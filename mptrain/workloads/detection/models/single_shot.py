"""Single-shot detectors: a trunk with several feature maps, a head on each, and default boxes that never change.

Importing this imports torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDFeatureExtractorVGG, SSDHead

from mptrain.workloads.detection.models.multibox import detections, multibox_losses


class SingleShot(nn.Module):
    """SSD (Liu et al. 2016), for images of one size.

    Its parts have the names that torchvision's SSD gives them, so weights of one fit the other.

    Args:
        backbone: From images to feature maps by name; float, any dtype.
        generator: Says the default boxes of each map.
        num_classes: How many classes there are besides the background.
        in_channels: Channels of an image.
        image_size: Side of an image in pixels.
    """

    anchor_bits: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        generator: DefaultBoxGenerator,
        num_classes: int,
        *,
        in_channels: int,
        image_size: int,
    ) -> None:
        super().__init__()
        maps = map_shapes(backbone, in_channels, image_size)
        self.image_size = image_size
        self.backbone = backbone
        widths = [channels for channels, _, _ in maps]
        self.head = SSDHead(widths, generator.num_anchors_per_location(), num_classes + 1)
        boxes = default_boxes(generator, maps, image_size)
        # As the integers of their bits: what casts a model to half precision rounds every buffer of floating-point numbers.
        self.register_buffer("anchor_bits", boxes.view(torch.int32), persistent=False)

    @property
    def anchors(self) -> Tensor:
        """Default boxes in pixels, float32 ``[A, 4]``: left, upper, right, lower."""
        return self.anchor_bits.view(torch.float32)

    def forward(
        self, images: Tensor, boxes: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Losses where the truth is given, else detections; see `mptrain.workloads.detection.task.Detect`.

        Args:
            images: ``[N, C, side, side]``.
            boxes: float32 ``[N, M, 4]``, in pixels.
            labels: Classes from 0, int64 ``[N, M]``; -1 where there is no box.

        Returns:
            ``class_loss`` and ``box_loss``, float32 ``[N]``; or of each image ``boxes``, ``labels`` and ``scores``.
        """
        said = self.head(list(self.backbone(images).values()))
        logits, offsets = said["cls_logits"].float(), said["bbox_regression"].float()
        if boxes is None or labels is None:
            return detections(logits, offsets, self.anchors, self.image_size)
        return multibox_losses(logits, offsets, self.anchors, boxes, labels)


def map_shapes(backbone: nn.Module, in_channels: int, image_size: int) -> list[tuple[int, int, int]]:
    """Channels, height and width of each feature map, found without computing any."""
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    images = torch.empty(2, in_channels, image_size, image_size, device="meta")
    with torch.no_grad():
        features = torch.func.functional_call(backbone, shapes, (images,))
    return [tuple(found.shape[1:]) for found in features.values()]


def default_boxes(generator: DefaultBoxGenerator, maps: list[tuple[int, int, int]], image_size: int) -> Tensor:
    """The default boxes of feature maps of these shapes, in pixels, float32 ``[A, 4]``, on the CPU."""
    with torch.device("cpu"):
        images = ImageList(torch.empty(0, 0, image_size, image_size), [(image_size, image_size)])
        boxes: Tensor = generator(images, [torch.empty(0, *shape) for shape in maps])[0]
        return boxes.contiguous()


class WideNormVGG(SSDFeatureExtractorVGG):  # type: ignore[misc]
    """The trunk of SSD300: VGG-16 to conv4_3, whose features are scaled to length 20 at first, and what follows.

    torchvision divides by a norm of at least 1e-12. In FP16 that is 0, and a place without any activation becomes NaN;
    and squares of activations above 256 overflow. So lengths are FP32 here.
    """

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Six feature maps ``[N, C, H, W]`` by name."""
        features = self.features(images)
        scaled = self.scale_weight.float().view(1, -1, 1, 1) * F.normalize(features.float())
        maps = {"0": scaled.to(features.dtype)}
        for number, block in enumerate(self.extra, start=1):
            features = block(features)
            maps[str(number)] = features
        return maps


class SmallTrunk(nn.Module):
    """Plain 3x3 convolutions with BatchNorm, and feature maps at an eighth, a sixteenth and a 32nd of the image's side.

    Args:
        in_channels: Channels of an image.
        width: Channels at half the side, a quarter of those of the feature maps.
    """

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.stem = nn.Sequential(
            *_convolution(in_channels, width, stride=2),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_convolution(2 * width, wide),
            *_convolution(wide, wide, stride=2),
            *_convolution(wide, wide),
        )
        self.down = nn.ModuleList(nn.Sequential(*_convolution(wide, wide, stride=2)) for _ in range(2))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Three feature maps ``[N, 4 * width, H, W]`` by name."""
        features = self.stem(images)
        maps = {"0": features}
        for number, block in enumerate(self.down, start=1):
            features = block(features)
            maps[str(number)] = features
        return maps


def _convolution(inward: int, outward: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inward, outward, 3, stride=stride, padding=1, bias=False),  # BatchNorm subtracts any bias again
        nn.BatchNorm2d(outward),
        nn.ReLU(),
    ]
