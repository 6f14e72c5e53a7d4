"""Speech of the user's own: a manifest of recordings with transcripts, or folders as LibriSpeech has them."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.fields import BelowOneOrZero, NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.sound.alphabet import ENGLISH, Alphabet
from mptrain.workloads.sound.audio_files import RecordingError, read_recording, recording_seconds
from mptrain.workloads.speech.features import Features, Kind
from mptrain.workloads.speech.manifest import Entry, entries_of
from mptrain.workloads.speech.speech_dataset import Format, SpeechDataset, Utterance
from mptrain.workloads.speech.speech_partition import Choices, speech_as_dataset

if TYPE_CHECKING:
    from torch import Tensor


def load_speech(
    *,
    path: Path = Path("data/speech"),
    val_path: Path | None = None,
    test_path: Path | None = None,
    name: str = "speech",
    sample_rate: PositiveInt = 16000,
    alphabet: str = ENGLISH,
    features: Kind = "log_mel",
    window_ms: PositiveFloat = 20.0,
    hop_ms: PositiveFloat = 10.0,
    bands: PositiveInt = 80,
    stride: PositiveInt = 2,
    max_seconds: PositiveFloat | None = 20.0,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 4,
    on_error: OnError = "stop",
    batch_size: PositiveInt = 16,
) -> SpeechDataset:
    """Find recordings and their transcripts; a recording is read when a batch asks for it.

    ``path`` is what `mptrain.workloads.speech.manifest.entries_of` takes. A length that it does not say is read from a header.

    Args:
        path: A manifest or a folder, to train on.
        val_path: Likewise, to validate on; None holds out ``val_share`` of ``path``.
        test_path: Likewise, to test on; None holds out ``test_share`` of ``path``.
        name: What to call the data set in records.
        sample_rate: What recordings are resampled to, in hertz.
        alphabet: Letters of the transcripts, the space included.
        features: ``log_mel`` or ``log_spectrogram``.
        window_ms: Length of the window of a frame, in milliseconds.
        hop_ms: From frame to frame, in milliseconds.
        bands: Numbers of a frame of ``log_mel``.
        stride: Frames that the network makes one of.
        max_seconds: Leave out, and count, what is longer; None for no limit.
        val_share: Share of the utterances held out for validation, where no path is for it; how, says
            `mptrain.workloads.speech.speech_partition.divided_by`.
        test_share: Share of the utterances to test on, where no path is for it.
        train_samples: Train on so many only; None trains on all.
        workers: Processes that read recordings, at most as many as there are cores to use.
        on_error: What to do about recordings that cannot be read and transcripts that cannot be used.
        batch_size: Of the run: batches are made of neighbours in length.

    Raises:
        DataError: There is nothing there, or an utterance cannot be used and ``on_error`` is ``stop``.
        EnvironmentRefused: The recordings need the extra ``speech``, which is not installed.
        ConfigError: The features cannot be made, or nothing is left to train on.
    """
    form = Format(Alphabet(alphabet), Features(features, sample_rate, window_ms, hop_ms, bands), stride)
    choices = Choices(form, max_seconds, {"val": val_share, "test": test_share}, train_samples, batch_size, on_error)
    places = {"val": val_path, "test": test_path, "train": path}
    found = {part: _utterances(place, form, Faults(on_error)) for part, place in places.items() if place is not None}
    return speech_as_dataset(name, found, functools.partial(_read, sample_rate), choices, workers)


def _utterances(place: Path, form: Format, faults: Faults) -> tuple[list[Utterance], Faults]:
    """The utterances of a manifest or folder in the order of their paths, and what was wrong with others."""
    found = []
    for entry in entries_of(place.expanduser(), faults):
        utterance = Utterance(entry.path, form.alphabet.spelled(entry.text), 0, entry.where)
        try:
            samples = round(_seconds(entry) * form.features.rate)
        except RecordingError as error:
            # The first line of a table, of something that looks like no file: it may be a header.
            header = entry.where.endswith(" line 1") and not Path(entry.path).suffix
            hint = "mend or remove it"
            faults.report({utterance.title: error.reason}, f"{hint} (a table has no header line)" if header else hint)
        else:
            found.append(replace(utterance, samples=samples))
    return sorted(found, key=lambda utterance: utterance.name), faults


def _seconds(entry: Entry) -> float:
    # Before an epoch has begun, not in the middle of it; and whether there is a library for such files or not.
    is_file = os.path.isfile(entry.path)  # noqa: PTH113 (Path.is_file raises for names that no file can have)
    if not (is_file and os.access(entry.path, os.R_OK)):
        raise RecordingError(entry.path, "there is no such file, or none that may be read")
    return recording_seconds(entry.path) if entry.seconds is None else entry.seconds


def _read(rate: int, path: str) -> Tensor:
    return read_recording(path, rate)
