"""Recordings of every kind become 16-bit samples of one channel at one rate, or an error of one line."""

from __future__ import annotations

import contextlib
import io
import math
import os
import wave

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from mptrain.system.errors import DataError
from mptrain.workloads.sound.recordings import RecordingError, read_recording, recording_seconds


def tone(rate, seconds=0.5, frequency=200.0, amplitude=0.5):
    return amplitude * np.sin(2 * math.pi * frequency * np.arange(int(rate * seconds)) / rate)


def sound(samples, rate=8000):
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


def test_16_bits_at_the_right_rate_are_not_changed(tmp_path):
    samples = np.array([0, 1, -1, 32767, -32768, 1234], dtype=np.int16)
    wavfile.write(tmp_path / "a.wav", 8000, samples)
    assert read_recording(tmp_path / "a.wav", 8000).tolist() == samples.tolist()
    assert read_recording(tmp_path / "a.wav").dtype == torch.int16


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
def test_every_kind_of_sample_means_the_same_sound(tmp_path, dtype):
    wanted = tone(8000)
    if np.issubdtype(dtype, np.floating):
        stored = wanted.astype(dtype)
    elif dtype == np.uint8:
        stored = np.round(wanted * 128 + 128).astype(dtype)
    else:
        stored = np.round(wanted * 2.0 ** (8 * np.dtype(dtype).itemsize - 1)).astype(dtype)
    wavfile.write(tmp_path / "a.wav", 8000, stored)
    heard = read_recording(tmp_path / "a.wav", 8000).double().numpy() / 32768
    assert np.abs(heard - wanted).max() < (1 / 128 if dtype == np.uint8 else 2**-15)


def test_24_bits_are_read(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(3)
        file.setframerate(8000)
        file.writeframes((0x400000).to_bytes(3, "little") + (-0x400000).to_bytes(3, "little", signed=True))
    assert read_recording(tmp_path / "a.wav", 8000).tolist() == [16384, -16384]
    assert recording_seconds(tmp_path / "a.wav") == 2 / 8000


def test_channels_become_their_mean(tmp_path):
    wavfile.write(tmp_path / "a.wav", 8000, np.array([[100, 300], [-200, 0]], dtype=np.int16))
    assert read_recording(tmp_path / "a.wav", 8000).tolist() == [200, -100]


@pytest.mark.parametrize("own", [4000, 11025, 16000, 44100])
def test_another_rate_is_resampled_to_the_same_tone(tmp_path, own):
    wavfile.write(tmp_path / "a.wav", own, tone(own).astype(np.float32))
    heard = read_recording(tmp_path / "a.wav", 8000).double().numpy() / 32768
    assert len(heard) == pytest.approx(4000, abs=1)
    middle = slice(500, 3500)
    assert np.abs(heard[: len(tone(8000))] - tone(8000)[: len(heard)])[middle].max() < 0.01


def test_what_is_too_loud_is_clipped_and_does_not_wrap_around(tmp_path):
    wavfile.write(tmp_path / "a.wav", 8000, np.array([2.0, -2.0], dtype=np.float32))
    assert read_recording(tmp_path / "a.wav").tolist() == [32767, -32768]


NO_WAV = r"(?m)is not a WAV file that can be read \(.+\)$"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        *[("a.wav", content, NO_WAV) for content in (b"", b"RIFF", b"this is no recording at all")],
        ("a.wav", sound(np.zeros(10, dtype=np.int16), rate=7), "a sample rate of 7 Hz"),
        *[(name, None, "there is no such file") for name in ("a.wav", "nul\0.wav", "nul\0.flac", "half\ud800.wav")],
        *[("x" * 300 + suffix, None, "there is no such file") for suffix in (".wav", ".flac")],
    ],
)
def test_a_broken_or_missing_file_is_an_error_of_one_line(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for read in (read_recording, recording_seconds):
        with pytest.raises(RecordingError, match=reason) as caught:
            read(path)
        assert isinstance(caught.value, DataError)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (sound(np.zeros(1000, dtype=np.int16))[:1000], "is truncated"),
        (sound(np.zeros(0, dtype=np.int16)), "holds no samples"),
        (sound(np.array([0.0, math.nan], dtype=np.float32)), "holds NaN or inf"),
    ],
    ids=["truncated", "empty", "nan"],
)
def test_a_recording_of_which_nothing_can_be_heard_is_refused(tmp_path, content, reason):
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(RecordingError, match=reason):
        read_recording(tmp_path / "a.wav")


def test_chunks_that_are_not_sound_are_passed_over(tmp_path):
    path = tmp_path / "a.wav"
    wavfile.write(path, 8000, np.array([7, 8], dtype=np.int16))
    path.write_bytes(path.read_bytes() + b"junk" + (4).to_bytes(4, "little") + b"abcd")
    assert read_recording(path).tolist() == [7, 8]


def test_flac_is_read_like_wav(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    samples = (tone(8000) * 32767).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", samples, 8000, subtype="PCM_16")
    assert read_recording(tmp_path / "a.flac", 8000).tolist() == samples.tolist()
    assert recording_seconds(tmp_path / "a.flac") == 0.5
    (tmp_path / "a.flac").write_bytes(b"fLaC but not really")
    for read in (read_recording, recording_seconds):
        with pytest.raises(RecordingError, match="is not a FLAC file that can be read"):
            read(tmp_path / "a.flac")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.wav").write_bytes(b"")
    monkeypatch.setattr(wavfile, "read", refuse)
    with pytest.raises(RecordingError, match=r"(?m)a.wav: cannot be read: Permission denied$"):
        read_recording(tmp_path / "a.wav")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("read", [read_recording, recording_seconds])
@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, read, suffix):
    pytest.importorskip("soundfile")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"null{suffix}").symlink_to("/dev/null")
    for name, why in (("pipe", "it is a named pipe"), ("null", "it is a device")):
        with pytest.raises(RecordingError, match=f"cannot be read: {why}, not a file"):
            read(tmp_path / f"{name}{suffix}")


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "W64"])
def test_other_formats_are_refused_whatever_the_name(tmp_path, kind):
    soundfile = pytest.importorskip("soundfile")
    for name in ("a.flac", "a.ogg", "a.wav"):
        soundfile.write(tmp_path / name, tone(8000), 8000, format=kind)
        with pytest.raises(RecordingError, match=f"the format {kind}|not understood"):
            read_recording(tmp_path / name)


def test_a_damaged_recording_raises_nothing_else(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    draws = np.random.default_rng(0)
    for kind in ("WAV", "RF64", "FLAC", "OGG"):
        soundfile.write(content := io.BytesIO(), tone(8000), 8000, format=kind)
        whole = content.getvalue()
        path = tmp_path / ("a.wav" if kind in ("WAV", "RF64") else "a.flac")
        for at in draws.integers(0, 90, 40):
            path.write_bytes(whole[:at] + draws.choice([b"\0\0", b"\xff\xff", b"\x7f\xff"]) + whole[at + 2 :])
            for read in (read_recording, recording_seconds):
                with contextlib.suppress(RecordingError):
                    read(path)


def test_a_recording_that_memory_cannot_hold_is_named(tmp_path, monkeypatch):
    def full(samples):
        raise MemoryError

    wavfile.write(tmp_path / "a.wav", 8000, np.zeros((90, 2), np.int16))
    monkeypatch.setattr("mptrain.workloads.sound.recordings._as_floats", full)
    with pytest.raises(RecordingError, match=r"a.wav: has 90 samples, too many for the memory"):
        read_recording(tmp_path / "a.wav")
