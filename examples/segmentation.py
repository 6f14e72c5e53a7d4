"""Segment shapes in pictures with a U-Net, in FP32 and FP16 over several seeds: a task of one's own, from Python.

Images and masks lie in two folders, and are drawn there the first time. The verdict is about the intersection over
union (IoU) of the masks; the masks that the last run finds are drawn beside the true ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import mptrain
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import OneNetworkTask


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of an image `[3, H, W]`, 0 to 1, and its mask `[1, H, W]`, 0 or 1, from FOLDER/images and FOLDER/masks."""

    def __init__(self, folder: Path) -> None:
        self.images = sorted((folder / "images").glob("*.png"))
        self.masks = [folder / "masks" / image.name for image in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = np.asarray(Image.open(self.images[index]).convert("RGB"), dtype=np.float32) / 255
        mask = np.asarray(Image.open(self.masks[index]).convert("L")) > 127
        return torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(mask).float()[None]


def draw(folder: Path, count: int, side: int = 48) -> None:
    """Draw pictures of bright shapes on noise, with thin lines that belong to no mask, and their masks."""
    draws = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        picture = Image.fromarray(draws.integers(0, 140, (side, side, 3), dtype=np.uint8))
        mask = Image.new("L", (side, side))
        for _ in range(draws.integers(1, 4)):
            left, top = draws.integers(0, side - 12, 2)
            box = [int(left), int(top), int(left + draws.integers(8, 20)), int(top + draws.integers(8, 20))]
            colour = tuple(map(int, draws.integers(90, 256, 3)))
            for image, ink in ((picture, colour), (mask, 255)):
                pen = ImageDraw.Draw(image)
                (pen.ellipse if number % 2 else pen.rectangle)(box, fill=ink)
        ImageDraw.Draw(picture).line([0, int(draws.integers(side)), side, int(draws.integers(side))], (200, 200, 200))
        picture.save(folder / "images" / f"{number:04}.png")
        mask.save(folder / "masks" / f"{number:04}.png")


class UNet(nn.Module):
    """Small U-Net (Ronneberger et al. 2015) of two levels: images `[N, 3, H, W]` to logits of a mask `[N, 1, H, W]`."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, width), _block(width, 2 * width)])
        self.bottom = _block(2 * width, 4 * width)
        self.up = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a logit for each pixel; sides are multiples of 4."""
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide in (inputs, outputs):
        layers += [nn.Conv2d(wide, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Segment(OneNetworkTask):
    """Task of masks: binary cross-entropy and dice loss, both in FP32, and the IoU over all pixels of a split."""

    metric = "iou"
    higher_is_better = True

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch: sums over pixels overflow in FP16, so logits become FP32 first."""
        logits = model(batch.inputs).float()
        found = logits.sigmoid()
        both, all_ = (found * batch.targets).sum((1, 2, 3)), (found + batch.targets).sum((1, 2, 3))
        return F.binary_cross_entropy_with_logits(logits, batch.targets) + (1 - (2 * both + 1) / (all_ + 1)).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return loss, intersection and union of each picture, from which the IoU has its confidence interval."""
        logits = model(batch.inputs).float()
        found, true = logits > 0, batch.targets > 0.5
        losses = F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="none").mean((1, 2, 3))
        sums = {"loss": losses, "both": (found & true).sum((1, 2, 3)), "either": (found | true).sum((1, 2, 3))}
        return {name: value.double() for name, value in sums.items()}

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return the mean loss and the IoU of a split."""
        return {"loss": sums["loss"] / terms, "iou": sums["both"] / max(sums["either"], 1.0)}

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the mask of each image as a picture, uint8 `[1, H, W]`, and its share of the pixels."""
        masks = (model(batch.inputs).float() > 0).cpu()
        return [{"picture": mask.byte() * 255, "share": float(mask.float().mean())} for mask in masks]


def main() -> None:
    """Train both arms over the seeds, print the verdict, and draw masks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("outputs/shapes"))
    parser.add_argument("--pictures", type=int, default=360)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    if not chosen.folder.exists():
        draw(chosen.folder, chosen.pictures)
    shapes = Shapes(chosen.folder)
    test, val = len(shapes) // 4, len(shapes) // 8
    cut = [range(test), range(test, test + val), range(test + val, len(shapes))]
    data = dict(zip(("test", "val", "train"), (Subset(shapes, part) for part in cut), strict=True))
    words = ["optimizer=adam", "optimizer.lr=0.01", "train.batch_size=16", f"train.epochs={chosen.epochs}"]
    runs = [
        mptrain.train(*words, f"precision={mode}", f"seed={seed}", model=UNet, task=Segment, data=data, show=False)
        for mode in ("fp32", "fp16_dynamic")
        for seed in range(chosen.seeds)
    ]
    print(mptrain.compare(*runs, margin=0.02))
    print(runs[-1].evaluate())
    images = torch.stack([data["test"][index][0] for index in range(6)])
    rows = [images, *(torch.stack([data["test"][i][1] for i in range(6)]).expand(-1, 3, -1, -1),)]
    rows.append(torch.stack([answer["picture"] for answer in runs[-1].predict(images)]).expand(-1, 3, -1, -1) / 255)
    sheet = torch.cat([torch.cat([*row], 2) for row in rows], 1)
    file = runs[-1].paths.root / "masks.png"
    Image.fromarray((sheet.permute(1, 2, 0) * 255).byte().numpy()).save(file)
    print(f"images, true masks and those of the last run: {file}")


if __name__ == "__main__":
    main()
