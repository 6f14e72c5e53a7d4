"""Files of the pictures, texts and sounds that a task shows after a validation: image grids, tables and WAV files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.run_paths import CAPTIONS
from mptrain.workloads.base.task import Exhibit, Pictures, Sounds, Texts

#: Largest sample value of a 16-bit recording.
_FULL_SCALE = 32767


def on_host(shown: Exhibit) -> Exhibit:
    """Return a copy of a task's pictures or sounds in CPU memory as float32; texts are returned unchanged."""
    if isinstance(shown, Texts):
        return shown
    if isinstance(shown, Sounds):
        return replace(shown, samples=shown.samples.float().cpu())
    return replace(shown, pixels=shown.pixels.float().cpu())


def keep_exhibits(folder: Path, step: int, exhibits: Mapping[str, Exhibit]) -> list[str]:
    """Write the pictures, texts and sounds that a task shows to files, replacing those of the same step.

    Pictures become one grid, ``NAME-STEP.png``. Texts become ``NAME-STEP.tsv``, whose first line has the column names.
    Each sound becomes ``NAME-N-STEP.wav``, 16 bits per sample. Captions are written to ``captions.json`` by ``NAME`` or
    ``NAME-N``. Returns the names of the other files. The folder is created if there is something to write. Raises
    StorageError if a file cannot be written.
    """
    files: dict[str, bytes] = {}
    captions: dict[str, str] = {}
    for name, shown in exhibits.items():
        if isinstance(shown, Texts):
            files[f"{name}-{step:06d}.tsv"] = _table(shown)
        elif isinstance(shown, Sounds):
            for number, samples in enumerate(shown.samples, start=1):
                files[f"{name}-{number}-{step:06d}.wav"] = _recording(samples, shown.rate)
            captions |= {f"{name}-{number}": caption for number, caption in enumerate(shown.captions, start=1)}
        else:
            files[f"{name}-{step:06d}.png"] = _sheet(shown)
            captions[name] = shown.caption
    if files:
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
    for file, content in files.items():
        write_atomically(folder / file, content)
    if any(captions.values()):
        write_atomically(folder / CAPTIONS, json.dumps(captions, indent=2, ensure_ascii=False).encode(errors="replace"))
    return list(files)


def _sheet(pictures: Pictures) -> bytes:
    from PIL import Image
    from torchvision.utils import make_grid

    columns = pictures.columns or max(1, round(len(pictures.pixels) ** 0.5))
    grid = make_grid(pictures.pixels.nan_to_num(), nrow=columns, padding=1).clamp(0, 1)
    pixels = (grid * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _table(texts: Texts) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, dialect="excel-tab", lineterminator="\n")
    for row in (texts.columns, *texts.rows):
        # Python before 3.13 does not quote a carriage return, and a reader would take it as the end of the row.
        writer.writerow([text.replace("\r\n", "\n").replace("\r", "\n") for text in row])
    return file.getvalue().encode(errors="replace")


def _recording(samples: Tensor, rate: int) -> bytes:
    from scipy.io import wavfile

    levels = (samples.nan_to_num().clamp(-1, 1) * _FULL_SCALE).round().to(torch.int16).numpy()
    file = io.BytesIO()
    wavfile.write(file, rate, levels)
    return file.getvalue()
