"""Divides a text into training, validation and test parts, so that no part contains what another was made of.

The parts are contiguous, and cut between documents where that comes near to the shares asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

from mptrain.errors import ConfigError

#: Where to cut a document, best first: after an empty line, after a line.
_SEAMS = (re.compile(r"\n[^\S\n]*\n"), re.compile(r"\n"))


def joined(documents: Iterable[str]) -> str:
    """One text of several: each ends with the end of a line."""
    return "".join(document if document.endswith("\n") else document + "\n" for document in documents)


def divide(documents: Sequence[str], val_share: float, test_share: float) -> dict[str, str]:
    """Cut a text into ``train``, ``val`` and ``test``, in this order; a part with the share 0 is left out.

    A cut lies at the end of the document nearest to where the share would be exact; where that is further away than
    half of the share, after an empty line within the document; failing that after a line, failing that anywhere.

    Args:
        documents: In order.
        val_share: Of all characters, for validation.
        test_share: Of all characters, for the test.

    Raises:
        ConfigError: The shares leave nothing to train on.
    """
    if val_share + test_share >= 1:
        raise ConfigError(
            f"dataset.val_share={val_share:g} and dataset.test_share={test_share:g} leave nothing to train on",
            "choose shares whose sum is below 1",
        )
    text = joined(documents)
    ends = list(accumulate(len(joined([document])) for document in documents))
    parts: dict[str, str] = {}
    rest = len(text)
    for name, share in (("test", test_share), ("val", val_share)):
        if share:
            cut = _cut(text, ends, round(rest - share * len(text)), round(share * len(text) / 2))
            parts[name] = text[cut:rest]
            rest = cut
    return {"train": text[:rest], **dict(reversed(parts.items()))}


def _cut(text: str, ends: Iterable[int], wanted: int, tolerance: int) -> int:
    low, high = wanted - tolerance, wanted + tolerance
    seams = ((match.end() for match in seam.finditer(text, max(0, low), high)) for seam in _SEAMS)
    for places in (ends, *seams):
        near = [place for place in places if low < place < high]
        if near:
            return min(near, key=lambda place: abs(place - wanted))
    return wanted
