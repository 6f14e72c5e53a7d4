"""Data set of sentence pairs for translation: vocabularies of subwords, pairs of token sequences, and new sentences.

Parts that are held out have no source sentence in common with the training pairs.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import Split, SplitDataset, Survey
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.base.splits import SPLIT_SEED, ShareOptions, first_samples, hold_out, share_sizes
from mptrain.workloads.text.subwords import Pieces, Subwords, learn
from mptrain.workloads.text.tokens import RaggedTokens, bucketed_order


@dataclass(frozen=True, kw_only=True)
class PairOptions(ShareOptions):
    """Options shared by the data sets of sentence pairs; the shares are of the source sentences.

    Attributes:
        pieces: Kind of tokens: ``bpe`` or ``unigram`` (subwords), ``char`` or ``word``.
        vocabulary: Vocabulary size of the source language, or of the ``shared`` vocabulary.
        target_vocabulary: Vocabulary size of the target language; None for the same size.
        max_tokens: Largest number of tokens of a sentence, including the end token; longer pairs are left out.
    """

    pieces: Pieces = "bpe"
    vocabulary: PositiveInt = 4000
    target_vocabulary: PositiveInt | None = None
    shared: bool = False
    max_tokens: PositiveInt = 100
    batch_size: PositiveInt = 32


@dataclass(frozen=True)
class Pair:
    """Sentence and its translation."""

    source: str
    target: str


def tidied(text: str) -> str:
    """Normalise a sentence: composed characters (Unicode NFC), and any white space collapsed to one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def distinct(pairs: Iterable[Pair]) -> list[Pair]:
    """Return each sentence pair once, in the order of first occurrence."""
    return list(dict.fromkeys(pairs))


def hold_out_pairs(name: str, pairs: Sequence[Pair], shares: Mapping[str, float]) -> dict[str, list[Pair]]:
    """Divide pairs into training, validation and test parts, the same in every run; all pairs of a source in one part.

    Shares are of the distinct sources; parts with a share of 0 are absent. ConfigError is raised if no source would be
    left to train on.
    """
    by_source: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_source.setdefault(pair.source, []).append(pair)
    groups = list(by_source.values())
    # The test part comes first, so that it is the same with any val_share.
    sizes = share_sizes({"test": shares["test"], "val": shares["val"]}, len(groups))
    parts = hold_out(permutation(len(groups), SPLIT_SEED), {**sizes, "train": None}, f"source sentences of {name}")
    return {
        part: [pair for index in sorted(indices.tolist()) for pair in groups[index]] for part, indices in parts.items()
    }


