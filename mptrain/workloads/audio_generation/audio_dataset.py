"""Data set of raw audio: windows of µ-law levels, each of which is a target once, and the letters being spoken.

The curve is that of ITU-T G.711 with µ one less than the number of levels, rounded to the nearest level, as in van den
Oord et al. (2016, section 2.2). G.711's own code differs: it approximates the curve by straight lines. Computation is
in FP32, on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.data_files import Faults, OnError
from mptrain.workloads.base.dataset import IndependentSamples, SplitDataset, Survey
from mptrain.workloads.base.splits import ShareOptions, hold_out, share_sizes, stratified_order
from mptrain.workloads.sound.recordings import RecordingError


def encode(samples: Tensor, levels: int) -> Tensor:
    """Quantise samples to levels from 0 to ``levels - 1``, int64; values beyond -1 to 1 are clipped.

    Silence is the upper of the two middle levels.
    """
    mu = levels - 1
    wave = samples.float().clamp(-1.0, 1.0)
    curved = torch.sign(wave) * torch.log1p(mu * wave.abs()) / math.log1p(mu)
    return ((curved + 1.0) / 2.0 * mu + 0.5).floor().long()


def decode(numbers: Tensor, levels: int) -> Tensor:
    """Convert levels, int64, back to samples, float32 from -1 to 1; the inverse of `encode` up to quantisation."""
    mu = levels - 1
    curved = 2.0 * numbers.float() / mu - 1.0
    return torch.sign(curved) * torch.expm1(curved.abs() * math.log1p(mu)) / mu


#: Target of positions without a loss: context, and padding after the end. The default ``ignore_index`` of torch.
IGNORED = -100

_FULL_SCALE = 32768.0  # 16-bit value that corresponds to 1.0


@dataclass(frozen=True)
class Clip:
    """Recording of a raw-audio data set, with its labels but without its samples.

    Attributes:
        name: Name in messages and key for reading the samples: a path.
        samples: Number of audio samples, as far as it is known before the recording is read.
        letters: Numbers of the letters of the transcript; empty without a transcript.
    """

    name: str
    samples: int
    speaker: int = 0
    letters: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Options of raw-audio data sets for cutting recordings into windows, the training samples.

    Attributes:
        levels: Number of µ-law levels to which audio samples are quantised.
        window: Number of audio samples predicted per window.
        context: Number of audio samples before each window that the network sees: its receptive field less one.
    """

    levels: PositiveInt = 256
    window: PositiveInt = 4000
    context: NonNegativeInt = 510


@dataclass(frozen=True, kw_only=True)
class RecordingOptions(WindowOptions, ShareOptions):
    """Options shared by the raw-audio data sets of recordings, which are the samples of `ShareOptions`.

    Attributes:
        text: Condition the network on the letter being spoken, where transcripts exist.
        on_error: ``stop`` or ``skip`` for recordings and texts that are unreadable or have no counterpart.
    """

    text: bool = True
    on_error: OnError = "stop"


