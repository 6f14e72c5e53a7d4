"""Features of sound: against a transform written out, unmoved by padding, and finite for silence and a single sample."""

from __future__ import annotations

import math

import pytest
import torch

from mptrain.system.errors import ConfigError
from mptrain.workloads.speech.spectrograms import FLOOR, SpectrogramFeatures
from tests.loops import each

MEL = SpectrogramFeatures("log_mel", 8000, 20.0, 10.0, 40)
SPECTRUM = SpectrogramFeatures("log_spectrogram", 16000, 20.0, 10.0, 40)


def noise(samples, seed=0, loudness=5000):
    return torch.randint(-loudness, loudness, (samples,), generator=torch.Generator().manual_seed(seed)).short()


def batch_of(*waves):
    table = torch.zeros(len(waves), max(map(len, waves)), dtype=torch.int16)
    for row, wave in zip(table, waves, strict=True):
        row[: len(wave)] = wave
    return table, torch.tensor([len(wave) for wave in waves])


def test_a_spectrogram_is_that_of_a_transform_written_out():
    wave = noise(1000)
    assert (SPECTRUM.size, MEL.size, MEL.window, MEL.hop) == (161, 40, 160, 80)
    features, frames = SPECTRUM.compute(*batch_of(wave))
    place, size = 3, 320
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(size, dtype=torch.float64) / size)
    padded = torch.cat([torch.zeros(160), wave.double() / 32768, torch.zeros(160)])
    rows = []
    for frame in range(int(frames)):
        piece = torch.zeros(size, dtype=torch.float64)
        given = padded[frame * 160 : frame * 160 + size]
        piece[: len(given)] = given
        turns = torch.outer(torch.arange(161.0), torch.arange(320.0)).double() * 2 * math.pi / size
        real, imaginary = (f(turns) @ (piece * window) for f in (torch.cos, torch.sin))
        rows.append((((real**2 + imaginary**2) / (window**2).sum()).clamp(min=FLOOR) / FLOOR).log())
    table = torch.stack(rows)
    expected = (table - table.mean()) / table.std(correction=0)
    torch.testing.assert_close(features[0, place].double(), expected[place], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(features[0].double(), expected, atol=5e-3, rtol=1e-2)


def test_a_tone_is_loudest_in_the_band_around_it():
    tone = (9000 * torch.sin(2 * math.pi * 1000 * torch.arange(4000) / 8000)).short()
    features, _ = MEL.compute(*batch_of(tone))
    assert features[0, 20].argmax() == MEL.filters()[:, MEL.transform // 8].argmax()


@pytest.mark.parametrize("form", [MEL, SPECTRUM], ids=["mel", "spectrogram"])
def test_an_utterance_has_the_same_features_beside_a_longer_one(form):
    short, long = noise(777), noise(5000, 1, 30000)
    together, frames = form.compute(*batch_of(short, long))
    alone, own = form.compute(*batch_of(short))
    assert frames.tolist() == [form.frames(777), form.frames(5000)]
    assert own.tolist() == frames.tolist()[:1]
    torch.testing.assert_close(together[0, : int(own)], alone[0], atol=1e-5, rtol=1e-5)
    assert not together[0, int(own) :].any()


@pytest.mark.parametrize("form", [MEL, SPECTRUM], ids=["mel", "spectrogram"])
def test_each_utterance_has_mean_0_and_deviation_1(form):
    features, frames = form.compute(*batch_of(noise(2000, 0, 30), noise(4000, 1, 30000)))
    for row, length in zip(features, frames.tolist(), strict=True):
        assert row[:length].mean() == pytest.approx(0, abs=1e-4)
        assert row[:length].std(correction=0) == pytest.approx(1, abs=3e-3)


@each("form", [MEL, SPECTRUM])
@each("samples", [1, 7, 159, 5000])
def test_silence_of_any_length_is_all_zeros(form, samples):
    features, frames = form.compute(*batch_of(torch.zeros(samples, dtype=torch.int16), noise(900)))
    assert frames[0] == form.frames(samples) >= 1
    assert not features[0].any()
    assert features[1].isfinite().all()
    one, frames = form.compute(*batch_of(torch.tensor([12345], dtype=torch.int16)))
    assert (one.shape, frames.tolist()) == ((1, 1, form.size), [1])
    assert one.isfinite().all()


@pytest.mark.parametrize("rate", [4000, 8000, 16000])
def test_bands_cover_all_frequencies_between_their_ends(rate):
    form = SpectrogramFeatures("log_mel", rate, 32.0, 10.0, 32)
    covered = form.filters().sum(0) > 0
    assert covered[1:-1].all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("log_mel", 8000, 20.0, 10.0, 400), "dataset.bands=400: some would be empty"),
        (("log_mel", 8000, 0.1, 10.0, 4), "are 1 and 80 samples"),
        (("log_spectrogram", 8000, 20.0, 0.01, 4), "are 160 and 0 samples"),
    ],
)
def test_features_that_cannot_be_made_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        SpectrogramFeatures(*arguments)
