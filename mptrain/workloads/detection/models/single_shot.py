"""Single-shot detectors: a backbone with several feature maps, a head on each map, and fixed default boxes.

After the heads everything is FP32, whatever the dtype of the network: matching default boxes with true boxes, the
MultiBox loss, and decoding to detections. FP16 cannot represent half pixels above 512, and a sum of losses over 8,732
default boxes overflows. The loss reads no values on the host, so a step does not synchronise. `detections` does,
because the number of detections is data-dependent. Importing this module imports torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDFeatureExtractorVGG, SSDHead
from torchvision.ops import batched_nms, box_iou
from typing_extensions import override

from mptrain.system.device import beside_fp64

#: Factors of the offsets: centres, then sizes (the "variances" 0.1 and 0.2 in the code of Liu et al.).
WEIGHTS = (10.0, 10.0, 5.0, 5.0)

#: Minimum overlap of a default box matched to an object (Liu et al. 2016, section 2.2).
MATCHED = 0.5

#: Number of background boxes in the loss per default box matched to an object (section 2.2).
NEGATIVES = 3

#: Largest growth factor of sizes, as in torchvision, because the exponential of a large output would overflow.
_LARGEST = 1000.0 / 16

#: Post-processing of detections: lowest score, IoU threshold of non-maximum suppression, largest number of detections
#: per image (section 3.1), and candidates per class before suppression (400 in the code of Liu et al. and torchvision).
LOWEST_SCORE, OVERLAP, MOST, CANDIDATES = 0.01, 0.45, 200, 400


class SingleShot(nn.Module):
    """SSD detector (Liu et al. 2016): a backbone with several feature maps and a head on each, for images of one size.

    State dicts are compatible with torchvision's SSD, because the parts have the same names.
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
        # Stored as integer bits, because casting a model to half precision rounds all floating-point buffers.
        self.register_buffer("anchor_bits", boxes.view(torch.int32), persistent=False)

    @property
    def anchors(self) -> Tensor:
        """Default boxes (anchors) of all feature maps in pixels, float32 ``[A, 4]``: left, upper, right, lower."""
        return self.anchor_bits.view(torch.float32)

    @override
    def forward(
        self, images: Tensor, boxes: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return ``class_loss`` and ``box_loss`` of each image if true boxes are given, otherwise the detections."""
        outputs = self.head(list(self.backbone(images).values()))
        logits, offsets = outputs["cls_logits"].float(), outputs["bbox_regression"].float()
        if boxes is None or labels is None:
            return detections(logits, offsets, self.anchors, self.image_size)
        return multibox_losses(logits, offsets, self.anchors, boxes, labels)


def map_shapes(backbone: nn.Module, in_channels: int, image_size: int) -> list[tuple[int, int, int]]:
    """Return the channels, height and width of each feature map of a backbone, from a pass on the meta device."""
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    images = torch.empty(2, in_channels, image_size, image_size, device="meta")
    with torch.no_grad():
        features = torch.func.functional_call(backbone, shapes, (images,))
    return [tuple(feature_map.shape[1:]) for feature_map in features.values()]


def default_boxes(generator: DefaultBoxGenerator, maps: list[tuple[int, int, int]], image_size: int) -> Tensor:
    """Return SSD's default boxes for feature maps of these shapes, in pixels, float32 ``[A, 4]``, on the CPU."""
    with torch.device("cpu"):
        images = ImageList(torch.empty(0, 0, image_size, image_size), [(image_size, image_size)])
        boxes: Tensor = generator(images, [torch.empty(0, *shape) for shape in maps])[0]
        return boxes.contiguous()


class WideNormVGG(SSDFeatureExtractorVGG):  # type: ignore[misc]
    """Backbone of SSD300: VGG-16 to conv4_3, with features scaled to an initial norm of 20, and the later layers.

    torchvision divides by a norm of at least 1e-12. In FP16 this minimum is 0, so positions without activations become
    NaN, and squares of activations above 256 overflow. Norms are therefore computed in FP32 here.
    """

    @override
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return six feature maps ``[N, C, H, W]`` by name, ``0`` to ``5``, from fine to coarse; ``0`` is scaled."""
        features = self.features(images)
        scaled = self.scale_weight.float().view(1, -1, 1, 1) * F.normalize(features.float())
        maps = {"0": scaled.to(features.dtype)}
        for number, block in enumerate(self.extra, start=1):
            features = block(features)
            maps[str(number)] = features
        return maps


class SmallTrunk(nn.Module):
    """Backbone of the small SSD: 3x3 convolutions with BatchNorm; feature maps at 1/8, 1/16 and 1/32 of the side."""

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

    @override
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return three feature maps ``[N, 4 * width, H, W]`` by name (``0`` to ``2``), from fine to coarse."""
        features = self.stem(images)
        maps = {"0": features}
        for number, block in enumerate(self.down, start=1):
            features = block(features)
            maps[str(number)] = features
        return maps


def _convolution(inward: int, outward: int, stride: int = 1) -> list[nn.Module]:
    # No bias, because the normalisation subtracts it.
    convolution = nn.Conv2d(inward, outward, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outward), nn.ReLU()]


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Encode true boxes ``[..., A, 4]`` as offsets from SSD's default boxes ``[A, 4]``, the targets of the regression.

    They are shifts of the centre in units of the default box, and logarithms of the size ratios, multiplied by
    `WEIGHTS`. Boxes are left, upper, right, lower.
    """
    centre, size = _centre_and_size(boxes)
    own_centre, own_size = _centre_and_size(anchors)
    shift, growth = (centre - own_centre) / own_size, torch.log(size / own_size)
    return torch.cat([shift * WEIGHTS[0], growth * WEIGHTS[2]], dim=-1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """Decode offsets from SSD's default boxes, inverting `encode`, to boxes of at most 62.5 times their size."""
    own_centre, own_size = _centre_and_size(anchors)
    centre = offsets[..., :2] / WEIGHTS[0] * own_size + own_centre
    size = torch.exp(offsets[..., 2:] / WEIGHTS[2]).clamp(max=_LARGEST) * own_size
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    low, high = boxes[..., :2], boxes[..., 2:]
    return (low + high) / 2, high - low


