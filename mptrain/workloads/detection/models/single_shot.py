"""Single-shot detectors: a trunk with several feature maps, a head on each, and default boxes that never change.

Behind the heads everything is FP32, whatever the network's dtype: matching default boxes with true ones, the MultiBox loss, and decoding
into detections. In FP16, coordinates above 512 have no half pixels, and a sum of losses over 8,732 default boxes overflows. Nothing in the
loss depends on values on the host, so no step waits for the device; `detections` waits for it, because how many there are is known only
then. Importing this imports torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDFeatureExtractorVGG, SSDHead
from torchvision.ops import batched_nms, box_iou

from mptrain.device import beside_fp64

#: What offsets are multiplied by: centres, then sizes (the "variances" 0.1 and 0.2 of Liu et al.'s program).
WEIGHTS = (10.0, 10.0, 5.0, 5.0)

#: Overlap from which a default box stands for an object (Liu et al. 2016, section 2.2).
MATCHED = 0.5

#: Background boxes that are learned from for each box that stands for an object (section 2.2).
NEGATIVES = 3

#: Sizes grow by this factor at most, as in torchvision: the exponential of a wild output would overflow.
_LARGEST = 1000.0 / 16

#: Of detections: lowest score, overlap above which the lower score goes, and the most for each image (section 3.1);
#: and candidates for each class before that (400, as in Liu et al.'s program and torchvision's).
LOWEST_SCORE, OVERLAP, MOST, CANDIDATES = 0.01, 0.45, 200, 400


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
    # The normalisation subtracts any bias again, so the convolution has none.
    convolution = nn.Conv2d(inward, outward, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outward), nn.ReLU()]


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Boxes ``[..., A, 4]`` as offsets from default boxes ``[A, 4]``, both as left, upper, right, lower.

    Returns:
        float32 ``[..., A, 4]``: shifts of the centre in units of the default box, logarithms of the ratios of sizes, all times
        `WEIGHTS`.
    """
    centre, size = _centre_and_size(boxes)
    own_centre, own_size = _centre_and_size(anchors)
    shift, growth = (centre - own_centre) / own_size, torch.log(size / own_size)
    return torch.cat([shift * WEIGHTS[0], growth * WEIGHTS[2]], dim=-1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """The inverse of `encode`; sizes are at most 62.5 times those of the default boxes."""
    own_centre, own_size = _centre_and_size(anchors)
    centre = offsets[..., :2] / WEIGHTS[0] * own_size + own_centre
    size = torch.exp(offsets[..., 2:] / WEIGHTS[2]).clamp(max=_LARGEST) * own_size
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    low, high = boxes[..., :2], boxes[..., 2:]
    return (low + high) / 2, high - low


def match(boxes: Tensor, present: Tensor, anchors: Tensor) -> Tensor:
    """Return which true box each default box stands for.

    A default box stands for the true one that it overlaps most, if by `MATCHED` or more; and whatever the overlap, the one
    default box that overlaps a true box most stands for it, for the last of several such.

    Args:
        boxes: float32 ``[N, M, 4]``, with at least one place.
        present: Which places hold a box, bool ``[N, M]``.
        anchors: Default boxes, float32 ``[A, 4]``.

    Returns:
        Places in ``M``, int64 ``[N, A]``; -1 for background.
    """
    samples, places = present.shape
    overlaps = box_iou(boxes.flatten(0, 1), anchors).view(samples, places, len(anchors))
    overlaps = overlaps.masked_fill(~present.unsqueeze(2), -1.0)
    best, place = overlaps.max(dim=1)
    found = torch.where(best >= MATCHED, place, -1)
    numbers = torch.arange(places, device=boxes.device).expand(samples, places)
    claimed = torch.full_like(found, -1).scatter_reduce(
        1, overlaps.argmax(dim=2), torch.where(present, numbers, -1), "amax"
    )
    return torch.where(claimed >= 0, claimed, found)


def multibox_losses(
    logits: Tensor, offsets: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """The loss of Liu et al. 2016, equations 1 to 3, with hard negative mining; image by image.

    Both sums are divided by the number of default boxes in the whole batch that stand for an object, at least 1, as in
    the authors' program and in torchvision's; with ``train.accumulate`` in the micro-batch, so that an object weighs more
    in one with few. An image without objects, where nothing is mined, adds nothing.

    Args:
        logits: float32 ``[N, A, 1 + classes]``, the first of the background.
        offsets: float32 ``[N, A, 4]``.
        anchors: float32 ``[A, 4]``.
        boxes: True ones, float32 ``[N, M, 4]``.
        labels: Their classes from 0, int64 ``[N, M]``; -1 where there is none.

    Returns:
        ``class_loss`` and ``box_loss``, float32 ``[N]``: what the images contribute, times N, so that the mean over them is the
        loss of the batch.
    """
    matched = match(boxes, labels >= 0, anchors)
    objects = matched >= 0
    place = matched.clamp(min=0)
    classes = torch.where(objects, labels.gather(1, place) + 1, 0)
    true = boxes.gather(1, place.unsqueeze(2).expand(-1, -1, 4))
    # Background boxes aim at themselves: the logarithm of an empty place would be -inf, and its gradient NaN.
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
    """The background boxes to learn from: those with the largest losses, `NEGATIVES` for each object's box of the image.

    Args:
        surprise: Cross-entropies ``[N, A]``.
        objects: Which default boxes stand for an object, bool ``[N, A]``.

    Returns:
        bool ``[N, A]``.
    """
    falling = surprise.masked_fill(objects, float("-inf")).argsort(dim=1, descending=True, stable=True)
    return (falling.argsort(dim=1) < NEGATIVES * objects.sum(1, keepdim=True)) & ~objects


def detections(logits: Tensor, offsets: Tensor, anchors: Tensor, side: int) -> list[dict[str, Tensor]]:
    """Return the detections of the outputs: the best boxes of each class, without those that overlap better ones.

    Args:
        logits: float32 ``[N, A, 1 + classes]``, the first of the background.
        offsets: float32 ``[N, A, 4]``.
        anchors: float32 ``[A, 4]``.
        side: Of the images, in pixels; boxes are cut off there.

    Returns:
        For each image ``boxes`` float32 ``[D, 4]``, ``labels`` from 0 (int64 ``[D]``) and ``scores`` (float32 ``[D]``), the best
        first, at most `MOST`.
    """
    samples, count = len(logits), len(anchors)
    boxes = decode(offsets, anchors).clamp(0.0, float(side))
    best, places = F.softmax(logits, dim=2)[..., 1:].transpose(1, 2).topk(min(CANDIDATES, count), dim=2)
    image, label, rank = torch.nonzero(best > LOWEST_SCORE, as_tuple=True)  # waits for the device
    box, score = boxes[image, places[image, label, rank]], best[image, label, rank]
    each = torch.bincount(image, minlength=samples).tolist()  # waits for the device
    found = []
    for own_box, own_label, own_score in zip(box.split(each), label.split(each), score.split(each), strict=True):
        # In FP64, because classes are told apart by shifting their boxes far from each other, where FP32 has few decimals.
        kept = batched_nms(
            *(beside_fp64(tensor).double() for tensor in (own_box, own_score)), beside_fp64(own_label), OVERLAP
        )[:MOST]
        found.append({"boxes": own_box[kept], "labels": own_label[kept], "scores": own_score[kept]})
    return found
