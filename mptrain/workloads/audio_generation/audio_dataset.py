"""The data set that all sources of raw sound build: µ-law levels, and for each of them the letter that is being said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mptrain.errors import ConfigError
from mptrain.workloads.audio_generation import mu_law
from mptrain.workloads.audio_generation.audio_windows import Clip, SoundSplit
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.base.partition import first_samples, stratified_order

#: A target that is none: context, or behind the end. torch's own number for it.
IGNORED = -100

_FULL_SCALE = 32768.0  # the 16-bit sample that would stand for 1


@dataclass
class SoundDataset:
    """Windows of recordings; meets `mptrain.workloads.base.source.Dataset`.

    Attributes:
        name: As in the configuration.
        rate: Samples a second, in hertz.
        levels: Of µ-law.
        speakers: Who speaks, or kinds of sound, by number; fewer than two tell nothing apart.
        alphabet: A name for each number of a letter, the first of which is that of none; empty where there is no text.
        workers: Worker processes that read files.
        train: Training windows.
        val: Validation windows, or None.
        test: Test windows, or None.
    """

    name: str
    rate: int
    levels: int
    speakers: tuple[str, ...]
    alphabet: tuple[str, ...]
    workers: int
    train: SoundSplit
    val: SoundSplit | None
    test: SoundSplit | None
    files: dict[str, list[str]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """``levels``, ``sample_rate``, and 0 where a network is told nothing: ``speakers`` and ``vocabulary_size``."""
        several = len(self.speakers) > 1
        return {
            "levels": self.levels,
            "sample_rate": self.rate,
            "speakers": len(self.speakers) if several else 0,
            "speaker_names": self.speakers if several else (),
            "vocabulary_size": len(self.alphabet),
        }

    def card(self) -> dict[str, Any]:
        """Speakers and letters in the order of their numbers."""
        return {"labels": [*self.speakers, *self.alphabet]}

    def describe(self) -> str:
        """Length of a window, rate, and recordings of the parts: ``0.25 s at 8,000 Hz in 256 levels, 4 speakers, from 9 and 1 recordings``."""
        told = f", {len(self.speakers)} speakers" if len(self.speakers) > 1 else ""
        told += ", text" if self.alphabet else ""
        *first, last = (f"{len(part.clips):,}" for part in (self.train, self.val, self.test) if part is not None)
        counts = f"{', '.join(first)} and {last} recordings" if first else f"{last} recording{'s' * (last != '1')}"
        return f"{self.train.window / self.rate:.3g} s at {self.rate:,} Hz in {self.levels} levels{told}, from {counts}"

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device and make levels of its samples.

        Letters are spread evenly over a recording: sample t of S belongs to letter ``floor(t letters / S)``. That is
        crude, and all that can be had without an alignment.

        Returns:
            ``inputs``: levels int64 ``[N, L]`` with L = context + window; ``targets``: the level that follows each, int64
            ``[N, L]``, `IGNORED` for context and behind the end; in ``more``, where there is something to tell:
            ``speaker`` ``[N]``, ``text`` ``[N, letters]``, and ``place``, the letter of ``text`` at each target, ``[N, L]``.
        """
        batch = batch.to(device)
        levels = mu_law.encode(batch.inputs.float() / _FULL_SCALE, self.levels)
        inputs, targets = levels[:, :-1], levels[:, 1:]
        places = torch.arange(targets.shape[1], device=device) - self.train.context
        within = (places >= 0) & (places < batch.more["lengths"][:, None])
        more: dict[str, Tensor] = {}
        if len(self.speakers) > 1:
            more["speaker"] = batch.more["speaker"]
        if self.alphabet:
            times = (batch.more["begins"][:, None] + places).clamp_min(0)
            letters = batch.more["letters"][:, None]
            said = times * letters // batch.more["clip_lengths"][:, None]
            more["text"] = batch.more["text"]
            more["place"] = said.minimum(letters - 1).clamp_min(0)
        return Batch(inputs, targets.masked_fill(~within, IGNORED), batch.counts, more)


@dataclass(frozen=True)
class Choices:
    """What a user chooses about any recordings; the YAML files explain each. Without ``workers`` all is in memory."""

    rate: int
    levels: int
    window: int
    context: int
    val_share: float
    test_share: float
    train_samples: int | None
    workers: int | None
    on_error: OnError


def clips_as_dataset(
    name: str,
    clips: Sequence[Clip],
    read: Callable[[str], Tensor],
    faults: Faults,
    choices: Choices,
    speakers: tuple[str, ...],
    alphabet: tuple[str, ...],
) -> SoundDataset:
    """Divide recordings and cut them into windows.

    Args:
        name: Of the data set.
        clips: All recordings.
        read: From the name of one to its samples, int16 ``[S]``; raises `RecordingError`.
        faults: What was wrong with others; the training split goes on with them.
        choices: The user's.
        speakers: See `SoundDataset`.
        alphabet: Likewise.

    Raises:
        ConfigError: Nothing is left to train on.
    """
    parts = hold_out_clips(name, clips, choices.val_share, choices.test_share, choices.train_samples)
    splits = {
        part: SoundSplit(
            f"{name} {part}",
            chosen,
            read,
            choices.window,
            choices.context,
            faults if part == "train" else Faults(choices.on_error),
            in_memory=choices.workers is None,
        )
        for part, chosen in parts.items()
    }
    return SoundDataset(
        name=name,
        rate=choices.rate,
        levels=choices.levels,
        speakers=speakers,
        alphabet=alphabet,
        workers=choices.workers or 0,
        train=splits["train"],
        val=splits.get("val"),
        test=splits.get("test"),
    )


def hold_out_clips(
    name: str, clips: Sequence[Clip], val_share: float, test_share: float, train_samples: int | None
) -> dict[str, list[Clip]]:
    """Divide recordings by a permutation that is the same in every run, each speaker in about the same shares.

    A part has its share of the recordings, and where these are so short that it would have less than half its share of the
    samples, as many more as bring it there; but none that would make it more than half of all samples.

    Args:
        name: Of the data set, for messages.
        clips: All of them.
        val_share: Share of the recordings to hold out for validation; 0 for none, else at least one.
        test_share: Share to test on, likewise.
        train_samples: Train on so many recordings only; None trains on all that are left.

    Returns:
        ``train``, and ``val`` and ``test`` where they have a share.

    Raises:
        ConfigError: Nothing would be left to train on, or fewer than are asked for.
    """
    numbers = stratified_order(torch.tensor([clip.speaker for clip in clips], dtype=torch.int64))
    lengths = torch.tensor([clip.samples for clip in clips], dtype=torch.int64)[numbers].tolist()
    counts, held, total = {}, 0, sum(lengths)
    for part, share in (("val", val_share), ("test", test_share)):
        count = max(1, round(share * len(clips))) if share else 0
        while sum(lengths[held : held + count]) < share / 2 * total and held + count + 1 < len(clips):
            if sum(lengths[held : held + count + 1]) > total / 2:
                break
            count += 1
        counts[part] = count
        held += count
    if held >= len(clips):
        raise ConfigError(
            f"{name} has {len(clips)} recordings: dataset.val_share={val_share} and dataset.test_share={test_share} leave "
            "none to train on",
            "choose smaller shares (0 for no such part), or more recordings",
        )
    parts = {"train": first_samples(numbers[held:], train_samples).tolist()}
    begin = 0
    for part, count in counts.items():
        if count:
            parts[part] = numbers[begin : begin + count].tolist()
        begin += count
    return {part: [clips[number] for number in chosen] for part, chosen in parts.items()}
