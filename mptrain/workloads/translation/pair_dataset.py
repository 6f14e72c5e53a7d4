"""The data set that all sources of sentence pairs build: vocabularies, and pairs of token numbers.

Pairs are divided into parts that have no source sentence in common, and padded to the longest of a batch.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain.errors import ConfigError, DataError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.dataset import Dataset, Split
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.text.buckets import bucketed_order
from mptrain.workloads.text.subwords import PAD, Pieces, Subwords, learn

_FIXED = 20180430  # names the one permutation in use; changing it changes every split


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Options of any sentence pairs.

    Attributes:
        pieces: What a token is.
        vocabulary: Tokens of the source language, or of both where they are shared.
        target_vocabulary: Tokens of the target language; None for as many.
        shared: One vocabulary for both languages.
        max_tokens: Pairs with more on a side are left out.
        val_share: Share of the source sentences for validation, where no file is for it.
        test_share: Share of the source sentences to test on, where no file is for it.
        train_samples: Train on so many pairs only; None trains on all.
        batch_size: Of the run.
    """

    pieces: Pieces = "bpe"
    vocabulary: PositiveInt = 4000
    target_vocabulary: PositiveInt | None = None
    shared: bool = False
    max_tokens: PositiveInt = 100
    val_share: BelowOneOrZero = 0.1
    test_share: BelowOneOrZero = 0.1
    train_samples: PositiveInt | None = None
    batch_size: PositiveInt = 32


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


