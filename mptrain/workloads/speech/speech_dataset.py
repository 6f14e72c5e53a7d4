"""Data set of utterances with transcripts, without reading files; functions that the data sets pass in do that.

Utterances that are too long are left out, and some of the rest are held out for validation and test.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mptrain.errors import ConfigError, DataError
from mptrain.fields import BelowOneOrZero, PositiveFloat, PositiveInt
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.dataset import Dataset, Split
from mptrain.workloads.base.faulty_samples import Faults, OnError, none_usable
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.base.survey import Survey
from mptrain.workloads.base.train_val_split import first_samples, stratified_order
from mptrain.workloads.sound.alphabet import ENGLISH
from mptrain.workloads.sound.audio_files import RecordingError
from mptrain.workloads.speech.spectrograms import FrameOptions, InputFormat
from mptrain.workloads.text.buckets import bucketed_order

_FIXED = 20151208  # seed of the permutation that divides utterances; changing it changes every split
_FEW = 10  # a held-out part with fewer transcripts cannot show how well other transcripts would be recognised

#: Unit that is kept together when utterances are held out; empty if none are held out.
Division = Literal["transcript", "utterance", ""]


@dataclass(frozen=True)
class Utterance:
    """One utterance of a speech data set: its transcript and the key to its audio, without the audio samples.

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
class SpeechOptions(FrameOptions):
    """Options shared by the data sets of recorded speech.

    Further options are those of `FrameOptions`.

    Attributes:
        alphabet: Letters of the transcripts, including the space.
        max_seconds: Length in seconds of the longest utterance to keep; longer ones are left out and counted. None for
            no limit.
        val_share: Share of the utterances held out for validation, if no path is for validation; see `divided_by`.
        test_share: Share of the utterances held out for testing, if no path is for testing.
        train_samples: Number of utterances to train on; None trains on all.
        on_error: ``stop`` or ``skip`` for unreadable recordings and unusable transcripts.
    """

    alphabet: str = ENGLISH
    max_seconds: PositiveFloat | None = 20.0
    val_share: BelowOneOrZero = 0.1
    test_share: BelowOneOrZero = 0.1
    train_samples: PositiveInt | None = None
    on_error: OnError = "stop"


def usable(utterances: Iterable[Utterance], form: InputFormat, faults: Faults) -> list[Utterance]:
    """Return the utterances that a CTC network can be trained on: their letters are known and their frames suffice.

    Args:
        utterances: Utterances of one split.
        form: Format of the inputs, which decides; see `InputFormat.problem`.
        faults: Record of unusable samples; it receives the other utterances with the reason.

    Raises:
        DataError: An utterance is unusable and ``faults.on_error`` is ``stop``.
    """
    kept, problems = [], {}
    for utterance in utterances:
        if reason := form.problem(utterance.text, utterance.samples):
            problems[utterance.title] = reason
        else:
            kept.append(utterance)
    faults.report(problems)
    return kept


