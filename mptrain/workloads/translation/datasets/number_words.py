"""The names of numbers in two languages: exact pairs on every machine, for a translation task that needs no files.

German says units before tens and writes one word, French counts in twenties here and there, so a translator has to learn
order, spelling and where words end; and whether a translation is right is beyond doubt.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le

from mptrain.errors import ConfigError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.text.subwords import Pieces
from mptrain.workloads.translation.datasets.number_names import Language, name_of
from mptrain.workloads.translation.pair_dataset import Choices, PairDataset, pairs_as_dataset
from mptrain.workloads.translation.pair_partition import Pair, divide_pairs

_SIZE = 1_000_000  # one more than the largest number that has a name here
_FIXED = 20180430  # names the one draw in use; changing it changes the data


def load_number_words(
    *,
    source: Language = "de",
    target: Language = "en",
    samples: Annotated[int, Ge(20), Le(100_000)] = 6000,
    pieces: Pieces = "bpe",
    vocabulary: PositiveInt = 200,
    target_vocabulary: PositiveInt | None = None,
    shared: bool = False,
    max_tokens: PositiveInt = 100,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    batch_size: PositiveInt = 32,
) -> PairDataset:
    """Name numbers below a million, of all lengths: half of the draws have three digits or fewer. Test numbers are new.

    Args:
        source: Language to translate from.
        target: Language to translate into.
        samples: How many different numbers.
        pieces: What a token is.
        vocabulary: Tokens of the source language, or of both where they are shared.
        target_vocabulary: Tokens of the target language; None for as many.
        shared: One vocabulary for both languages.
        max_tokens: Pairs with more on a side are left out.
        val_share: Share of the numbers for validation.
        test_share: Share of the numbers to test on.
        train_samples: Train on so many pairs only; None trains on all.
        batch_size: Of the run.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        ConfigError: Both languages are the same.
    """
    if source == target:
        raise ConfigError(f"dataset.source and dataset.target are both {source}", "choose two of en, de and fr")
    pairs = [Pair(name_of(number, source), name_of(number, target)) for number in draw_numbers(samples)]
    choices = Choices(pieces, vocabulary, target_vocabulary, shared, max_tokens, train_samples, batch_size)
    return pairs_as_dataset("number_words", divide_pairs(pairs, val_share, test_share), choices, faults={})


def draw_numbers(count: int) -> list[int]:
    """Different numbers below a million whose logarithms are drawn evenly; the same in every run."""
    found: dict[int, None] = {}
    chunk = 0
    while len(found) < count:
        drawn = uniforms(_FIXED, 0, torch.arange(chunk * count, (chunk + 1) * count), 1)[:, 0]
        found.update(dict.fromkeys((_SIZE**drawn).long().sub(1).tolist()))
        chunk += 1
    return list(found)[:count]