class RaggedTokens:
    """Rows of token numbers of different lengths, one behind the other in one tensor.

    Args:
        rows: Each with at least one number.

    Attributes:
        lengths: Of each row, int64 ``[N]``.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._numbers = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        self._starts = self.lengths.cumsum(0) - self.lengths

    def padded(self, indices: Tensor) -> Tensor:
        """Some rows, with `PAD` behind the shorter ones; int64 ``[len(indices), longest]``."""
        lengths = self.lengths[indices]
        places = torch.arange(int(lengths.max()))
        there = places < lengths[:, None]
        numbers = self._numbers[torch.where(there, self._starts[indices][:, None] + places, 0)].long()
        return numbers.masked_fill(~there, PAD)


class PairSplit(Split):
    """One part of a set of sentence pairs. Batches hold pairs of similar length.

    Args:
        sources: Token numbers of each sentence, with an end.
        targets: Of its translation, with an end; these ends are terms of the loss.
        batch_size: Of the run.
        faults: What was wrong with lines of the files.
        left_out: How many pairs were too long.
    """

    in_memory = True

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        batch_size: int,
        *,
        faults: Faults | None = None,
        left_out: int = 0,
    ) -> None:
        self.sources, self.targets = RaggedTokens(sources), RaggedTokens(targets)
        self.batch_size = batch_size
        self.faults = faults or Faults()
        self.left_out = left_out

    def __len__(self) -> int:
        return len(self.sources.lengths)

    @property
    def skipped(self) -> int:
        """How many pairs were left out: lines that could not be used, and pairs that were too long."""
        return len(self.faults.found) + self.left_out

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Batches of similar length; see `mptrain.workloads.base.dataset.Split.order`."""
        lengths = self.sources.lengths + self.targets.lengths
        return bucketed_order(lengths, self.batch_size, seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The pairs with these indices.

        Returns:
            ``inputs`` int64 ``[N, S]`` and ``targets`` int64 ``[N, T]``, padded behind; ``source_lengths`` int64 ``[N]``. A
            sample has as many terms as its target has tokens.
        """
        picked = torch.as_tensor(indices, dtype=torch.int64)
        counts = tuple(self.targets.lengths[picked].tolist())
        more = {"source_lengths": self.sources.lengths[picked]}
        return Batch(self.sources.padded(picked), self.targets.padded(picked), counts, more)


@dataclass
class PairDataset(Dataset):
    """Sentence pairs; meets `mptrain.workloads.base.dataset.Dataset`.

    Attributes:
        name: As in the configuration.
        source: Vocabulary of the sentences.
        target: Vocabulary of the translations; the same where it is shared.
        train: Training pairs.
        val: Validation pairs, or None.
        test: Test pairs, or None.
        files: The files that each part was read from, by part; empty where there were none.
        repeated: How many pairs were left out because their part had them already.
    """

    name: str
    source: Subwords
    target: Subwords
    train: PairSplit
    val: PairSplit | None
    test: PairSplit | None
    files: dict[str, list[str]] = field(default_factory=dict)
    repeated: int = 0
    workers = 0

    def facts(self) -> dict[str, Any]:
        """Sizes of both vocabularies, whether they are one, and what turns token numbers into text."""
        return {
            "source_vocabulary_size": len(self.source),
            "target_vocabulary_size": len(self.target),
            "shared_vocabulary": self.source is self.target,
            "decode": self.target.decode,
            "decode_source": self.source.decode,
        }

    def card(self) -> dict[str, Any]:
        """Both vocabularies with what sentencepiece needs to use them, pairs left out, and the files that were read."""
        sides = (
            {"source": self.source} if self.source is self.target else {"source": self.source, "target": self.target}
        )
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {
            "labels": [piece for side in sides.values() for piece in side.pieces()],
            "sentencepiece": {name: side.portable() for name, side in sides.items()},
            "too_long": {part: split.left_out for part, split in splits.items() if split is not None},
            "repeated": self.repeated,
            "files": self.files,
        }

    def describe(self) -> str:
        """Sizes of the vocabularies, and how many lines were left out, and pairs repeated and too long, where any were."""
        sizes = f"a vocabulary of {len(self.source):,} pieces"
        if self.source is not self.target:
            sizes = f"vocabularies of {len(self.source):,} and {len(self.target):,} pieces"
        splits = [split for split in (self.train, self.val, self.test) if split is not None]
        too_long = sum(split.left_out for split in splits)
        unusable = sum(split.skipped for split in splits) - too_long
        counted = {"left out": unusable, "repeated": self.repeated, "too long": too_long}
        return f"pairs in {sizes}" + "".join(f", {count:,} {what}" for what, count in counted.items() if count)


def pairs_as_dataset(
    name: str,
    given: Mapping[str, Sequence[Pair]],
    options: PairOptions,
    faults: Mapping[str, Faults],
    files: Mapping[str, Sequence[Path]],
) -> PairDataset:
    """Divide training pairs where there are none for another part, learn vocabularies from them and number the tokens of all.

    A pair that a part has several times is taken once, and its repetitions are counted. Pairs that have more than
    ``max_tokens`` tokens on a side, its end included, are left out of their part and counted.

    Args:
        name: Of the data set.
        given: Pairs of ``train``, and of ``val`` and ``test`` where they are not to be divided from these.
        options: The user's.
        faults: What was wrong with a part's files, by part; parts without files of their own have none.
        files: The files that each part was read from.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        DataError: There is nothing to train on.
        ConfigError: The vocabulary is too small, or there are fewer pairs than asked for.
    """
    parts = {part: distinct(pairs) for part, pairs in given.items()}
    repeated = sum(map(len, given.values())) - sum(map(len, parts.values()))
    shares = {"val": options.val_share, "test": options.test_share}
    shares = {part: 0.0 if part in given else share for part, share in shares.items()}
    parts = divide_pairs(parts.pop("train"), shares["val"], shares["test"]) | parts
    sources, targets = ([getattr(pair, side) for pair in parts["train"]] for side in ("source", "target"))
    if options.shared:
        source = target = learn(name, [*sources, *targets], options.pieces, options.vocabulary)
    else:
        source = learn(f"the sources of {name}", sources, options.pieces, options.vocabulary)
        wanted = options.target_vocabulary or options.vocabulary
        target = learn(f"the targets of {name}", targets, options.pieces, wanted)
    splits = {
        part: _split(f"{name} {part}", pairs, (source, target), options, faults.get(part), training=part == "train")
        for part, pairs in parts.items()
    }
    return PairDataset(
        name,
        source,
        target,
        splits["train"],
        splits.get("val"),
        splits.get("test"),
        {part: [str(file) for file in of_part] for part, of_part in files.items()},
        repeated,
    )


def _split(
    name: str,
    pairs: Sequence[Pair],
    vocabularies: tuple[Subwords, Subwords],
    options: PairOptions,
    faults: Faults | None,
    *,
    training: bool,
) -> PairSplit:
    sources = vocabularies[0].encode([pair.source for pair in pairs])
    targets = vocabularies[1].encode([pair.target for pair in pairs])
    both = list(zip(sources, targets, strict=True))
    kept = [pair for pair in both if max(map(len, pair)) <= options.max_tokens]
    left_out = len(both) - len(kept)
    if not kept:
        longest = max((max(map(len, pair)) for pair in both), default=0)
        raise DataError(
            f"{name}: every one of {len(both)} pairs has more than dataset.max_tokens={options.max_tokens} tokens",
            f"set dataset.max_tokens={longest}",
        )
    limit = options.train_samples if training else None
    if limit is not None and limit > len(kept):
        raise ConfigError(
            f"dataset.train_samples={limit}, but {name} has {len(kept)} pairs",
            f"choose at most {len(kept)}, or null for all",
        )
    kept = kept[:limit]
    return PairSplit(
        [source for source, _ in kept],
        [target for _, target in kept],
        options.batch_size,
        faults=faults,
        left_out=left_out,
    )
