"""Names of whole numbers in English, German and French, by the rules of each language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Language = Literal["en", "de", "fr"]

_LARGEST = 999_999

_EN = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_EN_TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_DE = [
    "null",
    "ein",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
]
_DE_TENS = ["_", "_", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
_FR = [
    "zéro",
    "un",
    "deux",
    "trois",
    "quatre",
    "cinq",
    "six",
    "sept",
    "huit",
    "neuf",
    "dix",
    "onze",
    "douze",
    "treize",
    "quatorze",
    "quinze",
    "seize",
    "dix-sept",
    "dix-huit",
    "dix-neuf",
]
_FR_TENS = [
    "_",
    "_",
    "vingt",
    "trente",
    "quarante",
    "cinquante",
    "soixante",
    "soixante",
    "quatre-vingt",
    "quatre-vingt",
]


def name_of(number: int, language: Language) -> str:
    """The name of a number in words.

    Args:
        number: 0 to 999,999.
        language: ``en`` as in *twenty-one thousand three hundred four*, ``de`` as in *einundzwanzigtausenddreihundertvier*
            (units before tens, one word), ``fr`` as in *vingt et un mille trois cent quatre* (of France: seventy is
            *soixante-dix*).

    Raises:
        ValueError: The number is out of range.
    """
    if not 0 <= number <= _LARGEST:
        raise ValueError(f"{number} has no name here: 0 to {_LARGEST:,} have")
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
    """As a part of a longer word: *ein*, where the number itself is *eins*."""
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
        # No plural before mille: quatre-vingt mille, deux cent mille; and it is not un mille.
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