def match(boxes: Tensor, present: Tensor, anchors: Tensor) -> Tensor:
    """Match each of SSD's default boxes to a true box or to the background, for the training loss.

    A default box is matched to the true box with the largest overlap (intersection over union) if that is at least
    `MATCHED`. In addition, each true box is matched to the default box that overlaps it most, whatever the overlap. If
    several true boxes claim the same default box, the last one is matched. The result is int64 ``[N, A]``, -1 for
    background. ``present``, bool ``[N, M]``, tells boxes from padding; M is at least 1.
    """
    samples, count = present.shape
    overlaps = box_iou(boxes.flatten(0, 1), anchors).view(samples, count, len(anchors))
    overlaps = overlaps.masked_fill(~present.unsqueeze(2), -1.0)
    best, box_index = overlaps.max(dim=1)
    matched = torch.where(best >= MATCHED, box_index, -1)
    numbers = torch.arange(count, device=boxes.device).expand(samples, count)
    claimed = torch.full_like(matched, -1).scatter_reduce(
        1, overlaps.argmax(dim=2), torch.where(present, numbers, -1), "amax"
    )
    return torch.where(claimed >= 0, claimed, matched)


def multibox_losses(
    logits: Tensor, offsets: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Return SSD's MultiBox loss (Liu et al. 2016, equations 1 to 3) of each image, with hard negative mining.

    Both sums are divided by the number of matched default boxes in the whole batch, at least 1, as in the authors' code
    and torchvision. With ``train.accumulate`` it is the number in the micro-batch, so that an object weighs more in a
    micro-batch with few objects. An image without objects adds nothing, because no negatives are mined for it.

    The logits are ``[N, A, 1 + classes]``, with the background first. ``class_loss`` (cross-entropy) and ``box_loss``
    (smooth L1), float32 ``[N]``, are the images' contributions times N, so that their mean is the batch's loss.
    """
    matched = match(boxes, labels >= 0, anchors)
    objects = matched >= 0
    box_index = matched.clamp(min=0)
    classes = torch.where(objects, labels.gather(1, box_index) + 1, 0)
    true = boxes.gather(1, box_index.unsqueeze(2).expand(-1, -1, 4))
    # The target of a background box is the box itself: the logarithm of padding is -inf, and its gradient NaN.
    wanted = encode(torch.where(objects.unsqueeze(2), true, anchors), anchors)
    off = F.smooth_l1_loss(offsets, wanted, reduction="none").sum(2)
    surprise = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
    learned = objects | hardest(surprise.detach(), objects)
    share = len(boxes) / objects.sum().clamp(min=1)
    return {
        "class_loss": torch.where(learned, surprise, 0.0).sum(1) * share,
        "box_loss": torch.where(objects, off, 0.0).sum(1) * share,
    }


def hardest(surprise: Tensor, objects: Tensor) -> Tensor:
    """Return the mask ``[N, A]`` of the background boxes with the largest losses, `NEGATIVES` per matched box."""
    falling = surprise.masked_fill(objects, float("-inf")).argsort(dim=1, descending=True, stable=True)
    # The second argsort gives ranks: the number to take differs by image, and only the device knows it.
    return (falling.argsort(dim=1) < NEGATIVES * objects.sum(1, keepdim=True)) & ~objects


def detections(logits: Tensor, offsets: Tensor, anchors: Tensor, side: int) -> list[dict[str, Tensor]]:
    """Convert SSD's outputs to detections: decode the boxes, and suppress non-maxima within each class.

    The logits are ``[N, A, 1 + classes]``, with the background first; ``side`` is that of the images in pixels, to
    which boxes are clipped. The detections of an image come by descending score, at most `MOST`.
    """
    samples, count = len(logits), len(anchors)
    boxes = decode(offsets, anchors).clamp(0.0, float(side))
    best, places = F.softmax(logits, dim=2)[..., 1:].transpose(1, 2).topk(min(CANDIDATES, count), dim=2)
    image, label, rank = torch.nonzero(best > LOWEST_SCORE, as_tuple=True)  # synchronises with the device
    box, score = boxes[image, places[image, label, rank]], best[image, label, rank]
    each = torch.bincount(image, minlength=samples).tolist()  # synchronises with the device
    per_image = []
    for own_box, own_label, own_score in zip(box.split(each), label.split(each), score.split(each), strict=True):
        # In FP64, because batched_nms separates classes by large shifts of their boxes, which costs precision in FP32.
        kept = batched_nms(
            *(beside_fp64(tensor).double() for tensor in (own_box, own_score)), beside_fp64(own_label), OVERLAP
        )[:MOST]
        per_image.append({"boxes": own_box[kept], "labels": own_label[kept], "scores": own_score[kept]})
    return per_image