@dataclass(eq=False)
class PairSplit(Split):
    """Split of sentence pairs, in batches of similar length; their end tokens count in the loss."""

    sources: RaggedTokens
    targets: RaggedTokens
    batch_size: int
    faults: Faults
    left_out: int

    in_memory = True

    def __len__(self) -> int:
        return len(self.sources.lengths)

    @property
    def skipped(self) -> int:
        """Number of pairs that were left out: unusable lines and pairs that were too long."""
        return len(self.faults.unusable) + self.left_out

    @override
    def survey(self) -> Survey:
        return Survey(lengths={"source tokens": self.sources.lengths, "target tokens": self.targets.lengths})

    @override
    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        lengths = self.sources.lengths + self.targets.lengths
        return bucketed_order(lengths, self.batch_size, seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return padded sentences, int64 ``[N, S]``, their ``source_lengths``, and translations, int64 ``[N, T]``.

        The loss averages over the target tokens of all samples, so a sample counts as often as it has target tokens.
        """
        picked = torch.as_tensor(indices, dtype=torch.int64)
        counts = tuple(self.targets.lengths[picked].tolist())
        more = {"source_lengths": self.sources.lengths[picked]}
        return Batch(self.sources.padded(picked), self.targets.padded(picked), counts, more)


@dataclass(kw_only=True, eq=False)
class PairDataset(SplitDataset[PairSplit]):
    """Data set of sentence pairs for translation; ``source`` and ``target`` are one object for a shared vocabulary."""

    source: Subwords
    target: Subwords
    repeated: int
    inputs: ClassVar[str] = "sentences"

    @override
    def facts(self) -> dict[str, Any]:
        return {
            "source_vocabulary_size": len(self.source),
            "target_vocabulary_size": len(self.target),
            "shared_vocabulary": self.source is self.target,
            "decode": self.target.decode,
            "decode_source": self.source.decode,
        }

    @override
    def card(self) -> dict[str, Any]:
        sides = (
            {"source": self.source} if self.source is self.target else {"source": self.source, "target": self.target}
        )
        return {
            "labels": [piece for side in sides.values() for piece in side.pieces()],
            "sentencepiece": {name: side.portable() for name, side in sides.items()},
            "too_long": {part: split.left_out for part, split in self.splits.items()},
            "repeated": self.repeated,
            **super().card(),
        }

    def describe(self) -> str:
        """Return, for example, ``pairs in a vocabulary of 4,000 pieces, 2 left out, 31 repeated, 5 too long``."""
        sizes = f"a vocabulary of {len(self.source):,} pieces"
        if self.source is not self.target:
            sizes = f"vocabularies of {len(self.source):,} and {len(self.target):,} pieces"
        too_long = sum(split.left_out for split in self.splits.values())
        unusable = sum(split.skipped for split in self.splits.values()) - too_long
        counted = {"left out": unusable, "repeated": self.repeated, "too long": too_long}
        return f"pairs in {sizes}" + "".join(f", {count:,} {what}" for what, count in counted.items() if count)


def pairs_as_dataset(
    name: str,
    given: Mapping[str, Sequence[Pair]],
    options: PairOptions,
    faults: Mapping[str, Faults],
    files: Mapping[str, Sequence[Path]],
) -> PairDataset:
    """Make a translation data set: hold out parts without files of their own, learn vocabularies, tokenize all pairs.

    Repeated pairs of a part, and pairs with more than ``max_tokens`` tokens on a side, including the end token, are
    left out and counted. EnvironmentRefused is raised if sentencepiece is not installed, DataError without pairs to
    train on, and ConfigError if the vocabulary is too small, or there are fewer pairs than ``train_samples``.
    """
    parts = {part: distinct(pairs) for part, pairs in given.items()}
    repeated = sum(map(len, given.values())) - sum(map(len, parts.values()))
    parts |= hold_out_pairs(name, parts["train"], options.shares(given))
    sources, targets = ([getattr(pair, side) for pair in parts["train"]] for side in ("source", "target"))
    if options.shared:
        source = target = learn(name, [*sources, *targets], options.pieces, options.vocabulary)
    else:
        source = learn(f"the sources of {name}", sources, options.pieces, options.vocabulary)
        wanted = options.target_vocabulary or options.vocabulary
        target = learn(f"the targets of {name}", targets, options.pieces, wanted)
    splits = {
        part: _split(
            f"{name} {part}", pairs, (source, target), options, faults.get(part, Faults()), training=part == "train"
        )
        for part, pairs in parts.items()
    }
    return PairDataset(name=name, splits=splits, files=files, source=source, target=target, repeated=repeated)


def _split(
    name: str,
    pairs: Sequence[Pair],
    vocabularies: tuple[Subwords, Subwords],
    options: PairOptions,
    faults: Faults,
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
            f"{name}: all {len(both)} pairs have more than dataset.max_tokens={options.max_tokens} tokens",
            f"set dataset.max_tokens={longest}",
        )
    if training:
        kept = first_samples(kept, options.train_samples)
    source, target = (RaggedTokens(side) for side in zip(*kept, strict=True))
    return PairSplit(source, target, options.batch_size, faults, left_out)


class NewSentences(NewInputs):
    """Sentences, each a line."""

    unreadable = (ValueError,)

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        sides = {name: Subwords(base64.b64decode(text)) for name, text in card["sentencepiece"].items()}
        self.source, target = sides["source"], sides.get("target", sides["source"])
        super().__init__(card, {**facts, "decode": target.decode, "decode_source": self.source.decode})

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return the token numbers of a sentence with the end, int64 ``[S]``; raise ValueError if it is empty."""
        if not (sentence := tidied(given)):
            raise ValueError("it is empty")
        return torch.tensor(self.source.encode([sentence])[0])

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return padded sentences, int64 ``[N, S]``, and their ``source_lengths``, int64 ``[N]``."""
        lengths = torch.tensor([len(sentence) for sentence in samples])
        nothing = torch.zeros(len(samples), 1, dtype=torch.int64)
        return Batch(padded(samples), nothing, extras={"source_lengths": lengths})
