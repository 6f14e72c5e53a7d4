"""Recordings as samples of training: windows of a fixed length, each with what was heard before it.

Every sample of a recording is a target exactly once. Reading files is left to who makes the splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.faulty_samples import Faults, none_usable
from mptrain.workloads.base.independent import IndependentSamples
from mptrain.workloads.sound.audio_files import RecordingError


@dataclass(frozen=True)
class Clip:
    """A recording.

    Attributes:
        name: What to call it in messages, and what it is read by: a path.
        samples: How many there are, as far as is known before it has been read.
        speaker: Number of who speaks, or of the kind of sound.
        letters: Numbers of the letters of what is said; empty where nothing is known.
    """

    name: str
    samples: int
    speaker: int = 0
    letters: tuple[int, ...] = ()


class SoundSplit(IndependentSamples):
    """Windows of recordings.

    A recording of S samples has ``ceil(S / window)`` windows, the last of which may be short. The network hears
    ``context + 1`` samples before the first one it predicts; before a recording begins there is silence.

    Args:
        name: What to call it in messages, such as ``asterisk_audio train``.
        clips: The recordings.
        read: From a name to samples, int16 ``[S]``; raises `RecordingError`.
        window: Samples that are predicted.
        context: Samples that are heard before, and not predicted.
        faults: What was wrong with recordings.
        in_memory: Reading only copies.

    Raises:
        DataError: There is no recording.
    """

    def __init__(
        self,
        name: str,
        clips: Sequence[Clip],
        read: Callable[[str], Tensor],
        window: int,
        context: int,
        faults: Faults,
        *,
        in_memory: bool,
    ) -> None:
        if not clips:
            raise DataError(f"{name}: there is no usable recording", "check the data, or choose dataset=made_up_sounds")
        super().__init__(faults)
        self.clips = tuple(clips)
        self.window = window
        self.context = context
        self.in_memory = in_memory
        self._read = read
        counts = torch.tensor([-(-clip.samples // window) for clip in self.clips])
        self._clip_of = torch.repeat_interleave(torch.arange(len(self.clips)), counts)
        self._begins = (torch.arange(len(self._clip_of)) - (counts.cumsum(0) - counts)[self._clip_of]) * window

    def __len__(self) -> int:
        return len(self._clip_of)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The windows with these indices; what cannot be read makes the batch smaller where that is asked for.

        Returns:
            ``inputs``: samples, int16 ``[N, context + 1 + window]``, 0 before a recording begins and behind its end;
            ``targets``: int64 ``[N, 0]``, since `SoundDataset.prepare` makes them of the inputs; in ``more``, int64:
            ``begins``, the place of a window in its recording, ``lengths``, how many samples are predicted, ``clip_lengths``
            and ``speaker``, all ``[N]``, and ``text`` ``[N, letters]``, 0 behind the last letter, and ``letters``, how
            many there are, ``[N]``.
        """
        rows, lengths, begins, clips, wholes = [], [], [], [], []
        for index in indices:
            clip, begin = self.clips[int(self._clip_of[index])], int(self._begins[index])
            try:
                wave = self._read(clip.name)
            except RecordingError as error:
                self.faults.report({clip.name: error.reason})
                continue
            if len(wave) <= begin:
                self.faults.report({clip.name: f"has {len(wave)} samples, and its header promised {clip.samples}"})
                continue
            rows.append(self._around(wave, begin))
            lengths.append(min(self.window, len(wave) - begin))
            begins.append(begin)
            clips.append(clip)
            wholes.append(len(wave))
        if not rows:
            raise none_usable("recording", self.clips[int(self._clip_of[indices[0]])].name)
        more = {
            "begins": torch.tensor(begins),
            "lengths": torch.tensor(lengths),
            "clip_lengths": torch.tensor(wholes),
            "speaker": torch.tensor([clip.speaker for clip in clips]),
            "text": padded([torch.tensor(clip.letters, dtype=torch.int64) for clip in clips]),
            "letters": torch.tensor([len(clip.letters) for clip in clips]),
        }
        return Batch(torch.stack(rows), torch.zeros(len(rows), 0, dtype=torch.int64), tuple(lengths), more)

    def _around(self, wave: Tensor, begin: int) -> Tensor:
        """The samples from ``context + 1`` before a place to ``window`` behind it, zeros where there are none."""
        row = torch.zeros(self.context + 1 + self.window, dtype=torch.int16)
        first = begin - self.context - 1
        there = wave[max(0, first) : begin + self.window]
        row[max(0, -first) : max(0, -first) + len(there)] = there
        return row
