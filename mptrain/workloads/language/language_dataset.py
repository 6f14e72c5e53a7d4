"""The data set that all sources of text build: a vocabulary, and windows of equally many tokens.

Each window has the window one token further on as its targets. Windows either stand for themselves or continue one another:
then the batches of an epoch go through the text in *lanes*, and a network that carries state reads on where the batch before
left off. The parts of a text are contiguous, and cut between documents where that comes near to the shares asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mptrain.errors import ConfigError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.dataset import Dataset, Split
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.random_streams import sample_order
from mptrain.workloads.text.tokens import Tokens, Vocabulary, learn

#: The shortest window, in tokens, that a hint proposes for a text that is too short.
_SHORTEST = 8

#: Where to cut a document, best first: after an empty line, after a line.
_SEAMS = (re.compile(r"\n[^\S\n]*\n"), re.compile(r"\n"))


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of any text.

    Attributes:
        tokens: ``word``: words, numbers and punctuation marks, the same mark several times over being one;
            ``char``: characters; ``space``: what stands between spaces, and line ends.
        sequence_length: Tokens of a sample.
        stream: Each batch continues the one before, for networks that carry state; False makes samples independent.
        min_count: Tokens that occur less often in the training text are all the same unknown one.
        max_vocabulary: At most so many tokens have numbers, the most frequent; None for no limit.
        val_share: Share of the text held out for validation, where no file is for it.
        test_share: Share of the text to test on, where no file is for it.
        train_samples: Train on so many samples only; None trains on all.
        batch_size: Of the run: how many places of the text are read at a time.
    """

    tokens: Tokens = "word"
    sequence_length: PositiveInt = 128
    stream: bool = True
    min_count: PositiveInt = 2
    max_vocabulary: PositiveInt | None = None
    val_share: BelowOneOrZero = 0.1
    test_share: BelowOneOrZero = 0.1
    train_samples: PositiveInt | None = None
    batch_size: PositiveInt = 32


