"""What SSD does with its outputs: matching default boxes with true ones, the MultiBox loss, and decoding into detections.

Everything is FP32, whatever the network's dtype: in FP16, coordinates above 512 have no half pixels, and a sum of
losses over 8,732 default boxes overflows. Nothing in the loss depends on values on the host, so no step waits for the
device; `detections` waits for it, because how many there are is known only then.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
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
    """Which true box each default box stands for.

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
    """What the outputs say is in the images: the best boxes of each class, without those that overlap better ones.

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
