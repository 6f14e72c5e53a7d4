"""Prompts to measure and continue: tokenized as those of an evaluation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.text.tokens import Vocabulary


class NewPrompts(NewInputs):
    """Texts, each a line of at least two tokens, padded at their end, which no token before it reads."""

    unreadable = (ValueError,)
    batch_size = 32  # a model reads the whole text again for each token that it writes

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.vocabulary = Vocabulary.from_card(card)
        self._length = int(card["sequence_length"])
        if self._length < 1:
            raise ValueError(f"a window has {self._length} tokens")
        super().__init__(card, {**facts, "decode": self.vocabulary.text})

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