class SpeechSplit(Split):
    """Training, validation or test split of utterances, in batches of similar length.

    Args:
        name: Name in messages, such as ``asterisk train``.
        utterances: Usable utterances (see `usable`), at least one.
        form: Format of the inputs.
        read: Function from the name of an utterance to its audio samples, int16 ``[T]``; raises `RecordingError`.
        batch_size: Batch size of the run; batches hold neighbours in length.
        faults: Record of unusable utterances, which says whether to stop at one or skip it.
        in_memory: Whether reading only copies from memory, so that worker processes are not worthwhile.

    Raises:
        DataError: There are no utterances.
    """

    def __init__(
        self,
        name: str,
        utterances: Sequence[Utterance],
        form: InputFormat,
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

    def survey(self) -> Survey:
        """Return the seconds and letters of each utterance; see `mptrain.workloads.base.dataset.Split.survey`."""
        seconds = torch.tensor([one.samples / self.form.features.rate for one in self.utterances])
        letters = torch.tensor([len(one.text) for one in self.utterances])
        return Survey(lengths={"seconds": seconds, "letters": letters})

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Return the order of utterances in an epoch, int64 ``[len(self)]``, in batches of similar length.

        For arguments see `mptrain.workloads.base.dataset.Split.order`.
        """
        lengths = torch.tensor([utterance.samples for utterance in self.utterances])
        return bucketed_order(lengths, self._batch_size, seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return the batch of the utterances with these indices; see `mptrain.workloads.base.dataset.Split.fetch`.

        ``epoch`` and ``seed`` have no effect, because there is no augmentation. Unreadable utterances are left out
        where ``on_error`` is ``skip``.

        Returns:
            ``inputs``: samples, int16 ``[N, S]``, zero-padded; ``targets``: numbers of letters, int64 ``[N, letters]``,
            zero-padded; in ``more``, int64 ``[N]``: ``lengths`` in samples, and ``target_lengths``.

        Raises:
            DataError: An utterance is unusable and ``on_error`` is ``stop``, or none of the batch is usable.
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
class SpeechDataset(Dataset):
    """Data set for speech recognition: utterances with transcripts, whose features are computed on the device.

    It implements `mptrain.workloads.base.dataset.Dataset`.

    Attributes:
        name: Name in the configuration.
        form: Format of the inputs: alphabet and features.
        workers: Number of worker processes that read files.
        train: Training utterances.
        val: Validation utterances, or None.
        test: Test utterances, or None.
        too_long: Number of utterances that exceed the length limit, by the part whose files they are in.
        divided: Unit by which utterances were held out, ``transcript`` or ``utterance``; empty if none were.
    """

    name: str
    form: InputFormat
    workers: int
    train: SpeechSplit
    val: SpeechSplit | None
    test: SpeechSplit | None
    too_long: dict[str, int] = field(default_factory=dict)
    divided: Division = ""

    def facts(self) -> dict[str, Any]:
        """Return the properties that models and tasks may take as arguments, by parameter name; see `Dataset.facts`.

        Returns:
            ``vocabulary_size``, the number of letters and the blank; ``feature_size``, the number of features per
            frame; ``sample_rate`` in hertz; ``decode``, a function from letter numbers to text.
        """
        return {
            "vocabulary_size": len(self.form.alphabet),
            "feature_size": self.form.features.size,
            "sample_rate": self.form.features.rate,
            "decode": self.form.alphabet.text,
        }

    def card(self) -> dict[str, Any]:
        """Return the facts about the data set that a run records in ``data.json``, as JSON values.

        Returns:
            ``labels``: letters that the network outputs, in the order of its classes.
            ``preparation``: parameters of the spectrogram features.
            ``held_out_by``: unit that is held out as a whole for validation and test, such as a speaker.
            ``too_long``: number of utterances that were left out because they are too long, by split.
        """
        return {
            "labels": self.form.alphabet.labels(),
            "preparation": self.form.features.card(),
            "held_out_by": self.divided,
            "too_long": self.too_long,
        }

    def describe(self) -> str:
        """Return a summary for the terminal: features, letters, unit of division, and numbers of unusual utterances.

        Example: ``40 bands every 10 ms, 28 letters, held out by transcript, 1 too long, 2 without words``.
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
        """Move a host batch to the device and compute the features of its audio; see `Dataset.prepare`.

        Args:
            batch: Batch from `SpeechSplit.fetch`.
            device: Target device.
            memory_format: Not used.

        Returns:
            The batch with ``inputs`` float32 ``[N, T, feature_size]``, zero-padded, and ``lengths`` in frames.
        """
        batch = batch.to(device)
        features, frames = self.form.features.compute(batch.inputs, batch.more["lengths"])
        return Batch(features, batch.targets, batch.counts, {**batch.more, "lengths": frames})


def speech_as_dataset(
    name: str,
    found: Mapping[str, tuple[Sequence[Utterance], Faults]],
    read: Callable[[str], Tensor],
    form: InputFormat,
    options: SpeechOptions,
    workers: int | None,
) -> SpeechDataset:
    """Make a speech data set: leave out long and unusable utterances, and hold out parts without files of their own.

    Args:
        name: Name of the data set.
        found: Utterances of ``train``, and of ``val`` and ``test`` if they have files, with the faults of each part.
        read: Function from the name of an utterance to its samples, int16 ``[T]``; raises `RecordingError`.
        form: Format of the inputs.
        options: Options that the user set for the data set.
        workers: Number of processes that read files; None if all utterances are in memory.

    Raises:
        DataError: All utterances of a part are too long, or one is unusable and ``on_error`` is ``stop``.
        ConfigError: No utterance is left to train on.
    """
    parts: dict[str, list[Utterance]] = {}
    too_long: dict[str, int] = {}
    for part, (utterances, faults) in found.items():
        kept = _short_enough(f"{name} {part}", utterances, form.features.rate, options.max_seconds)
        too_long[part] = len(utterances) - len(kept)
        parts[part] = usable(kept, form, faults)
    shares = {"val": options.val_share, "test": options.test_share}
    shares = {part: share for part, share in shares.items() if part not in found}
    by = divided_by(parts["train"], shares)
    parts |= hold_out_utterances(name, parts["train"], shares, by, options.train_samples)
    splits = {
        part: SpeechSplit(
            f"{name} {part}",
            utterances,
            form,
            read,
            options.batch_size,
            found[part][1] if part in found else Faults(options.on_error),
            in_memory=workers is None,
        )
        for part, utterances in parts.items()
    }
    return SpeechDataset(name, form, workers or 0, splits["train"], splits.get("val"), splits.get("test"), too_long, by)


def _short_enough(name: str, utterances: Sequence[Utterance], rate: int, most: float | None) -> list[Utterance]:
    kept = [one for one in utterances if most is None or one.samples <= most * rate]
    if utterances and not kept:
        longest = math.ceil(max(one.samples for one in utterances) / rate)
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
    division by utterance, or if no utterance would be left to train on.

    Args:
        utterances: All utterances.
        shares: Shares of ``val`` and ``test`` in the number of utterances, as in `hold_out_utterances`.

    Returns:
        ``transcript`` or ``utterance``; empty if nothing is held out.
    """
    if not any(shares.values()):
        return ""
    together, rest = _cut(utterances, shares, "transcript")
    apart, _ = _cut(utterances, shares, "utterance")
    for part in together:
        different, possible = (len({utterance.text for utterance in parts[part]}) for parts in (together, apart))
        if not rest or (different < _FEW and different * 2 <= possible):
            return "utterance"
    return "transcript"


def hold_out_utterances(
    name: str, utterances: Sequence[Utterance], shares: dict[str, float], by: Division, train_samples: int | None
) -> dict[str, list[Utterance]]:
    """Divide utterances into training, validation and test parts by a permutation that is the same in every run.

    Args:
        name: Name of the data set, for messages.
        utterances: All utterances.
        shares: Shares of ``val`` and ``test`` in the number of utterances; parts with no share, or with 0, are absent.
        by: Unit that stays together, from `divided_by`. With ``utterance``, each part has the transcripts in about
            their overall proportions.
        train_samples: Number of utterances to train on; None trains on all that are not held out.

    Returns:
        Utterances of ``train`` and of each part with a share.

    Raises:
        ConfigError: No utterance would be left to train on, or fewer than ``train_samples``.
    """
    parts, rest = _cut(utterances, shares, by)
    if not rest:
        texts = {utterance.text for utterance in utterances}
        raise ConfigError(
            f"{name} has {len(utterances)} utterances of {len(texts)} transcripts: none is left to train on",
            "choose a smaller dataset.val_share and dataset.test_share (0 for no such part)",
        )
    parts["train"] = [rest[place] for place in first_samples(permutation(len(rest), _FIXED), train_samples).tolist()]
    return parts


def _cut(
    utterances: Sequence[Utterance], shares: dict[str, float], by: Division
) -> tuple[dict[str, list[Utterance]], list[Utterance]]:
    """Return the parts that are held out as in `hold_out_utterances`, and the remaining utterances."""
    groups: dict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        groups[utterance.text].append(utterance)
    texts = sorted(groups)
    if by == "utterance":
        numbers = {text: number for number, text in enumerate(texts)}
        order = stratified_order(torch.tensor([numbers[utterance.text] for utterance in utterances], dtype=torch.int64))
        units = iter([[utterances[place]] for place in order.tolist()])
    else:
        units = iter([groups[texts[place]] for place in permutation(len(texts), _FIXED).tolist()])
    parts: dict[str, list[Utterance]] = {}
    for part, share in shares.items():
        if share:
            parts[part] = []
            while len(parts[part]) < max(1, round(share * len(utterances))):
                unit = next(units, None)
                if unit is None:
                    break
                parts[part] += unit
    return parts, [utterance for unit in units for utterance in unit]
