"""Object detection task. The network computes the losses; the metric is COCO's mean average precision.

Losses, boxes and scores are FP32, whatever the dtype of the network. pycocotools matches boxes and computes the
precision, in pixels of the network's input: stretching a picture does not change overlaps.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from mptrain.system.device import in_widest
from mptrain.system.fields import Fraction, PositiveInt
from mptrain.system.machine import load_extra, require_extra
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Pictures
from mptrain.workloads.detection.boxes import CROWD, NOTHING, OBJECT

#: Number of pictures to show, and the side in pixels to which smaller pictures are enlarged.
_SHOWN, _SHOWN_SIDE = 9, 192

_TRUE, _FOUND, _LEFT_OUT = (0, 200, 0), (255, 64, 0), (120, 120, 120)  # colours of boxes

#: Largest number of evaluated detections per image, and the range of areas in square pixels: COCO's "all".
_MOST, _ANY_AREA = 100, (0.0, 1e10)

#: Result of pycocotools for one image: matches of the detections, by class with an object or a detection.
Matches = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Detect(OneNetworkTask):
    """Object detection task: boxes with classes and scores, judged by mean average precision.

    The network has the interface of `mptrain.workloads.detection.models.detectors`. Objects whose detection is optional
    (*difficult*, *crowd*) are background in training and ignored in evaluation.

    Attributes:
        boxes: Unit of the box coordinates, a fact that data sets without boxes lack.
        metric: Metric that selects the best checkpoint: ``map50``, the mean over classes of the average precision at an
            overlap of .5 (Pascal VOC's criterion, with COCO's 101 points), or COCO's ``map``, the mean over .5 to .95.
        shown_score: Lowest score of boxes that are shown in pictures; metrics use all boxes.
        class_names: Names of the classes in pictures; if empty, their indices are shown.

    Raises:
        EnvironmentRefused: pycocotools is not installed.
    """

    num_classes: PositiveInt
    boxes: Literal["pixels"]
    metric: Literal["map50", "map"] = "map50"
    shown_score: Fraction = 0.5
    class_names: tuple[str, ...] = ()

    higher_is_better = True
    term = "images"

    def __post_init__(self) -> None:
        require_extra("pycocotools", "detection", "task=detect")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of the detector's losses, such as SSD's ``class_loss`` and ``box_loss``, mean over images."""
        return torch.stack(list(_losses(model, batch).values())).sum(0).mean()

    @override
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the detector's losses of each evaluated image by name, and their sum as ``loss``."""
        losses = {name: in_widest(values) for name, values in _losses(model, batch).items()}
        return {"loss": torch.stack(list(losses.values())).sum(0), **losses}

    @override
    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Matches]:
        outputs = _on_host(model(batch.inputs))
        corners, labels, kinds = (
            tensor.cpu() for tensor in (batch.targets, batch.extras["labels"], batch.extras["kinds"])
        )
        return [
            matches_of(output, corners[number], labels[number], kinds[number], self.num_classes)
            for number, output in enumerate(outputs)
        ]

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return ``objects``, most certain first: ``class``, ``score``, and ``box`` in pixels of the picture's file.

        A box is left, upper, right and lower edge. Objects with a score below `shown_score` are left out.
        """
        predictions = []
        for output, scale in zip(_on_host(model(batch.inputs)), batch.extras["scale"].cpu(), strict=True):
            order = output["scores"].argsort(descending=True)
            certain = order[output["scores"][order] >= self.shown_score]
            boxes = output["boxes"][certain] / torch.cat([scale, scale])
            names = [self.class_names[label] if self.class_names else str(label) for label in output["labels"][certain]]
            rows = zip(names, output["scores"][certain].tolist(), boxes.tolist(), strict=True)
            predictions.append({"objects": [{"class": name, "score": score, "box": box} for name, score, box in rows]})
        return predictions

    @override
    def score(self, answers: Sequence[Matches]) -> dict[str, float]:
        """Return the mean average precisions ``map50`` and ``map``, 0 to 1; NaN if there are no objects."""
        judge = _judge(self.num_classes)
        judge.params.imgIds = list(range(len(answers)))
        judge._paramsEval = judge.params
        judge.evalImgs = [matches.get(label) for label in range(self.num_classes) for matches in answers]
        _silently(type(judge).accumulate)(judge)
        precision = judge.eval["precision"][..., 0, 0]  # [overlap, recall, class]; -1 where a class has no object
        class_precision = precision[:, :, precision[0, 0] > -1]
        if not class_precision.size:
            return {"map50": float("nan"), "map": float("nan")}
        return {"map50": float(class_precision[0].mean()), "map": float(class_precision.mean())}

    @override
    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return ``boxes``: up to nine pictures with true boxes in green (grey if optional) and detections in red."""
        from torchvision.utils import draw_bounding_boxes

        outputs = _on_host(model(batch.inputs))
        labels, kinds = batch.extras["labels"].cpu(), batch.extras["kinds"].cpu()
        pictures = []
        for number, output in enumerate(outputs[:_SHOWN]):
            picture, factor = _picture(batch.inputs[number])
            there = labels[number] != NOTHING
            true = batch.targets[number].cpu()[there]
            certain = output["boxes"][output["scores"] >= self.shown_score]
            colours = [_TRUE if kind == OBJECT else _LEFT_OUT for kind in kinds[number][there].tolist()]
            boxes = torch.cat([true, certain]) * factor
            usable = (boxes[:, 2:] > boxes[:, :2]).all(1)
            numbers = torch.cat([labels[number][there], output["labels"][output["scores"] >= self.shown_score]])
            names = [self.class_names[label] if self.class_names else str(label) for label in numbers[usable].tolist()]
            colours = [c for c, keep in zip(colours + [_FOUND] * len(certain), usable.tolist(), strict=True) if keep]
            if usable.any():
                picture = draw_bounding_boxes(picture, boxes[usable], names, colors=colours, width=2)
            pictures.append(picture.float() / 255)
        caption = (
            "Green: true boxes; grey: true boxes whose detection is optional; "
            f"red: detections with a score of {self.shown_score:g} or more."
        )
        return {"boxes": Pictures(torch.stack(pictures), caption)}


