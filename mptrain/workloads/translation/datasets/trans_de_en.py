"""Data set ``trans_de_en``: sentences of the German-English dictionary in Debian's package ``trans-de-en``.

The dictionary (Frank Richter, TU Chemnitz) is under the GPL. It is read from its installed file and never copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mptrain.system.errors import DataError
from mptrain.system.fields import BelowOneOrZero, PositiveInt
from mptrain.system.files import expanded
from mptrain.workloads.base.data_files import Faults, OnError
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.text.reading import decoded, read_content
from mptrain.workloads.translation.pair_dataset import Pair, PairDataset, PairOptions, pairs_as_dataset, tidied

_ANNOTATION = re.compile(r"\[[^\]]*\]|\{[^}]*\}|<[^>]*>")
_SENTENCE = re.compile("[.!?][\"')\u201c\u201d\u2019\u00ab\u00bb]*$")  # may be followed by quotation marks
_VARIANT = re.compile(r"[/()|\[\]{}<>…]|\.\.\.|\b(?:etw|jdm|jdn|jds|jd|sth|sb)\.")
_BEFORE_SPACE = re.compile(r"\s+([.,!?])")


@dataclass(frozen=True, kw_only=True)
class DictionaryOptions(PairOptions):
    """Options of the data set ``trans_de_en``, sentences of a dictionary, besides those of `PairOptions`.

    The target language is the other one than ``source``; ``on_error`` is for lines that are not UTF-8.
    """

    path: Path = Path("/usr/share/trans/de-en")
    source: Literal["de", "en"] = "de"
    max_tokens: PositiveInt = 60
    val_share: BelowOneOrZero = 0.05
    test_share: BelowOneOrZero = 0.05
    on_error: OnError = "stop"


@takes_fields_of(DictionaryOptions)
def load_trans_de_en(options: DictionaryOptions) -> PairDataset:
    """Read the examples of the German-English dictionary that are complete sentences in both languages.

    DataError is raised if it is missing or has no sentences, EnvironmentRefused if sentencepiece is not installed.
    """
    path, faults = options.path, Faults(options.on_error)
    pairs = read_sentences(expanded(path), faults)
    if not pairs:
        raise DataError(
            f"{path} has no line 'German | sentence :: English | sentence'", "set dataset.path to the dictionary"
        )
    if options.source == "en":
        pairs = [Pair(pair.target, pair.source) for pair in pairs]
    return pairs_as_dataset("trans_de_en", {"train": pairs}, options, {"train": faults}, {"train": [path]})


def read_sentences(path: Path, faults: Faults) -> list[Pair]:
    """Return the German sentences of the dictionary and their English translations, in the order of the file.

    DataError is raised if it cannot be read, or a line is not UTF-8 and ``faults.on_error`` is ``stop``.
    """
    lines = read_content(path, "apt install trans-de-en, or set dataset.path; dataset=number_words needs no files")
    problems: dict[str, str] = {}
    pairs = [pair for _, line in decoded(path, lines.split(b"\n"), problems) for pair in sentences_in(line)]
    faults.report(problems)
    return pairs


def sentences_in(line: str) -> Iterator[Pair]:
    """Yield the sentence pairs of a dictionary entry ``German | example :: English | example``, German first.

    Examples are in the same order on both sides; ``;`` separates alternatives, of which the first is taken. Text in
    brackets and braces is an annotation and is removed. An example with optional words, variants or placeholders
    (``/``, parentheses, *etw.*, *sb.*) is left out, and so is one without a final punctuation mark.
    """
    german, separator, english = line.partition(" :: ")
    if line.startswith("#") or not separator:
        return
    examples, translations = german.split(" | "), english.split(" | ")
    if len(examples) != len(translations):
        return
    for example, translation in zip(examples, translations, strict=True):
        sentence, other = _sentence(example), _sentence(translation)
        if sentence and other:
            yield Pair(sentence, other)


def _sentence(example: str) -> str:
    """Return the first alternative of an example without annotations; empty if it is not a sentence."""
    if not any(mark in example for mark in ".!?"):  # shortcut for most examples
        return ""
    text = _BEFORE_SPACE.sub(r"\1", tidied(_ANNOTATION.sub(" ", example)))
    first = text.partition(";")[0].strip()
    sentence = first if _SENTENCE.search(first) else text
    whole = _SENTENCE.search(sentence) and not _VARIANT.search(sentence) and " " in sentence
    return sentence if whole else ""
