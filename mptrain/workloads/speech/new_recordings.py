"""Recordings to transcribe: resampled and converted to features as those of an evaluation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.sound.alphabet import Alphabet
from mptrain.workloads.sound.audio_files import SUFFIXES, RecordingError, read_recording
from mptrain.workloads.speech.spectrograms import SpectrogramFeatures


class NewRecordings(NewInputs):
    """Audio files."""

    suffixes = frozenset(SUFFIXES)
    unreadable = (RecordingError,)

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(card, {**facts, "decode": Alphabet("".join(card["labels"][1:])).text})
        self.features = SpectrogramFeatures.from_card(card["preparation"])

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return the samples of a recording at the rate of the features, int16 ``[S]``."""
        return read_recording(given, rate=self.features.rate)

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return samples, int16 ``[N, S]``, zero-padded, and their ``lengths``, int64 ``[N]``."""
        extras = {
            "lengths": torch.tensor([len(one) for one in samples]),
            "target_lengths": torch.zeros(len(samples), dtype=torch.int64),
        }
        return Batch(padded(samples), torch.zeros(len(samples), 1, dtype=torch.int64), extras=extras)

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        return self.features.prepare(batch, device)
