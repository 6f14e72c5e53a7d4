"""Data set of utterances with transcripts, read by functions of its data sets, and new recordings to transcribe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import ConfigError, DataError
from mptrain.system.fields import PositiveFloat
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.data_files import Faults, OnError
from mptrain.workloads.base.dataset import Split, SplitDataset, Survey
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.base.splits import ShareOptions, first_samples, hold_out, share_sizes, stratified_order
from mptrain.workloads.sound.recordings import ENGLISH, SUFFIXES, Alphabet, RecordingError, read_recording
from mptrain.workloads.speech.spectrograms import FrameOptions, InputFormat, SpectrogramFeatures
from mptrain.workloads.text.tokens import bucketed_order

_FIXED = 20151208  # seed of the permutation that divides utterances; changing it changes every split
_FEW = 10  # a held-out part with fewer transcripts cannot show how well other transcripts would be recognised

#: Unit that is kept together when utterances are held out; empty if none are held out.
Division = Literal["transcript", "utterance", ""]


@dataclass(frozen=True)
class Utterance:
    """Utterance of a speech data set: its transcript and the key to its audio, without the audio samples.

    Attributes:
        name: Key for reading the audio: a path.
        text: Transcript as the alphabet spells it; empty if there is no speech.
        samples: Number of samples at the rate of the features, as far as it is known before reading.
        where: Line of the list that names the utterance, for messages; empty if there is no list.
    """

    name: str
    text: str
    samples: int
    where: str = ""

    @property
    def title(self) -> str:
        """Name of the utterance in messages: ``mine.tsv line 3: sub/b.wav``."""
        return f"{self.where}: {self.name}" if self.where else self.name


@dataclass(frozen=True, kw_only=True)
class SpeechOptions(FrameOptions, ShareOptions):
    """Options shared by the data sets of recorded speech; `divided_by` says what `ShareOptions` divides.

    Attributes:
        alphabet: Letters of the transcripts, including the space.
        max_seconds: Length in seconds of the longest utterance to keep; None for no limit.
        on_error: ``stop`` or ``skip`` for unreadable recordings and unusable transcripts.
    """

    alphabet: str = ENGLISH
    max_seconds: PositiveFloat | None = 20.0
    on_error: OnError = "stop"


def usable(utterances: Iterable[Utterance], form: InputFormat, faults: Faults) -> list[Utterance]:
    """Return the utterances that a CTC network can be trained on: their letters are known and their frames suffice.

    The others are recorded in ``faults``, or raise DataError if its ``on_error`` is ``stop``.
    """
    kept, problems = [], {}
    for utterance in utterances:
        if reason := form.problem(utterance.text, utterance.samples):
            problems[utterance.title] = reason
        else:
            kept.append(utterance)
    faults.report(problems)
    return kept


@dataclass(eq=False)
class SpeechSplit(Split):
    """Split of utterances, at least one (DataError), in batches of similar length.

    ``wave_of`` is a function from the name of an utterance to its samples, int16 ``[T]``; it raises `RecordingError`.
    If it only copies, the split is ``in_memory``.
    """

    name: str
    utterances: Sequence[Utterance]
    form: InputFormat
    wave_of: Callable[[str], Tensor]
    batch_size: int
    faults: Faults
    in_memory: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        if not self.utterances:
            raise DataError(
                f"{self.name}: there is no usable utterance", "check the data, or choose dataset=tone_words"
            )

    def __len__(self) -> int:
        return len(self.utterances)

    @override
    def survey(self) -> Survey:
        seconds = torch.tensor([utterance.samples / self.form.features.rate for utterance in self.utterances])
        letters = torch.tensor([len(utterance.text) for utterance in self.utterances])
        return Survey(lengths={"seconds": seconds, "letters": letters})

    @override
    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        lengths = torch.tensor([utterance.samples for utterance in self.utterances])
        return bucketed_order(lengths, self.batch_size, seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return samples, int16 ``[N, S]``, and numbers of letters, int64 ``[N, letters]``, zero-padded.

        Their ``lengths`` and ``target_lengths`` are int64 ``[N]``. Unreadable utterances are left out if ``on_error``
        is ``skip``.
        """
        asked = [self.utterances[index] for index in indices]

        def read(position: int) -> tuple[Tensor, Tensor]:
            text, wave = asked[position].text, self.wave_of(asked[position].name)
            if reason := self.form.problem(text, len(wave)):
                raise RecordingError(asked[position].name, reason)
            return wave, torch.tensor(self.form.alphabet.numbers(text), dtype=torch.int64)

        titles = [utterance.title for utterance in asked]
        samples = self.faults.usable("utterance", titles, read, (RecordingError,), attrgetter("reason"))
        waves, targets = zip(*samples, strict=True)
        lengths, target_lengths = (torch.tensor([len(row) for row in rows]) for rows in (waves, targets))
        return Batch(padded(waves), padded(targets), extras={"lengths": lengths, "target_lengths": target_lengths})


