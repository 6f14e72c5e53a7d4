"""Data set of text: a vocabulary, windows with the same number of tokens, and new prompts to measure and continue."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import Split, SplitDataset, Survey
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.random_streams import sample_order
from mptrain.workloads.base.splits import ShareOptions
from mptrain.workloads.text.pretrained_tokenizer import Tokenizer
from mptrain.workloads.text.tokens import Vocabulary, VocabularyOptions, read_vocabulary

#: Shortest window, in tokens, that a hint proposes for a text that is too short.
_SHORTEST = 8

#: Positions to cut within a document, in order of preference: after an empty line, after a line.
_SEAMS = (re.compile(r"\n[^\S\n]*\n"), re.compile(r"\n"))


@dataclass(frozen=True, kw_only=True)
class TextOptions(VocabularyOptions, ShareOptions):
    """Options shared by the data sets of text for language modelling; the shares are of its characters.

    Attributes:
        stream: Each batch continues the previous one, for networks that carry state; False makes samples independent.
        batch_size: Batch size of the run: number of positions in the text read in parallel.
    """

    sequence_length: PositiveInt = 128
    stream: bool = True
    batch_size: PositiveInt = 32


@dataclass(eq=False)
class TextSplit(Split):
    """Split of a text, int32 ``[L]``, into windows of T tokens, with the next tokens as targets.

    Window i has the tokens from ``i * sequence_length`` on, and one more to predict; ``limit`` None uses all windows. A
    lane is one of B positions at which a batch reads the text in parallel; the next batch continues each lane. With
    ``lanes`` B > 0 (0 makes windows independent), the W windows are arranged for batches of B: batch b has the b-th
    window of each lane, and lane l holds windows ``l * steps`` to ``(l + 1) * steps - 1``, where ``steps = W // B``.
    The remaining windows form a last, short batch, in which every window starts with fresh state. A split with fewer
    windows than twice the lanes, such as a short validation text, carries no state at all.

    ConfigError is raised if the text is shorter than one window or has fewer than ``limit``. Messages have ``name`` and
    ``shares``, the option that sets the length of the text; it is empty if the text has a file of its own.
    """

    name: str
    numbers: Tensor
    sequence_length: int
    lanes: int = field(default=0, kw_only=True)
    limit: int | None = field(default=None, kw_only=True)
    faults: Faults = field(default_factory=Faults, kw_only=True)
    shares: str = field(default="", kw_only=True)

    in_memory = True

    def __post_init__(self) -> None:
        name, length, limit, longest = self.name, self.sequence_length, self.limit, len(self.numbers) - 1
        windows = max(0, longest) // length
        if windows == 0:
            hint = "choose a longer text"
            if longest >= min(_SHORTEST, length // 2):
                hint = f"set dataset.sequence_length={longest} or less"
            raise ConfigError(
                f"{name} has {longest + 1} tokens; a window of dataset.sequence_length={length} needs {length + 1}",
                f"{hint}, or change {self.shares} (0 for no such part)" if self.shares else hint,
            )
        if limit is not None and limit > windows:
            raise ConfigError(
                f"dataset.train_samples={limit}, but {name} has {windows} windows of {length} tokens",
                f"choose at most {windows}, or null for all",
            )
        self._windows = windows if limit is None else limit

    def __len__(self) -> int:
        return self._windows

    @override
    def survey(self) -> Survey:
        return Survey(totals={"tokens": len(self.numbers)})

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Return the order of windows, int64 ``[len(self)]``; with lanes it follows the text whatever the arguments."""
        if not self.lanes:
            return sample_order(len(self), seed, epoch, shuffle=shuffle)
        whole = self._steps * self.lanes
        along = torch.arange(whole).view(self.lanes, self._steps).t().flatten()
        return torch.cat([along, torch.arange(whole, len(self))])

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return a batch with ``inputs`` and ``targets``, int64 ``[N, T]``, and T terms a sample.

        With lanes it also has ``lane``, int64 ``[N]``, the row of the carried state for each window, and
        ``fresh``, bool ``[N]``, true if nothing precedes it. More samples than lanes, some of which would share a
        row, are a ConfigError.
        """
        if self.lanes and len(indices) > self.lanes:
            raise ConfigError(
                f"a batch of {len(indices)} samples exceeds the {self.lanes} lanes of dataset.batch_size={self.lanes}",
                "do not set dataset.batch_size: it follows train.batch_size",
            )
        picked = torch.as_tensor(indices, dtype=torch.int64)
        places = picked[:, None] * self.sequence_length + torch.arange(self.sequence_length + 1)
        rows = self.numbers[places].long()
        counts = (self.sequence_length,) * len(picked)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), counts, self._places(picked))

    def _places(self, picked: Tensor) -> dict[str, Tensor]:
        if not self.lanes:
            return {}
        steps, whole = max(1, self._steps), self._steps * self.lanes
        left_over = picked >= whole
        lane = torch.where(left_over, picked - whole, picked // steps)
        return {"lane": lane, "fresh": left_over | (picked % steps == 0)}

    @property
    def _steps(self) -> int:
        return len(self) // self.lanes


@dataclass(kw_only=True, eq=False)
class TextDataset(SplitDataset[TextSplit]):
    """Data set of text for language modelling: windows, and a vocabulary, learned from the training text or given."""

    vocabulary: Vocabulary | Tokenizer
    sequence_length: int
    lanes: int
    inputs: ClassVar[str] = "prompts"

    @override
    def facts(self) -> dict[str, Any]:
        given = self.vocabulary
        return {
            "vocabulary_size": len(given),
            "sequence_length": self.sequence_length,
            "lanes": self.lanes,
            "decode": given,
            **({"tokenizer_padding": given.padding or 0} if isinstance(given, Tokenizer) else {}),  # windows have none
        }

    @override
    def card(self) -> dict[str, Any]:
        return {**self.vocabulary.card(), **super().card()}

    def describe(self) -> str:
        """Return window length and vocabulary size: ``128 words (vocabulary 2,476)``."""
        given = self.vocabulary
        own = f"tokens of {given.name}" if isinstance(given, Tokenizer) else "words"
        kind = "characters" if isinstance(given, Vocabulary) and given.tokens == "char" else own
        return f"{self.sequence_length} {kind} (vocabulary {len(given):,})"


def windows_of(
    name: str,
    parts: Mapping[str, str],
    options: TextOptions,
    faults: Mapping[str, Faults],
    files: Mapping[str, Sequence[Path]],
    learn_from: str | None = None,
) -> TextDataset:
    """Make a data set from the texts of ``train`` and optionally ``val`` and ``test``.

    ``faults`` and ``files`` are those of the parts that have files of their own. ``learn_from`` is the text of which
    the vocabulary is learned, None for the training text. DataError is raised without text to train on, ConfigError if
    a part is shorter than one window.
    """
    vocabulary = options.learn(f"{name} train", parts["train"] if learn_from is None else learn_from)
    lanes = options.batch_size if options.stream else 0
    splits = {
        part: TextSplit(
            f"{name} {part}",
            vocabulary.numbers(text),
            options.sequence_length,
            lanes=lanes,
            limit=options.train_samples if part == "train" else None,
            faults=faults.get(part, Faults()),
            shares="" if part == "train" or part in faults else f"dataset.{part}_share",
        )
        for part, text in parts.items()
    }
    return TextDataset(
        name=name,
        splits=splits,
        files=files,
        vocabulary=vocabulary,
        sequence_length=options.sequence_length,
        lanes=lanes,
    )


def joined(documents: Iterable[str]) -> str:
    """Join documents into one text in which each document ends with a line end."""
    return "".join(document if document.endswith("\n") else document + "\n" for document in documents)


def divide(documents: Sequence[str], val_share: float, test_share: float) -> dict[str, str]:
    """Cut a text into ``train``, ``val`` and ``test``, in this order; parts with a share of 0 are left out.

    A cut is at the document end nearest to the exact position. If that is further away than half of the share, the cut
    is after an empty line within the document, otherwise after a line, otherwise at the exact position. ConfigError is
    raised if the shares (of all characters) leave no text to train on.
    """
    if val_share + test_share >= 1:
        raise ConfigError(
            f"dataset.val_share={val_share:g} and dataset.test_share={test_share:g} leave no text to train on",
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
    for positions in (ends, *seams):
        near = [position for position in positions if low < position < high]
        if near:
            return min(near, key=lambda position: abs(position - wanted))
    return wanted


class NewPrompts(NewInputs):
    """Texts, each a line of at least two tokens, padded at their end; `Language.predict` sorts them by length."""

    unreadable = (ValueError,)
    batch_size = 4096  # as many as are known at a time

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.vocabulary = read_vocabulary(card)
        self._length = int(card["sequence_length"])
        if self._length < 1:
            raise ValueError(f"a window has {self._length} tokens")
        super().__init__(card, {**facts, "decode": self.vocabulary})

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return the last token numbers of a text, int64 ``[T]``, at most one more than a window of the run has."""
        numbers = self.vocabulary.numbers(given).long()
        if len(numbers) < 2:
            raise ValueError("it has fewer than two tokens")
        if len(numbers) > self._length + 1:
            faults.remarks[given] = f"its last {self._length + 1:,} of {len(numbers):,} tokens were used"
        return numbers[-self._length - 1 :]

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return the tokens of texts but the last of each, int64 ``[N, T]``, and as targets all but the first."""
        inputs, targets = padded([numbers[:-1] for numbers in samples]), padded([numbers[1:] for numbers in samples])
        return Batch(inputs, targets, tuple(len(numbers) - 1 for numbers in samples))
