"""Prompts to measure and continue: tokenized as those of an evaluation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.text.tokens import Vocabulary


class NewPrompts(NewInputs):
    """Texts, each a line of at least two tokens; one by one, because padding would be read as text."""

    unreadable = (ValueError,)
    batch_size = 1

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
        """Return the tokens of one text but the last, int64 ``[1, T]``, and as targets all but the first."""
        (numbers,) = samples
        return Batch(numbers[None, :-1], numbers[None, 1:], (len(numbers) - 1,))