@dataclass(kw_only=True, eq=False)
class SpeechDataset(SplitDataset[SpeechSplit]):
    """Data set for speech recognition: utterances with transcripts, whose features are computed on the device."""

    form: InputFormat
    too_long: dict[str, int] = field(default_factory=dict)
    divided: Division = ""
    inputs: ClassVar[str] = "recordings"

    def facts(self) -> dict[str, Any]:
        """Return ``vocabulary_size`` with the blank, ``feature_size``, ``sample_rate`` in hertz, and ``decode``."""
        return {
            "vocabulary_size": len(self.form.alphabet),
            "feature_size": self.form.features.size,
            "sample_rate": self.form.features.rate,
            "decode": self.form.alphabet.text,
        }

    @override
    def card(self) -> dict[str, Any]:
        return {
            "labels": self.form.alphabet.labels(),
            "preparation": self.form.features.card(),
            "held_out_by": self.divided,
            "too_long": self.too_long,
        }

    def describe(self) -> str:
        """Return, for example, ``40 bands every 10 ms, 28 letters, held out by transcript, 1 too long``."""
        features = self.form.features
        kind = "bands" if features.kind == "log_mel" else "frequencies"
        left_out = sum(self.too_long.values())
        description = f"{features.size} {kind} every {features.hop_ms:g} ms, {len(self.form.alphabet) - 1} letters"
        description += f", held out by {self.divided}" if self.divided else ""
        description += f", {left_out:,} too long" if left_out else ""
        wordless = sum(not utterance.text for split in self.splits.values() for utterance in split.utterances)
        return description + (f", {wordless:,} without words" if wordless else "")

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Compute features on the device, float32 ``[N, T, feature_size]``, zero-padded, and ``lengths`` in frames."""
        return self.form.features.prepare(batch, device)


def speech_as_dataset(
    name: str,
    by_part: Mapping[str, tuple[Sequence[Utterance], Faults]],
    wave_of: Callable[[str], Tensor],
    form: InputFormat,
    options: SpeechOptions,
    workers: int | None,
) -> SpeechDataset:
    """Make a speech data set: leave out long and unusable utterances, and hold out parts without files of their own.

    ``by_part`` has the utterances and faults of ``train``, and of ``val`` and ``test`` if they have files; ``wave_of``
    is as in `SpeechSplit`; ``workers`` None means that all utterances are in memory.

    Raises:
        DataError: All utterances of a part are too long, or one is unusable and ``on_error`` is ``stop``.
        ConfigError: No utterance is left to train on.
    """
    parts: dict[str, list[Utterance]] = {}
    too_long: dict[str, int] = {}
    for part, (utterances, faults) in by_part.items():
        kept = _short_enough(f"{name} {part}", utterances, form.features.rate, options.max_seconds)
        too_long[part] = len(utterances) - len(kept)
        parts[part] = usable(kept, form, faults)
    shares = options.shares(by_part)
    by = divided_by(parts["train"], shares)
    parts |= hold_out_utterances(name, parts["train"], shares, by, options.train_samples)
    splits = {
        part: SpeechSplit(
            f"{name} {part}",
            utterances,
            form,
            wave_of,
            options.batch_size,
            by_part[part][1] if part in by_part else Faults(options.on_error),
            in_memory=workers is None,
        )
        for part, utterances in parts.items()
    }
    return SpeechDataset(name=name, splits=splits, workers=workers or 0, form=form, too_long=too_long, divided=by)


def _short_enough(name: str, utterances: Sequence[Utterance], rate: int, most: float | None) -> list[Utterance]:
    kept = [utterance for utterance in utterances if most is None or utterance.samples <= most * rate]
    if utterances and not kept:
        longest = math.ceil(max(utterance.samples for utterance in utterances) / rate)
        raise DataError(
            f"{name}: all {len(utterances)} utterances are longer than dataset.max_seconds={most:g}",
            f"set dataset.max_seconds={longest}, or null for no limit",
        )
    return kept


def divided_by(utterances: Sequence[Utterance], shares: dict[str, float]) -> Division:
    """Choose the unit in which utterances are held out: all utterances of a transcript together, or each by itself.

    Division by transcript keeps the spellings of the test out of training. With few transcripts, such as a set of
    command words, such a test would consist of words never heard in training, or of a single word. Division is
    therefore by utterance if a part would have fewer than ten different transcripts and at most half as many as in a
    division by utterance, or if no utterance would be left to train on. The result is empty if nothing is held out.
    """
    held = [part for part, share in shares.items() if share]
    if not held:
        return ""
    try:
        together = hold_out_utterances("", utterances, shares, "transcript", None)
    except ConfigError:
        return "utterance"
    apart = hold_out_utterances("", utterances, shares, "utterance", None)
    for part in held:
        different, possible = (len({utterance.text for utterance in parts[part]}) for parts in (together, apart))
        if different < _FEW and different * 2 <= possible:
            return "utterance"
    return "transcript"


def hold_out_utterances(
    name: str, utterances: Sequence[Utterance], shares: dict[str, float], by: Division, train_samples: int | None
) -> dict[str, list[Utterance]]:
    """Divide utterances into training, validation and test parts by a permutation that is the same in every run.

    Shares are of the number of utterances; parts with a share of 0 are absent. With ``by="utterance"``, each part has
    the transcripts in about their overall proportions. ConfigError is raised if no utterance would be left to train on,
    or fewer than ``train_samples``.
    """
    numbers = {text: number for number, text in enumerate(sorted({utterance.text for utterance in utterances}))}
    transcripts = torch.tensor([numbers[utterance.text] for utterance in utterances], dtype=torch.int64)
    if by == "utterance":
        order, ends = stratified_order(transcripts), None
    else:
        shuffled = permutation(len(numbers), _FIXED)
        # The inverse permutation has the position of each transcript; the stable sort keeps its utterances in order.
        order = shuffled.argsort()[transcripts].argsort(stable=True)
        ends = transcripts.bincount()[shuffled].cumsum(0).tolist()
    sizes = share_sizes(shares, len(utterances), ends)
    parts = hold_out(order, {**sizes, "train": None}, f"utterances of {name}")
    # Shuffled, because train_samples would otherwise take all utterances of a few transcripts.
    rest = parts["train"]
    parts["train"] = rest[first_samples(permutation(len(rest), _FIXED), train_samples)]
    return {part: [utterances[index] for index in indices.tolist()] for part, indices in parts.items()}


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
            "lengths": torch.tensor([len(wave) for wave in samples]),
            "target_lengths": torch.zeros(len(samples), dtype=torch.int64),
        }
        return Batch(padded(samples), torch.zeros(len(samples), 1, dtype=torch.int64), extras=extras)

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        return self.features.prepare(batch, device)
