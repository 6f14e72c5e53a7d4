"""Divides sentence pairs into training, validation and test parts that have no source sentence in common."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mptrain.errors import ConfigError
from mptrain.workloads.base.random_streams import permutation

_FIXED = 20180430  # names the one permutation in use; changing it changes every split


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation."""

    source: str
    target: str


def tidied(text: str) -> str:
    """Composed characters (NFC), and one space where there was white space of any kind."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def distinct(pairs: Iterable[Pair]) -> list[Pair]:
    """Each pair once, in the order of their first places."""
    return list(dict.fromkeys(pairs))


def divide_pairs(pairs: Sequence[Pair], val_share: float, test_share: float) -> dict[str, list[Pair]]:
    """``train``, and ``val`` and ``test`` where their share is not 0; the same in every run.

    The sources are permuted by a fixed permutation and cut; all translations of one go where it goes.

    Args:
        pairs: Each once.
        val_share: Of all sources, for validation; at least one where there are that many.
        test_share: Of all sources, for the test.

    Raises:
        ConfigError: The shares leave nothing to train on.
    """
    by_source: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_source.setdefault(pair.source, []).append(pair)
    sources = list(by_source)
    wanted = {"test": test_share, "val": val_share}
    sizes = {part: max(1, round(share * len(sources))) for part, share in wanted.items() if share}
    if val_share + test_share >= 1 or sum(sizes.values()) >= len(sources):
        raise ConfigError(
            f"dataset.val_share={val_share:g} and dataset.test_share={test_share:g} of {len(sources)} source sentences "
            "leave nothing to train on",
            "choose shares whose sum is smaller, or 0 for a part that you do not want",
        )
    order = permutation(len(sources), _FIXED).tolist()
    parts: dict[str, list[Pair]] = {}
    begin = 0
    for part, size in sizes.items():
        parts[part] = [pair for place in sorted(order[begin : begin + size]) for pair in by_source[sources[place]]]
        begin += size
    parts["train"] = [pair for place in sorted(order[begin:]) for pair in by_source[sources[place]]]
    return {part: parts[part] for part in ("train", "val", "test") if part in parts}
