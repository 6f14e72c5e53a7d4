"""Data set ``number_words``: names of numbers in two languages, exact pairs without files, for testing translation.

German puts units before tens in one word, and French partly counts in twenties, so a model has to learn order, spelling
and word boundaries. Every translation is either right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.translation.pair_dataset import Pair, PairDataset, PairOptions, pairs_as_dataset

Language = Literal["en", "de", "fr"]

_SIZE = 1_000_000  # one more than the largest number with a name
_FIXED = 20180430  # seed of the numbers; changing it changes the data

#: Names of 0 to 19, and of the tens from 20 on, after two unused entries.
_EN, _DE, _FR = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen",
        "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
        "siebzehn achtzehn neunzehn",
        "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept "
        "dix-huit dix-neuf",
    )
)
_EN_TENS, _DE_TENS, _FR_TENS = (
    words.split()
    for words in (
        "_ _ twenty thirty forty fifty sixty seventy eighty ninety",
        "_ _ zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
        "_ _ vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt",
    )
)


@dataclass(frozen=True, kw_only=True)
class NumberWordsOptions(PairOptions):
    """Options of the data set ``number_words``, besides those of `PairOptions`.

    ``source`` and ``target`` are two languages; ``samples`` is the number of distinct numbers, before some are
    held out.
    """

    source: Language = "de"
    target: Language = "en"
    samples: Annotated[int, Ge(20), Le(100_000)] = 6000
    vocabulary: PositiveInt = 200


@takes_fields_of(NumberWordsOptions)
def load_number_words(options: NumberWordsOptions) -> PairDataset:
    """Make sentence pairs from the names of distinct numbers below a million in two languages, the same in every run.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        ConfigError: Both languages are the same.
    """
    source, target = options.source, options.target
    if source == target:
        raise ConfigError(f"dataset.source and dataset.target are both {source}", "choose two of en, de and fr")
    pairs = [Pair(name_of(number, source), name_of(number, target)) for number in draw_numbers(options.samples)]
    return pairs_as_dataset("number_words", {"train": pairs}, options, faults={}, files={})


def draw_numbers(count: int) -> list[int]:
    """Draw distinct numbers below a million, the same in every run; the logarithm of a draw plus one is uniform."""
    numbers: dict[int, None] = {}
    chunk = 0
    while len(numbers) < count:
        drawn = uniforms(_FIXED, 0, torch.arange(chunk * count, (chunk + 1) * count), 1)[:, 0]
        numbers.update(dict.fromkeys((_SIZE**drawn).long().sub(1).tolist()))
        chunk += 1
    return list(numbers)[:count]


def name_of(number: int, language: Language) -> str:
    """Return the name of a number from 0 to 999,999 in words, or raise ValueError.

    ``en`` is *twenty-one thousand three hundred four*, ``de`` *einundzwanzigtausenddreihundertvier* (units before tens,
    one word), ``fr`` *vingt et un mille trois cent quatre* (as in France: seventy is *soixante-dix*).
    """
    if not 0 <= number < _SIZE:
        raise ValueError(f"{number} is out of range: only 0 to {_SIZE - 1:,} have names")
    return {"en": _english, "de": _german, "fr": _french}[language](number)


def _english(number: int) -> str:
    if number >= 1000:
        return _joined(f"{_english(number // 1000)} thousand", number % 1000, _english)
    if number >= 100:
        return _joined(f"{_EN[number // 100]} hundred", number % 100, _english)
    if number < 20:
        return _EN[number]
    tens, unit = divmod(number, 10)
    return _EN_TENS[tens] + (f"-{_EN[unit]}" if unit else "")


def _german(number: int) -> str:
    return _german_before(number) + ("s" if number % 100 == 1 else "")


def _german_before(number: int) -> str:
    """Return a name as part of a longer word: *ein* instead of *eins*."""
    if number >= 1000:
        return f"{_german_before(number // 1000)}tausend" + (_german_before(number % 1000) if number % 1000 else "")
    if number >= 100:
        return f"{_DE[number // 100]}hundert" + (_german_before(number % 100) if number % 100 else "")
    if number < 20:
        return _DE[number]
    tens, unit = divmod(number, 10)
    return (f"{_DE[unit]}und" if unit else "") + _DE_TENS[tens]


def _french(number: int) -> str:
    if number >= 1000:
        thousands = number // 1000
        # mille takes no plural before it (quatre-vingt mille, deux cent mille) and no un.
        before = "" if thousands == 1 else f"{_french_below_1000(thousands)} "
        return _joined(f"{before}mille", number % 1000, _french)
    plural = "s" if number == 80 or number % 100 == 80 or (number >= 200 and number % 100 == 0) else ""
    return _french_below_1000(number) + plural


def _french_below_1000(number: int) -> str:
    if number >= 100:
        before = "" if number < 200 else f"{_FR[number // 100]} "
        return _joined(f"{before}cent", number % 100, _french_below_1000)
    if number < 20:
        return _FR[number]
    tens, unit = divmod(number, 10)
    if tens in (7, 9):
        unit += 10
    if unit == 0:
        return _FR_TENS[tens]
    joint = " et " if unit in (1, 11) and tens < 8 else "-"
    return f"{_FR_TENS[tens]}{joint}{_FR[unit]}"


def _joined(before: str, rest: int, name: Callable[[int], str]) -> str:
    return f"{before} {name(rest)}" if rest else before
