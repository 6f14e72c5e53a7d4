"""A folder of small pictures in classes, the same for every case."""

from __future__ import annotations

import random

from tests.faults.drawing import CLASSES, PICTURES


def make(root):
    """``root/train`` and ``root/val``, 16x16 PNG files."""
    from PIL import Image

    chance = random.Random(0)
    for part, count in (("train", PICTURES // CLASSES), ("val", 4)):
        for label in range(CLASSES):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = bytes(min(255, 80 * label + chance.randrange(80)) for _ in range(16 * 16 * 3))
                Image.frombytes("RGB", (16, 16), pixels).save(folder / f"{number}.png")
