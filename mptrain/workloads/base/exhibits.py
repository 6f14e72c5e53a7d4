"""Exhibits: pictures, texts and sounds of a model that a task shows after each validation, such as generated images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Pictures:
    """Pictures that a task shows after a validation, as one grid.

    Attributes:
        pixels: Pixel values, float ``[N, C, H, W]`` from 0 to 1, grey or RGB; values outside are clipped.
        caption: Explanation of the pictures, and of the meaning of colours or columns.
        columns: Pictures per row; None makes the grid square.
    """

    pixels: Tensor
    caption: str = ""
    columns: int | None = None


@dataclass(frozen=True)
class Texts:
    """Table of sentences that a task shows after a validation: input, expected output and output of the model.

    Attributes:
        columns: Name of each column: ``source``, ``reference``, ``model``.
        rows: Table rows, one tuple per sample, as long as ``columns``.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sounds:
    """Recordings of one sample rate that a task shows after a validation.

    Attributes:
        samples: Amplitudes, float32 ``[N, T]`` from -1 to 1; values outside are clipped.
        rate: Sample rate in hertz.
        captions: N sentences, one per recording; an empty tuple for no captions.
    """

    samples: Tensor
    rate: int
    captions: tuple[str, ...] = ()


Exhibit: TypeAlias = Pictures | Texts | Sounds
