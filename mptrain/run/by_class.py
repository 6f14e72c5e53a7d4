"""A classifier's answers by class: the confusion matrix of a split, and the mistakes of which it was most certain."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mptrain.engine.evaluate import measuring
from mptrain.engine.parts import Parts
from mptrain.numerics.words import elided, number
from mptrain.system.errors import UsageError

#: Mistakes that are kept, and the width and height in pixels of a picture of one.
MOST, _SIDE, _LINE = 24, 112, 14


@dataclass(frozen=True)
class Mistake:
    """Sample that a classifier got wrong: what it is, and the class and probability that the network gave it."""

    sample: str
    true: str
    said: str
    probability: float
    text: str = ""


@dataclass(frozen=True)
class ByClass:
    """Answers of a classifier by class.

    Attributes:
        split: Name of the split.
        class_names: Names of the C classes.
        confusion: Numbers of samples by true class and class that the network said, C rows of C; samples with an output
            that is not finite are missing.
        not_finite: Number of these.
        mistakes: The most certain mistakes, the most certain first.
        pictures: Those whose samples are pictures, as a PNG file; empty for other data.
    """

    split: str
    class_names: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    not_finite: int
    mistakes: tuple[Mistake, ...]
    pictures: bytes


def by_class(parts: Parts, split: str, *, average: bool) -> ByClass:
    """Measure the answers by class on a split; UsageError is raised if the run does not classify samples."""
    names = tuple(map(str, parts.dataset.facts().get("class_names", ())))
    numbers = {name: place for place, name in enumerate(names)}
    if "top1" not in parts.task.shares or len(names) < 2:
        raise UsageError("--by-class is for classification: this task gives samples no classes", "leave it out")
    loader = parts.loaders[split]
    confusion = np.zeros((len(names), len(names)), dtype=np.int64)
    wrong: list[tuple[float, int, int, int]] = []
    not_finite = 0
    order = loader.order(0).tolist()
    with measuring(parts, average=average) as (model, prepare, autocast):
        for place, batch in enumerate(loader.batches(epoch=0)):
            asked = order[place * loader.batch_size : (place + 1) * loader.batch_size]
            prepared = prepare(batch)
            with autocast:
                answers = parts.task.predict(model, prepared)
            known = asked if len(asked) == batch.samples else itertools.repeat(-1)  # unusable samples are left out
            for index, true, answer in zip(known, batch.targets.tolist(), answers, strict=False):
                if answer["class"] is None:
                    not_finite += 1
                    continue
                said = numbers[answer["class"]]
                confusion[true, said] += 1
                if said != true and index >= 0:
                    wrong.append((answer["probability"], index, true, said))
    wrong.sort(reverse=True)
    shown = wrong[:MOST]
    samples = [loader.split.fetch([index], 0, 0).inputs[0] for _, index, _, _ in shown]
    mistakes = [
        Mistake(_name(parts, split, index), names[true], names[said], probability, _text(parts, sample))
        for (probability, index, true, said), sample in zip(shown, samples, strict=True)
    ]
    pictures = samples and all(one.dim() == 3 and one.shape[0] in (1, 3) for one in samples)
    return ByClass(
        split,
        names,
        tuple(tuple(map(int, row)) for row in confusion),
        not_finite,
        tuple(mistakes),
        _grid(samples, mistakes) if pictures else b"",
    )


def _name(parts: Parts, split: str, index: int) -> str:
    paths = getattr(getattr(parts.loaders[split].split, "listing", None), "paths", None)
    return paths[index] if paths else f"{split} {index}"


def _text(parts: Parts, sample: Tensor) -> str:
    vocabulary: Any = getattr(parts.dataset, "vocabulary", None)
    return "" if vocabulary is None else vocabulary.text([token - 1 for token in sample.tolist() if token])


def _grid(samples: list[Tensor], mistakes: list[Mistake]) -> bytes:
    """Return a PNG file with pictures in rows of eight, and below each its true class, and what was said."""
    from PIL import Image, ImageDraw, ImageFont

    columns, high = min(8, len(samples)), _SIDE + 3 * _LINE
    sheet = Image.new("RGB", (columns * (_SIDE + 8), -(-len(samples) // columns) * high), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for place, (sample, mistake) in enumerate(zip(samples, mistakes, strict=True)):
        pixels = sample.float()
        if sample.dtype != torch.uint8:
            pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-6) * 255
        array = pixels.round().byte().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
        left, upper = place % columns * (_SIDE + 8), place // columns * high
        resampling = Image.Resampling.NEAREST if max(array.shape) < _SIDE else Image.Resampling.BILINEAR
        sheet.paste(Image.fromarray(array).resize((_SIDE, _SIDE), resampling), (left, upper))
        pen.text((left, upper + _SIDE), f"is {elided(mistake.true, 17)}", "black", font)
        said = f"{elided(mistake.said, 11)} {number(mistake.probability)}"
        pen.text((left, upper + _SIDE + _LINE), said, (180, 40, 0), font)
    output = io.BytesIO()
    sheet.save(output, "PNG")
    return output.getvalue()
