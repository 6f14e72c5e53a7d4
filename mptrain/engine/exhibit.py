"""Writes the pictures that a task exhibits as grids into the run directory."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from mptrain.runlog.storage import storing, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


def keep_exhibits(folder: Path, step: int, exhibits: Mapping[str, Tensor]) -> list[str]:
    """Write one PNG for each exhibit, ``NAME-STEP.png``; the same step replaces its own.

    Args:
        folder: Made if missing, when there is something to write.
        step: Attempted steps.
        exhibits: float ``[N, C, H, W]`` from 0 to 1 by name, on the host; what lies outside is clipped.

    Returns:
        The names of the files.

    Raises:
        StorageError: The disk refuses.
    """
    if not exhibits:
        return []
    from PIL import Image
    from torchvision.utils import make_grid

    with storing(folder):
        folder.mkdir(exist_ok=True)
    names = []
    for name, pictures in exhibits.items():
        columns = max(1, round(len(pictures) ** 0.5))
        grid = make_grid(pictures.nan_to_num(), nrow=columns, padding=1).clamp(0, 1)
        pixels = (grid * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="PNG")
        names.append(f"{name}-{step:06d}.png")
        write_atomically(folder / names[-1], file.getvalue())
    return names
