"""What a task shows after a validation, to be looked at, read or listened to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Pictures:
    """Pictures, shown together on one sheet.

    Attributes:
        pixels: Float ``[N, C, H, W]`` from 0 to 1, grey or RGB; what lies outside is clipped.
        caption: What is to be seen, and what colours or columns mean.
        columns: How many stand side by side; None makes the sheet as wide as it is high.
    """

    pixels: Tensor
    caption: str = ""
    columns: int | None = None


@dataclass(frozen=True)
class Texts:
    """A table of sentences: what went in, what should have come out, what did.

    Attributes:
        columns: What each column is: ``source``, ``reference``, ``model``.
        rows: One tuple for each sample, as long as ``columns``.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sounds:
    """Recordings.

    Attributes:
        samples: float32 ``[N, T]`` from -1 to 1; what lies outside is clipped.
        rate: Samples a second, in hertz.
        captions: What each of them is, N sentences; none says nothing about any.
    """

    samples: Tensor
    rate: int
    captions: tuple[str, ...] = ()


Exhibit: TypeAlias = Pictures | Texts | Sounds