def matches_of(
    detections: Mapping[str, Tensor], corners: Tensor, labels: Tensor, kinds: Tensor, num_classes: int
) -> Matches:
    """Match detections with true boxes in one image, at overlaps of .5, .55, ... .95; all tensors are on the host.

    The detections are ``boxes`` float ``[D, 4]``, ``labels`` from 0 ``[D]`` and ``scores`` ``[D]``; the labels of the
    true boxes are padded with `NOTHING`. The result is that of pycocotools' ``evaluateImg`` by class index, for each
    class with an object or a detection.
    """
    judge = _judge(num_classes)
    for number, (box, label, kind) in enumerate(zip(corners.tolist(), labels.tolist(), kinds.tolist(), strict=True)):
        if label != NOTHING:
            # Ids start at 1, because pycocotools treats a match with id 0 as no match.
            judge._gts[0, label].append(
                {"id": number + 1, **_measures(box), "ignore": int(kind != OBJECT), "iscrowd": int(kind == CROWD)}
            )
    columns = (detections[name].tolist() for name in ("boxes", "labels", "scores"))
    for number, (box, label, score) in enumerate(zip(*columns, strict=True)):
        judge._dts[0, label].append({"id": number + 1, **_measures(box), "score": score})
    matches = {}
    for label in sorted({label for _, label in [*judge._gts, *judge._dts]}):
        judge.ious[0, label] = judge.computeIoU(0, label)
        matches[label] = judge.evaluateImg(0, label, _ANY_AREA, _MOST)
    return matches


def _measures(box: Sequence[float]) -> dict[str, Any]:
    left, upper, right, lower = box
    return {"bbox": [left, upper, right - left, lower - upper], "area": (right - left) * (lower - upper)}


def _judge(num_classes: int) -> Any:
    """Return an evaluation of pycocotools without images."""
    judge = load_extra("pycocotools.cocoeval", "detection", "task=detect").COCOeval(iouType="bbox")
    judge.params.catIds = list(range(num_classes))
    judge.params.areaRng, judge.params.areaRngLbl = [list(_ANY_AREA)], ["all"]
    judge.params.maxDets = [_MOST]
    return judge


@functools.cache
def _silently(function: types.FunctionType) -> types.FunctionType:
    """Return the function with a ``print`` that does nothing; redirecting stdout would also affect other threads."""
    silent = {**function.__globals__, "print": lambda *values: None}
    return types.FunctionType(function.__code__, silent, function.__name__, function.__defaults__)


def _losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    labels, kinds = batch.extras["labels"], batch.extras["kinds"]
    losses: dict[str, Tensor] = model(batch.inputs, batch.targets, torch.where(kinds == OBJECT, labels, NOTHING))
    return {name: values.float() for name, values in losses.items()}


def _on_host(outputs: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the detections on the host, with boxes and scores in float32, without those that are not finite."""
    kept = []
    for output in outputs:
        boxes, labels, scores = output["boxes"].float().cpu(), output["labels"].cpu(), output["scores"].float().cpu()
        finite = boxes.isfinite().all(1) & scores.isfinite()
        kept.append({"boxes": boxes[finite], "labels": labels[finite], "scores": scores[finite]})
    return kept


def _picture(image: Tensor) -> tuple[Tensor, int]:
    """Return a normalised image as a picture uint8 ``[3, H, W]``, and its enlargement factor."""
    image = image.float().cpu()
    low, high = image.min(), image.max()
    shown = ((image - low) / (high - low).clamp(min=1e-6) * 255).round().byte()
    factor = max(1, -(-_SHOWN_SIDE // shown.shape[1]))
    shown = F.interpolate(shown[None], scale_factor=factor, mode="nearest")[0]
    return shown.expand(3, -1, -1).contiguous(), factor
