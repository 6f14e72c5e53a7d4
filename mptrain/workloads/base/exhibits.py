"""Exhibits: pictures, texts and sounds of a model that a task shows after each validation, such as generated images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Pictures:
    """Grid of pictures that a task shows after a validation, with an explanation of their colours or columns.

    ``pixels`` are floats ``[N, C, H, W]`` from 0 to 1, grey or RGB; values outside are clipped. ``columns`` is the
    number of pictures per row; None makes the grid square.
    """

    pixels: Tensor
    caption: str = ""
    columns: int | None = None


@dataclass(frozen=True)
class Texts:
    """Table of sentences that a task shows after a validation: input, expected output and output of the model."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sounds:
    """Recordings that a task shows after a validation, float32 ``[N, T]`` from -1 to 1; values outside are clipped.

    ``rate`` is in hertz; ``captions`` has N sentences, or none.
    """

    samples: Tensor
    rate: int
    captions: tuple[str, ...] = ()


Exhibit: TypeAlias = Pictures | Texts | Sounds
