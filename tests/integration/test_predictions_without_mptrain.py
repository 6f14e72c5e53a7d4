"""Exported weights and data.json give the predictions of ``mptrain eval``, by the script that the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mptrain.cli.main import main
from mptrain.workloads.images.datasets.cifar import Cifar10
from mptrain.workloads.images.datasets.image_folder import FolderSplit
from mptrain.workloads.images.image_dataset import MemorySplit

PAGE = Path(__file__).resolve().parents[2] / "docs/training.md"
WORDS = (
    "model=mlp",
    "model.hidden=[32]",
    "precision=fp32",
    "device=cpu",
    "threads=1",
    "train.epochs=1",
    "train.batch_size=8",
)


@pytest.fixture(scope="module")
def script():
    code = re.search(r"```python\n(# predict.py\n.*?)```", PAGE.read_text(), flags=re.DOTALL)[1]
    assert "mptrain" not in re.findall(r"(?:from|import) (\S+)", code)
    names = {}
    exec(code, names)
    return names


def pictures(root, folders):
    """Pictures of many sizes, formats and modes; the shorter side is up to eight times as long as the inputs."""
    chance = np.random.default_rng(5)
    for number in range(8 * len(folders)):
        place = root / folders[number % len(folders)]
        place.mkdir(parents=True, exist_ok=True)
        size = tuple(chance.integers(20, 200, 2).tolist())
        noise = chance.integers(0, 256, (7, 9, 3)) // 2 + 60 * (number % 2)
        image = Image.fromarray(noise.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
        kind = number // len(folders) % 4
        if kind == 0:
            image.save(place / f"{number}.jpg", quality=90)
        elif kind == 1:
            image.convert(("RGBA", "P", "L", "CMYK")[number % 4]).save(place / f"{number}.tif")
        elif kind == 2:
            deep = np.asarray(image.convert("L")).astype(np.uint16) * 251
            Image.fromarray(deep).save(place / f"{number}.png")
        else:
            image.save(place / f"{number}.png")


def evaluated(monkeypatch, *words):
    """Inputs and logits of each batch that ``mptrain eval`` computes, and the indices that it fetches with their split."""
    seen, fetched, depth = [], [], [0]

    def enter(module, given):
        depth[0] += 1

    def leave(module, given, result):
        depth[0] -= 1
        if not depth[0]:
            seen.append((given[0].clone(), result.clone()))

    for kind in (FolderSplit, MemorySplit):
        whole = kind.fetch
        monkeypatch.setattr(
            kind,
            "fetch",
            lambda split, indices, *rest, whole=whole: (
                fetched.append((split, list(indices))),
                whole(split, indices, *rest),
            )[1],
        )
    module = nn.modules.module
    hooks = module.register_module_forward_pre_hook(enter), module.register_module_forward_hook(leave)
    assert main(["eval", *words]) == 0
    for hook in hooks:
        hook.remove()
    return seen, fetched


def network(channels, side, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 32), nn.ReLU(), nn.Linear(32, classes))


FOLDERS = {
    "image_folder": ("dataset=image_folder", "dataset.val_share=0.4", "dataset.image_size=24"),
    "grey": ("dataset=image_folder", "dataset.channels=1", "dataset.image_size=17", "dataset.normalise=symmetric"),
    "draft": ("dataset=image_folder", "dataset.val_share=0.4", "dataset.decode=draft", "dataset.image_size=10"),
    "imagenet": ("dataset=imagenet", "dataset.image_size=24"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_files_have_the_predictions_of_an_evaluation(name, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parted = ("train/n01", "train/n02", "val/n01", "val/n02")
    folders = parted if name in ("imagenet", "grey") else ("ant", "bee", "cat")
    pictures(tmp_path / "data", folders)
    words = (*WORDS, *FOLDERS[name], "dataset.root=data", "dataset.workers=0", "run.name=run")
    assert main([*words]) == 0
    assert main(["export", "outputs/run"]) == 0
    seen, fetched = evaluated(monkeypatch, "outputs/run")
    side = int(re.search(r"image_size=(\d+)", " ".join(words))[1])
    built, data = script["load"](
        "outputs/run", network(1 if name == "grey" else 3, side, len({folder.split("/")[-1] for folder in folders}))
    )
    assert len(seen) == len(fetched) > 0
    for (inputs, logits), (split, indices) in zip(seen, fetched, strict=True):
        images = torch.cat([script["read"](split.listing.paths[index], data) for index in indices])
        assert torch.equal(script["prepare"](images, data), inputs)
        said = script["predict"](built, images, data)
        assert said == [data["labels"][number] for number in logits.argmax(1)]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("cifar10", ("dataset.channels=1", "dataset.image_size=40")),
        ("cifar10", ("dataset.normalise=symmetric",)),
        ("digits", ()),
        ("digits", ("dataset.image_size=20",)),
    ],
)
def test_stored_images_have_the_predictions_of_an_evaluation(kind, more, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chance = torch.Generator().manual_seed(3)

    def read(self):
        self.class_names = tuple("abcdefghij")
        images = torch.randint(0, 256, (120, 3, 32, 32), dtype=torch.uint8, generator=chance)
        return (images[:90], torch.arange(90) % 10), (images[90:], torch.arange(30) % 10)

    monkeypatch.setattr(Cifar10, "read", read)
    words = (*WORDS, f"dataset={kind}", "dataset.val_samples=20", "dataset.train_samples=60", *more, "run.name=run")
    assert main([*words]) == 0
    assert main(["export", "outputs/run"]) == 0
    chance.manual_seed(3)
    seen, fetched = evaluated(monkeypatch, "outputs/run")
    channels, side = seen[0][0].shape[1:3]
    built, data = script["load"]("outputs/run", network(channels, side, 10))
    assert len(seen) == len(fetched) > 0
    for (inputs, logits), (split, indices) in zip(seen, fetched, strict=True):
        assert torch.equal(script["prepare"](split.images[indices], data), inputs)
        assert script["predict"](built, split.images[indices], data) == [
            data["labels"][number] for number in logits.argmax(1)
        ]