@dataclass(eq=False)
class SoundSplit(IndependentSamples):
    """Split of a raw-audio data set: windows of at least one recording (DataError otherwise).

    A recording of S samples has ``ceil(S / window)`` windows; the last one may be short. The network sees
    ``context + 1`` samples before the first one that it predicts; samples before the start of a recording are zero.
    ``wave_of`` is a function from the name of a recording to its samples, int16 ``[S]``; it raises `RecordingError`. If
    it only copies, the split is ``in_memory``.
    """

    name: str
    clips: Sequence[Clip]
    wave_of: Callable[[str], Tensor]
    options: WindowOptions
    faults: Faults
    in_memory: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        if not self.clips:
            what = f"{self.name}: there is no usable recording"
            raise DataError(what, "check the data, or choose dataset=made_up_sounds")
        self.window, self.context = self.options.window, self.options.context
        counts = torch.tensor([-(-clip.samples // self.window) for clip in self.clips])
        self._clip_of = torch.repeat_interleave(torch.arange(len(self.clips)), counts)
        self._begins = (torch.arange(len(self._clip_of)) - (counts.cumsum(0) - counts)[self._clip_of]) * self.window

    def __len__(self) -> int:
        return len(self._clip_of)

    @override
    def survey(self) -> Survey:
        speakers = torch.tensor([clip.speaker for clip in self.clips])
        lengths = {"audio samples": torch.tensor([clip.samples for clip in self.clips])}
        return Survey(speakers, {"recordings": len(self.clips)}, lengths)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return windows, int16 ``[N, context + 1 + window]``, 0 beyond the recordings, without targets.

        In ``extras``, int64, are ``begins``, the first sample of each window, ``lengths``, the number of predicted
        samples, ``clip_lengths`` and ``speaker``, all ``[N]``, ``text`` ``[N, letters]``, zero-padded, and ``letters``,
        the number of letters, ``[N]``. Unreadable recordings are left out if ``on_error`` is ``skip``, unless none is
        left (DataError).
        """
        asked = [(self.clips[int(self._clip_of[index])], int(self._begins[index])) for index in indices]

        def read(position: int) -> tuple[Clip, int, Tensor]:
            clip, begin = asked[position]
            wave = self.wave_of(clip.name)
            if len(wave) <= begin:
                raise RecordingError(clip.name, f"has {len(wave)} samples, but its header says {clip.samples}")
            return clip, begin, wave

        names = [clip.name for clip, _ in asked]
        windows = self.faults.usable("recording", names, read, (RecordingError,), attrgetter("reason"))
        clips, begins, waves = zip(*windows, strict=True)
        rows = [self._around(wave, begin) for _, begin, wave in windows]
        lengths = [min(self.window, len(wave) - begin) for _, begin, wave in windows]
        more = {
            "begins": torch.tensor(begins),
            "lengths": torch.tensor(lengths),
            "clip_lengths": torch.tensor([len(wave) for wave in waves]),
            "speaker": torch.tensor([clip.speaker for clip in clips]),
            "text": padded([torch.tensor(clip.letters, dtype=torch.int64) for clip in clips]),
            "letters": torch.tensor([len(clip.letters) for clip in clips]),
        }
        return Batch(torch.stack(rows), torch.zeros(len(rows), 0, dtype=torch.int64), tuple(lengths), more)

    def _around(self, wave: Tensor, begin: int) -> Tensor:
        """Return samples from ``context + 1`` before a position of a recording to ``window`` after it, zero-padded."""
        row = torch.zeros(self.context + 1 + self.window, dtype=torch.int16)
        first = begin - self.context - 1
        there = wave[max(0, first) : begin + self.window]
        row[max(0, -first) : max(0, -first) + len(there)] = there
        return row


@dataclass(kw_only=True, eq=False)
class SoundDataset(SplitDataset[SoundSplit]):
    """Data set of raw audio: windows of recordings with speakers and transcripts.

    Attributes:
        rate: Sample rate in hertz.
        speakers: Names of the speakers or kinds of sound, by number; the network is conditioned on two or more.
        alphabet: Label of each letter number, starting with the label of "no letter"; empty without text.
    """

    rate: int
    levels: int
    speakers: tuple[str, ...]
    alphabet: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return the facts; ``speakers`` is 0 and ``speaker_names`` is empty if there is only one speaker."""
        several = len(self.speakers) > 1
        return {
            "levels": self.levels,
            "sample_rate": self.rate,
            "speakers": len(self.speakers) if several else 0,
            "speaker_names": self.speakers if several else (),
            "vocabulary_size": len(self.alphabet),
        }

    @override
    def card(self) -> dict[str, Any]:
        return {"labels": [*self.speakers, *self.alphabet], **super().card()}

    def describe(self) -> str:
        """Return, for example, ``0.25 s at 8,000 Hz in 256 levels, 4 speakers, from 9 and 1 recordings``."""
        conditioning = f", {len(self.speakers)} speakers" if len(self.speakers) > 1 else ""
        conditioning += ", text" if self.alphabet else ""
        *first, last = (f"{len(split.clips):,}" for split in self.splits.values())
        counts = f"{', '.join(first)} and {last} recordings" if first else f"{last} recording{'s' * (last != '1')}"
        seconds = self.splits["train"].window / self.rate
        return f"{seconds:.3g} s at {self.rate:,} Hz in {self.levels} levels{conditioning}, from {counts}"

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Return levels, int64 ``[N, L]`` with L = context + window, and the next level of each on the device.

        Targets are `IGNORED` for context and after the end. Where there is conditioning, ``extras`` has ``speaker``
        ``[N]``, ``text`` ``[N, letters]``, and ``place``, the index into ``text`` at each target, ``[N, L]``. Letters
        are spread evenly over a recording: sample t of S belongs to letter ``floor(t letters / S)``. This is crude, but
        nothing better is possible without an alignment.
        """
        batch = batch.to(device)
        levels = encode(batch.inputs.float() / _FULL_SCALE, self.levels)
        inputs, targets = levels[:, :-1], levels[:, 1:]
        positions = torch.arange(targets.shape[1], device=device) - self.splits["train"].context
        within = (positions >= 0) & (positions < batch.extras["lengths"][:, None])
        more: dict[str, Tensor] = {}
        if len(self.speakers) > 1:
            more["speaker"] = batch.extras["speaker"]
        if self.alphabet:
            times = (batch.extras["begins"][:, None] + positions).clamp_min(0)
            letters = batch.extras["letters"][:, None]
            letter_index = times * letters // batch.extras["clip_lengths"][:, None]
            more["text"] = batch.extras["text"]
            more["place"] = letter_index.minimum(letters - 1).clamp_min(0)
        return Batch(inputs, targets.masked_fill(~within, IGNORED), batch.counts, more)


def clips_as_dataset(
    name: str,
    clips: Sequence[Clip],
    wave_of: Callable[[str], Tensor],
    faults: Faults,
    options: RecordingOptions,
    *,
    rate: int,
    speakers: tuple[str, ...],
    alphabet: Sequence[str],
    workers: int | None = None,
) -> SoundDataset:
    """Make a raw-audio data set: divide recordings into training, validation and test splits, cut into windows.

    Clips are named by the path of their file. ``wave_of`` is as in `SoundSplit`, ``speakers`` and ``alphabet`` as in
    `SoundDataset`; ``workers`` None means that all recordings are in memory. The training split continues ``faults``.
    ConfigError is raised if no recording is left to train on.
    """
    parts = hold_out_clips(name, clips, options.shares(), options.train_samples)
    splits = {
        part: SoundSplit(
            f"{name} {part}",
            chosen,
            wave_of,
            options,
            faults if part == "train" else Faults(options.on_error),
            in_memory=workers is None,
        )
        for part, chosen in parts.items()
    }
    return SoundDataset(
        name=name,
        splits=splits,
        workers=workers or 0,
        files={part: [clip.name for clip in chosen] for part, chosen in parts.items()},
        rate=rate,
        levels=options.levels,
        speakers=speakers,
        alphabet=tuple(alphabet),
    )


def hold_out_clips(
    name: str, clips: Sequence[Clip], shares: Mapping[str, float], train_samples: int | None
) -> dict[str, list[Clip]]:
    """Divide recordings into training, validation and test parts, the same in every run, stratified by speaker.

    Each part gets its share of the recordings, at least one unless the share is 0. If these are so short that the
    part has less than half its share of the samples, more recordings are added until it does, as long as the part
    has at most half of all samples. ConfigError is raised if no recording would be left to train on, or fewer
    than ``train_samples``.
    """
    order = stratified_order(torch.tensor([clip.speaker for clip in clips], dtype=torch.int64))
    lengths = torch.tensor([clip.samples for clip in clips], dtype=torch.int64)[order].tolist()
    sizes, held, total = share_sizes(shares, len(clips)), 0, sum(lengths)
    for part, share in shares.items():
        while sum(lengths[held : held + sizes[part]]) < share / 2 * total and held + sizes[part] + 1 < len(clips):
            if sum(lengths[held : held + sizes[part] + 1]) > total / 2:
                break
            sizes[part] += 1
        held += sizes[part]
    parts = hold_out(order, {**sizes, "train": train_samples}, f"recordings of {name}")
    return {part: [clips[index] for index in indices.tolist()] for part, indices in parts.items()}
