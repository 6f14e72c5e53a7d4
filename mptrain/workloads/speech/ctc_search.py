"""Prefix beam search over what a network trained with connectionist temporal classification gives for each frame."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Letters less probable than this in a frame are not tried: ``e ** -12`` is 6e-6.
_LEAST = -12.0


def beam_search(frames: Tensor, width: int) -> list[int]:
    """The letters with the largest probability that a search over prefixes finds (Hannun et al. 2014, algorithm 1).

    The probability of some letters is the sum of all paths that spell them, where the best path is a single one. No
    language model takes part.

    Args:
        frames: Logarithms of probabilities, float32 ``[T, V]`` on the host; number 0 is the blank.
        width: Prefixes that are kept from frame to frame.

    Returns:
        Numbers of letters.
    """
    never = -math.inf
    # prefix: log probability of all its paths so far that end in a blank, and of those that end in its last letter
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, never)}
    for row in frames.tolist():
        tried = [(number, value) for number, value in enumerate(row) if number and value > _LEAST]
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [never, never])
        for prefix, (blank, letter) in beam.items():
            either = _sum(blank, letter)
            _add(grown[prefix], 0, either + row[0])
            if prefix:
                _add(grown[prefix], 1, letter + row[prefix[-1]])
            for number, value in tried:
                # The same letter once more needs a blank between; else it is a longer sound of the one.
                before = blank if prefix and prefix[-1] == number else either
                _add(grown[(*prefix, number)], 1, before + value)
        best = sorted(grown.items(), key=lambda item: -_sum(*item[1]))[:width]
        beam = {prefix: (blank, letter) for prefix, (blank, letter) in best}
    return list(max(beam.items(), key=lambda item: _sum(*item[1]))[0])


def _add(pair: list[float], place: int, value: float) -> None:
    pair[place] = _sum(pair[place], value)


def _sum(one: float, other: float) -> float:
    """The logarithm of the sum of two probabilities given by theirs."""
    large, small = max(one, other), min(one, other)
    return large if small == -math.inf else large + math.log1p(math.exp(small - large))
