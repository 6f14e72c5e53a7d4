"""Texts to classify: tokenized and cut as those of an evaluation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.text.labelled_dataset import class_tokens
from mptrain.workloads.text.tokens import Vocabulary


class NewTexts(NewInputs):
    """Texts, each a line."""

    unreadable = (ValueError,)

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        count, length = int(card["num_classes"]), int(card["sequence_length"])
        names = tuple(map(str, card["labels"][:count]))  # which the checkpoint knows by their digest
        if [*names] != card["class_names"] or length < 1:
            raise ValueError("classes, labels and length do not fit together")
        super().__init__(card, {**facts, "class_names": names})
        self.vocabulary = Vocabulary.from_card({**card, "labels": card["labels"][count:]})
        self._length = length

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return the token numbers of a text, int64 ``[T]``; raise ValueError if it has none."""
        numbers = class_tokens(self.vocabulary, given, self._length)
        if not len(numbers):
            raise ValueError("it has no token")
        return numbers

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return token numbers padded at the end, int64 ``[N, T]``."""
        return Batch(padded(samples), torch.zeros(len(samples), dtype=torch.int64))
