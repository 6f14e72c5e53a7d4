"""Descriptions of a data set's samples and files, which ``mptrain doctor`` prints before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Survey:
    """Counts and lengths of the samples of one split, by name, such as ``tokens`` and ``seconds``, to show to the user.

    ``labels`` are class indices of the samples, or of the objects in them, int64 ``[N]``; None without classes.
    """

    labels: Tensor | None = None
    totals: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FileFacts:
    """Path, class index, and size (width and height in pixels) of a picture file that was read.

    ``content`` is a hash of the size and the pixels as training uses them: equal for equal pictures in any file format.
    """

    name: str
    label: int
    size: tuple[int, int]
    content: bytes
