"""Utterances with transcripts: what all sources of speech build. Reading files is left to who makes the splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.faulty_samples import Faults, none_usable
from mptrain.workloads.sound.alphabet import Alphabet
from mptrain.workloads.sound.audio_files import RecordingError
from mptrain.workloads.text.buckets import bucketed_order

if TYPE_CHECKING:
    from mptrain.workloads.speech.features import Features

#: What stays together where utterances are held out; empty where none are.
Division = Literal["transcript", "utterance", ""]


@dataclass(frozen=True)
class Utterance:
    """Something said.

    Attributes:
        name: What it is read by: a path.
        text: The transcript, spelled as the alphabet spells; empty where nothing is said.
        samples: How many there are, at the rate of the features; as far as is known before it has been read.
        where: The line of a list that says so, for messages; empty where there is none.
    """

    name: str
    text: str
    samples: int
    where: str = ""

    @property
    def title(self) -> str:
        """What to call it in messages: ``mine.tsv line 3: sub/b.wav``."""
        return f"{self.where}: {self.name}" if self.where else self.name


@dataclass(frozen=True)
class Format:
    """What utterances become.

    Attributes:
        alphabet: Letters and their numbers.
        features: How samples become frames.
        stride: Frames that the network makes one of.
    """

    alphabet: Alphabet
    features: Features
    stride: int

    def problem(self, text: str, samples: int) -> str:
        """Why an utterance cannot be trained on or measured; empty for no reason.

        Connectionist temporal classification needs a frame for each letter, and one more between two equal letters.
        Where there are fewer, no path spells the transcript: its probability is 0, the loss is infinite, and in mixed
        precision every update with it would be refused as an overflow. A loss that is set to zero there hides it.
        """
        if foreign := self.alphabet.problem(text):
            return foreign
        given = -(-self.features.frames(samples) // self.stride)
        needed = len(text) + sum(one == other for one, other in pairwise(text))
        if needed > given:
            return f"its transcript of {len(text)} letters takes {needed} frames, and the network sees {given}"
        return ""


def usable(utterances: Iterable[Utterance], form: Format, faults: Faults) -> list[Utterance]:
    """The utterances without those that cannot be used, which ``faults`` takes.

    Raises:
        DataError: There are some such and ``faults`` says stop.
    """
    kept, problems = [], {}
    for utterance in utterances:
        if reason := form.problem(utterance.text, utterance.samples):
            problems[utterance.title] = reason
        else:
            kept.append(utterance)
    faults.report(problems)
    return kept


class SpeechSplit:
    """Utterances of a data set, in batches of about the same length.

    Args:
        name: What to call it in messages, such as ``asterisk train``.
        utterances: Those that can be used (see `usable`).
        form: What they become.
        read: From a name to samples, int16 ``[T]``; raises `RecordingError`.
        batch_size: Of the run: batches are made of neighbours in length.
        faults: What was wrong with utterances.
        in_memory: Reading only copies.

    Raises:
        DataError: There is no utterance.
    """

    def __init__(
        self,
        name: str,
        utterances: Sequence[Utterance],
        form: Format,
        read: Callable[[str], Tensor],
        batch_size: int,
        faults: Faults,
        *,
        in_memory: bool,
    ) -> None:
        if not utterances:
            raise DataError(f"{name}: there is no usable utterance", "check the data, or choose dataset=tone_words")
        self.utterances = tuple(utterances)
        self.form = form
        self.faults = faults
        self.in_memory = in_memory
        self._read = read
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self.utterances)

    @property
    def skipped(self) -> int:
        """How many utterances were left out because they could not be used."""
        return len(self.faults.found)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Indices of one epoch; see `mptrain.workloads.base.source.Split.order`."""
        lengths = torch.tensor([utterance.samples for utterance in self.utterances])
        return bucketed_order(lengths, self._batch_size, seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The utterances with these indices; those that cannot be read make the batch smaller where that is asked for.

        Returns:
            ``inputs``: samples, int16 ``[N, S]``, 0 behind the end; ``targets``: numbers of letters, int64
            ``[N, letters]``, 0 behind the last; in ``more``, int64 ``[N]``: ``lengths`` in samples, and
            ``target_lengths``.
        """
        waves: list[Tensor] = []
        targets: list[Tensor] = []
        for index in indices:
            utterance = self.utterances[index]
            try:
                wave = self._read(utterance.name)
            except RecordingError as error:
                self.faults.report({utterance.title: error.reason})
                continue
            if reason := self.form.problem(utterance.text, len(wave)):
                self.faults.report({utterance.title: reason})
                continue
            waves.append(wave)
            targets.append(torch.tensor(self.form.alphabet.numbers(utterance.text), dtype=torch.int64))
        if not waves:
            raise none_usable("utterance", self.utterances[indices[0]].title)
        lengths, target_lengths = (torch.tensor([len(row) for row in rows]) for rows in (waves, targets))
        return Batch(padded(waves), padded(targets), more={"lengths": lengths, "target_lengths": target_lengths})


@dataclass
class SpeechDataset:
    """Utterances with transcripts; meets `mptrain.workloads.base.source.Dataset`.

    Attributes:
        name: As in the configuration.
        form: What utterances become.
        workers: Worker processes that read files.
        train: Training utterances.
        val: Validation utterances, or None.
        test: Test utterances, or None.
        too_long: How many utterances were longer than the user wants them, by the part whose files they are in.
        divided: By what some were held out, ``transcript`` or ``utterance``; empty where nothing was.
    """

    name: str
    form: Format
    workers: int
    train: SpeechSplit
    val: SpeechSplit | None
    test: SpeechSplit | None
    too_long: dict[str, int] = field(default_factory=dict)
    divided: Division = ""

    def facts(self) -> dict[str, Any]:
        """``vocabulary_size`` (letters and the blank), ``feature_size``, ``sample_rate`` and ``decode``."""
        return {
            "vocabulary_size": len(self.form.alphabet),
            "feature_size": self.form.features.size,
            "sample_rate": self.form.features.rate,
            "decode": self.form.alphabet.text,
        }

    def card(self) -> dict[str, Any]:
        """The letters, how sounds become inputs, how utterances were held out, and which were left out."""
        return {
            "labels": self.form.alphabet.labels(),
            "preparation": self.form.features.card(),
            "held_out_by": self.divided,
            "too_long": self.too_long,
        }

    def describe(self) -> str:
        """Numbers of a frame, letters, division, and where there is such, how many are too long, and how many wordless.

        ``40 bands every 10 ms, 28 letters, held out by transcript, 1 too long, 2 without words``.
        """
        features = self.form.features
        kind = "bands" if features.kind == "log_mel" else "frequencies"
        left_out = sum(self.too_long.values())
        told = f"{features.size} {kind} every {features.hop_ms:g} ms, {len(self.form.alphabet) - 1} letters"
        told += f", held out by {self.divided}" if self.divided else ""
        told += f", {left_out:,} too long" if left_out else ""
        splits = [split for split in (self.train, self.val, self.test) if split is not None]
        wordless = sum(not utterance.text for split in splits for utterance in split.utterances)
        return told + (f", {wordless:,} without words" if wordless else "")

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device and make features of it.

        Returns:
            ``inputs`` float32 ``[N, T, feature_size]``, and ``lengths`` in frames.
        """
        batch = batch.to(device)
        features, frames = self.form.features.compute(batch.inputs, batch.more["lengths"])
        return Batch(features, batch.targets, batch.counts, {**batch.more, "lengths": frames})
