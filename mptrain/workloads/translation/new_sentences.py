"""Sentences to translate: normalised and tokenized as those of an evaluation are."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.text.subwords import Subwords
from mptrain.workloads.translation.pair_dataset import tidied


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
        lengths = torch.tensor([len(one) for one in samples])
        nothing = torch.zeros(len(samples), 1, dtype=torch.int64)
        return Batch(padded(samples), nothing, extras={"source_lengths": lengths})
