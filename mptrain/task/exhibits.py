"""What a task shows after a validation, to be looked at, read or listened to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


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
    """

    samples: Tensor
    rate: int


#: Pictures are float ``[N, C, H, W]`` from 0 to 1.
Exhibit: TypeAlias = Tensor | Texts | Sounds