class TextSplit(Split):
    """Windows of one text. Window i has the tokens from ``i * sequence_length`` on, and one more to predict.

    With ``lanes`` B > 0, the W windows are laid out for batches of B: lane l of B holds the windows ``l * steps`` to
    ``(l + 1) * steps - 1`` where ``steps = W // B``; batch b has the b-th window of each lane; the W - B * steps
    windows that are left over make up the last, short batch, and begin anew each. In a split of fewer windows than twice
    the lanes, as a short validation text is, nothing is carried at all.

    Args:
        name: What to call it in messages, such as ``python_docs train``.
        numbers: Token numbers, int32 ``[L]``.
        sequence_length: Tokens of a window, T.
        lanes: The batch size where windows continue one another; 0 where they stand for themselves.
        limit: Use so many windows only; None uses all.
        faults: What was wrong with the text.
        shares: The option that made the text as long as it is, for messages; empty where it has a file of its own.

    Raises:
        ConfigError: The text is shorter than one window, or has fewer windows than ``limit``.
    """

    in_memory = True

    def __init__(
        self,
        name: str,
        numbers: Tensor,
        sequence_length: int,
        *,
        lanes: int = 0,
        limit: int | None = None,
        faults: Faults | None = None,
        shares: str = "",
    ) -> None:
        windows = max(0, len(numbers) - 1) // sequence_length
        if windows == 0:
            hint = "choose a longer text: so few tokens teach nothing"
            if (longest := len(numbers) - 1) >= min(_SHORTEST, sequence_length // 2):
                hint = f"write dataset.sequence_length={longest} or less"
            raise ConfigError(
                f"{name} has {len(numbers)} tokens; a window of dataset.sequence_length={sequence_length} takes "
                f"{sequence_length + 1}",
                f"{hint}, or change {shares} (0 for no such part)" if shares else hint,
            )
        if limit is not None and limit > windows:
            raise ConfigError(
                f"dataset.train_samples={limit}, but {name} has {windows} windows of {sequence_length} tokens",
                f"choose at most {windows}, or null for all",
            )
        self.faults = faults or Faults()
        self.numbers = numbers
        self.sequence_length = sequence_length
        self.lanes = lanes
        self._windows = windows if limit is None else limit

    def __len__(self) -> int:
        return self._windows

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Indices of one epoch; along the lanes, whatever the other arguments say, where there are any."""
        if not self.lanes:
            return sample_order(len(self), seed, epoch, shuffle=shuffle)
        whole = self._steps * self.lanes
        along = torch.arange(whole).view(self.lanes, self._steps).t().flatten()
        return torch.cat([along, torch.arange(whole, len(self))])

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The windows with these indices.

        Returns:
            ``inputs`` and ``targets`` int64 ``[N, T]``, T terms a sample. With lanes also ``lane``, int64 ``[N]``: the
            row of the carried state that belongs to a window, and ``fresh``, bool ``[N]``: nothing precedes it.

        Raises:
            ConfigError: There are more samples than lanes, so that some would share a row.
        """
        if self.lanes and len(indices) > self.lanes:
            raise ConfigError(
                f"a batch of {len(indices)} samples does not fit the {self.lanes} lanes of dataset.batch_size={self.lanes}",
                "leave dataset.batch_size out: it follows train.batch_size",
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


@dataclass
class TextDataset(Dataset):
    """Windows of text; meets `mptrain.workloads.base.dataset.Dataset`.

    Attributes:
        name: As in the configuration.
        vocabulary: The tokens by number.
        sequence_length: Tokens of a window.
        lanes: Rows of state that a network carries from batch to batch; 0 where windows stand for themselves.
        train: Training windows.
        val: Validation windows, or None.
        test: Test windows, or None.
        files: The files that each part was read from, by part; empty where there were none.
    """

    name: str
    vocabulary: Vocabulary
    sequence_length: int
    lanes: int
    train: TextSplit
    val: TextSplit | None
    test: TextSplit | None
    files: dict[str, list[str]] = field(default_factory=dict)
    workers = 0

    def facts(self) -> dict[str, Any]:
        """``vocabulary_size``, ``sequence_length``, ``lanes`` and ``decode``."""
        return {
            "vocabulary_size": len(self.vocabulary),
            "sequence_length": self.sequence_length,
            "lanes": self.lanes,
            "decode": self.vocabulary.text,
        }

    def card(self) -> dict[str, Any]:
        """The vocabulary, what a token is, and the files that were read."""
        return {"labels": list(self.vocabulary.entries), "tokens": self.vocabulary.tokens, "files": self.files}

    def describe(self) -> str:
        """Length of a window and size of the vocabulary: ``128 words (vocabulary 2,476)``."""
        kind = "characters" if self.vocabulary.tokens == "char" else "words"
        return f"{self.sequence_length} {kind} (vocabulary {len(self.vocabulary):,})"


def windows_of(name: str, parts: Mapping[str, str], options: TextOptions, faults: Mapping[str, Faults]) -> TextDataset:
    """Number the tokens of each part and cut them into windows.

    Args:
        name: Of the data set.
        parts: Text of ``train``, and of ``val`` and ``test`` where there are any.
        options: The user's.
        faults: What was wrong with a part's files, by part; parts without files of their own have none.

    Raises:
        DataError: There is nothing to train on.
        ConfigError: A part is shorter than one window.
    """
    title = f"{name} train"
    vocabulary = learn(title, parts["train"], options.tokens, options.min_count, options.max_vocabulary)
    lanes = options.batch_size if options.stream else 0
    splits = {
        part: TextSplit(
            f"{name} {part}",
            vocabulary.numbers(text),
            options.sequence_length,
            lanes=lanes,
            limit=options.train_samples if part == "train" else None,
            faults=faults.get(part),
            shares="" if part == "train" or part in faults else f"dataset.{part}_share",
        )
        for part, text in parts.items()
    }
    return TextDataset(
        name,
        vocabulary,
        options.sequence_length,
        lanes,
        splits["train"],
        splits.get("val"),
        splits.get("test"),
    )


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
