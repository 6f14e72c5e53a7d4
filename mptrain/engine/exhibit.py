"""Writes what a task exhibits into the run directory: pictures as grids, texts as tables, sounds as recordings."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import torch

from mptrain.runlog.storage import storing, write_atomically
from mptrain.task.exhibits import Exhibit, Sounds, Texts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

#: The loudest sample of a 16-bit recording.
_FULL_SCALE = 32767


def on_host(shown: Exhibit) -> Exhibit:
    """The same exhibit on the host, its numbers in float32."""
    if isinstance(shown, Texts):
        return shown
    if isinstance(shown, Sounds):
        return Sounds(shown.samples.float().cpu(), shown.rate)
    return shown.float().cpu()


def keep_exhibits(folder: Path, step: int, exhibits: Mapping[str, Exhibit]) -> list[str]:
    """Write the files of each exhibit; the same step replaces its own.

    Pictures become ``NAME-STEP.png``, a grid; texts ``NAME-STEP.tsv``, whose first line names the columns; sounds
    ``NAME-N-STEP.wav``, one each, 16 bits a sample.

    Args:
        folder: Made if missing, when there is something to write.
        step: Attempted steps.
        exhibits: By name, on the host.

    Returns:
        The names of the files.

    Raises:
        StorageError: The disk refuses.
    """
    files: dict[str, bytes] = {}
    for name, shown in exhibits.items():
        if isinstance(shown, Texts):
            files[f"{name}-{step:06d}.tsv"] = _table(shown)
        elif isinstance(shown, Sounds):
            for number, samples in enumerate(shown.samples, start=1):
                files[f"{name}-{number}-{step:06d}.wav"] = _recording(samples, shown.rate)
        else:
            files[f"{name}-{step:06d}.png"] = _grid(shown)
    if files:
        with storing(folder):
            folder.mkdir(exist_ok=True)
    for file, content in files.items():
        write_atomically(folder / file, content)
    return list(files)


def _grid(pictures: Tensor) -> bytes:
    from PIL import Image
    from torchvision.utils import make_grid

    columns = max(1, round(len(pictures) ** 0.5))
    grid = make_grid(pictures.nan_to_num(), nrow=columns, padding=1).clamp(0, 1)
    pixels = (grid * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _table(texts: Texts) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, dialect="excel-tab", lineterminator="\n")
    for row in (texts.columns, *texts.rows):
        # Python before 3.13 puts no quotes around a carriage return, which would end the row where it is read.
        writer.writerow([text.replace("\r\n", "\n").replace("\r", "\n") for text in row])
    return file.getvalue().encode(errors="replace")


def _recording(samples: Tensor, rate: int) -> bytes:
    from scipy.io import wavfile

    levels = (samples.nan_to_num().clamp(-1, 1) * _FULL_SCALE).round().to(torch.int16).numpy()
    file = io.BytesIO()
    wavfile.write(file, rate, levels)
    return file.getvalue()
