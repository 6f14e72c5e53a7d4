"""The data set that all sources of text build: a vocabulary, and windows of token numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mptrain.workloads.language.text_windows import TextSplit
from mptrain.workloads.text.tokens import Tokens, Vocabulary, learn

if TYPE_CHECKING:
    import torch

    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.faulty_samples import Faults


@dataclass
class TextDataset:
    """Windows of text; meets `mptrain.workloads.base.source.Dataset`.

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

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device; token numbers stay what they are."""
        return batch.to(device)


@dataclass(frozen=True)
class Choices:
    """What a user chooses about any text; the YAML files explain each."""

    tokens: Tokens
    sequence_length: int
    stream: bool
    min_count: int
    max_vocabulary: int | None
    val_share: float
    test_share: float
    train_samples: int | None
    batch_size: int


def windows_of(name: str, parts: Mapping[str, str], choices: Choices, faults: Mapping[str, Faults]) -> TextDataset:
    """Number the tokens of each part and cut them into windows.

    Args:
        name: Of the data set.
        parts: Text of ``train``, and of ``val`` and ``test`` where there are any.
        choices: The user's.
        faults: What was wrong with a part's files, by part; parts without files of their own have none.

    Raises:
        DataError: There is nothing to train on.
        ConfigError: A part is shorter than one window.
    """
    title = f"{name} train"
    vocabulary = learn(title, parts["train"], choices.tokens, choices.min_count, choices.max_vocabulary)
    lanes = choices.batch_size if choices.stream else 0
    splits = {
        part: TextSplit(
            f"{name} {part}",
            vocabulary.numbers(text),
            choices.sequence_length,
            lanes=lanes,
            limit=choices.train_samples if part == "train" else None,
            faults=faults.get(part),
            shares="" if part == "train" or part in faults else f"dataset.{part}_share",
        )
        for part, text in parts.items()
    }
    return TextDataset(
        name,
        vocabulary,
        choices.sequence_length,
        lanes,
        splits["train"],
        splits.get("val"),
        splits.get("test"),
    )
