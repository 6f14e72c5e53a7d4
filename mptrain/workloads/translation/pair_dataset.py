"""The data set that all sources of sentence pairs build: vocabularies, and pairs of token numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mptrain.errors import ConfigError, DataError
from mptrain.workloads.text.subwords import Pieces, Subwords, learn
from mptrain.workloads.translation.pair_split import PairSplit

if TYPE_CHECKING:
    import torch

    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.faulty_samples import Faults
    from mptrain.workloads.translation.pair_partition import Pair


@dataclass(frozen=True)
class Choices:
    """What a user chooses about any pairs; the YAML files explain each."""

    pieces: Pieces
    vocabulary: int
    target_vocabulary: int | None
    shared: bool
    max_tokens: int
    train_samples: int | None
    batch_size: int


@dataclass
class PairDataset:
    """Sentence pairs; meets `mptrain.workloads.base.source.Dataset`.

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

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device; token numbers stay what they are."""
        return batch.to(device)


def pairs_as_dataset(
    name: str, parts: Mapping[str, Sequence[Pair]], choices: Choices, faults: Mapping[str, Faults]
) -> PairDataset:
    """Learn vocabularies from the training pairs and number the tokens of all.

    Pairs that have more than ``max_tokens`` tokens on a side, its end included, are left out of their part and counted.

    Args:
        name: Of the data set.
        parts: Pairs of ``train``, and of ``val`` and ``test`` where there are any.
        choices: The user's.
        faults: What was wrong with a part's files, by part; parts without files of their own have none.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        DataError: There is nothing to train on.
        ConfigError: The vocabulary is too small, or there are fewer pairs than asked for.
    """
    pairs = parts["train"]
    if not pairs:
        raise DataError(f"{name} has no pairs to train on", "choose other data")
    sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
    if choices.shared:
        source = target = learn(name, [*sources, *targets], choices.pieces, choices.vocabulary)
    else:
        source = learn(f"the sources of {name}", sources, choices.pieces, choices.vocabulary)
        wanted = choices.target_vocabulary or choices.vocabulary
        target = learn(f"the targets of {name}", targets, choices.pieces, wanted)
    splits = {
        part: _split(f"{name} {part}", pairs, (source, target), choices, faults.get(part), training=part == "train")
        for part, pairs in parts.items()
    }
    return PairDataset(name, source, target, splits["train"], splits.get("val"), splits.get("test"))


def _split(
    name: str,
    pairs: Sequence[Pair],
    vocabularies: tuple[Subwords, Subwords],
    choices: Choices,
    faults: Faults | None,
    *,
    training: bool,
) -> PairSplit:
    sources = vocabularies[0].encode([pair.source for pair in pairs])
    targets = vocabularies[1].encode([pair.target for pair in pairs])
    both = list(zip(sources, targets, strict=True))
    kept = [pair for pair in both if max(map(len, pair)) <= choices.max_tokens]
    left_out = len(both) - len(kept)
    if not kept:
        longest = max((max(map(len, pair)) for pair in both), default=0)
        raise DataError(
            f"{name}: every one of {len(both)} pairs has more than dataset.max_tokens={choices.max_tokens} tokens",
            f"write dataset.max_tokens={longest}",
        )
    limit = choices.train_samples if training else None
    if limit is not None and limit > len(kept):
        raise ConfigError(
            f"dataset.train_samples={limit}, but {name} has {len(kept)} pairs",
            f"choose at most {len(kept)}, or null for all",
        )
    kept = kept[:limit]
    return PairSplit(
        [source for source, _ in kept],
        [target for _, target in kept],
        choices.batch_size,
        faults=faults,
        left_out=left_out,
    )
