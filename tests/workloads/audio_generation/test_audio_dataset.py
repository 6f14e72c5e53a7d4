"""Windows of recordings: every sample is predicted once, from what came before it, and told who speaks and what is said."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest
import torch

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.audio_generation import audio_dataset
from mptrain.workloads.audio_generation.audio_dataset import (
    IGNORED,
    Clip,
    SoundDataset,
    SoundSplit,
    WindowOptions,
    hold_out_clips,
)
from mptrain.workloads.audio_generation.datasets.asterisk_audio import load_asterisk_audio
from mptrain.workloads.audio_generation.datasets.recordings import load_recordings
from mptrain.workloads.audio_generation.datasets.synthetic_sounds import (
    KINDS,
    LENGTH,
    RATE,
    _string,
    make_sounds,
    sound,
)
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.sound.recordings import SOUNDS, TRANSCRIPTS, RecordingError
from tests.loops import each

CPU = torch.device("cpu")

#: What all recordings here have in common.
ALIKE = {"levels": 256, "sample_rate": 8000}


def dataset_of(*waves, window=5, context=3, letters=None, speakers=("a",), alphabet=()):
    """A data set of waves given as lists of whole numbers, each step of 128 being far apart in µ-law."""
    held = {str(number): torch.tensor(wave, dtype=torch.int16) for number, wave in enumerate(waves)}
    clips = [
        Clip(name, len(wave), int(name) % len(speakers), tuple(letters[int(name)]) if letters else ())
        for name, wave in held.items()
    ]
    options = WindowOptions(window=window, context=context)
    split = SoundSplit("toys", clips, held.__getitem__, options, Faults(), in_memory=True)
    return SoundDataset(
        name="toys", splits={"train": split}, rate=8000, levels=256, speakers=speakers, alphabet=alphabet
    )


def prepared(dataset, indices):
    return dataset.prepare(dataset.train.fetch(indices, 0, 0), CPU, torch.contiguous_format)


def ramp(count):
    return [(number + 1) * 1000 for number in range(count)]


class TestWindows:
    @each("length", [1, 4, 5, 6, 13, 30])
    def test_every_sample_is_a_target_once(self, length):
        dataset = dataset_of(ramp(length))
        batch = prepared(dataset, list(range(len(dataset.train))))
        levels = audio_dataset.encode(torch.tensor(ramp(length)) / 32768, 256)
        silence = audio_dataset.encode(torch.zeros(1), 256)
        there = batch.targets != IGNORED
        assert torch.equal(batch.targets[there], levels)
        assert torch.equal(batch.inputs[there], torch.cat([silence, levels[:-1]]))
        assert batch.counts == tuple(there.sum(1).tolist())
        assert batch.terms == length
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64

    def test_before_a_window_is_its_context_and_first_silence(self):
        batch = prepared(dataset_of(ramp(13)), [0, 1, 2])
        wave = torch.tensor([0, 0, 0, 0, *ramp(13), 0, 0])
        levels = audio_dataset.encode(wave / 32768, 256)
        for number in range(3):
            assert torch.equal(batch.inputs[number], levels[number * 5 : number * 5 + 8])
            assert (batch.targets[number, :3] == IGNORED).all()
        assert (batch.targets[2, 6:] == IGNORED).all()
        assert [part.terms for part in batch.split(2)] == [10, 3]
        assert prepared(dataset_of([0] * 7), [0, 1]).inputs.unique().tolist() == [128]  # silence

    def test_a_recording_that_cannot_be_read_stops_or_is_counted(self):
        def read(name):
            if name == "broken":
                raise RecordingError(name, "is broken")
            return torch.ones(3, dtype=torch.int16)

        def split_of(*clips, on_error="stop"):
            options = WindowOptions(window=4, context=0)
            return SoundSplit("toys", clips, read, options, Faults(on_error), in_memory=False)

        clips = [Clip("good", 8), Clip("broken", 8)]
        with pytest.raises(DataError, match="toys: there is no usable recording"):
            split_of()
        with pytest.raises(DataError, match="broken: is broken") as error:
            split_of(*clips).fetch([0, 2], 0, 0)
        assert "on_error=skip" in error.value.hint
        split = split_of(*clips, on_error="skip")
        assert split.fetch([0, 2], 0, 0).counts == (3,)
        with pytest.raises(DataError, match="no recording of the batch is usable; the first is good"):
            split.fetch([1, 3], 0, 0)  # the second window of a recording that is shorter than its header said
        assert split.faults.unusable == {"broken": "is broken", "good": "has 3 samples, but its header says 8"}


class TestConditions:
    def test_letters_are_spread_evenly(self):
        dataset = dataset_of(ramp(12), letters=[(5, 6, 7)], alphabet=("none", *"abcdefgh"))
        batch = prepared(dataset, [0, 1, 2])
        there = batch.targets != IGNORED
        said = batch.extras["text"].gather(1, batch.extras["place"])
        assert said[there].tolist() == [5] * 4 + [6] * 4 + [7] * 4
        assert (batch.extras["place"][0, :3] == 0).all()  # before the recording it is the first

    def test_texts_of_unequal_length_are_filled_up(self):
        dataset = dataset_of(ramp(5), ramp(5), letters=[(1, 2, 3), ()], alphabet=("none", *"abc"))
        batch = prepared(dataset, [0, 1])
        assert batch.extras["text"].tolist() == [[1, 2, 3], [0, 0, 0]]
        assert (batch.extras["place"][1] == 0).all()
        assert batch.extras["place"].max() == 2
        assert prepared(dataset, [1]).extras["text"].tolist() == [[0]]
        short = prepared(dataset_of(ramp(2), letters=[tuple(range(1, 9))], alphabet=("none", *"abcdefgh")), [0])
        assert short.extras["place"][short.targets != IGNORED].tolist() == [0, 4]  # more letters than samples
        assert short.extras["place"].max() < 8

    def test_facts_say_zero_of_what_is_not_told(self):
        plain = dataset_of(ramp(5))
        assert plain.facts() == {**ALIKE, "speakers": 0, "speaker_names": (), "vocabulary_size": 0}
        assert prepared(plain, [0]).extras == {}
        two = dataset_of(ramp(5), ramp(5), speakers=("a", "b"))
        assert two.facts()["speakers"] == 2
        assert prepared(two, [0, 1]).extras["speaker"].tolist() == [0, 1]
        assert two.describe() == "0.000625 s at 8,000 Hz in 256 levels, 2 speakers, from 2 recordings"


class TestParts:
    CLIPS = tuple(Clip(str(number), 10, number % 2) for number in range(40))

    def test_no_recording_is_in_two_parts(self):
        parts = hold_out_clips("toys", self.CLIPS, {"val": 0.1, "test": 0.2}, None)
        assert [len(parts[name]) for name in ("train", "val", "test")] == [28, 4, 8]
        assert sorted(int(clip.name) for part in parts.values() for clip in part) == list(range(40))
        assert all({clip.speaker for clip in part} == {0, 1} for part in parts.values())
        assert hold_out_clips("toys", self.CLIPS, {"val": 0.1, "test": 0.2}, None) == parts

    @each("place", range(6))
    def test_parts_are_divided_by_length(self, place):
        """Short recordings alone are no part, and one that is most of all does not join a short one."""
        clips = [Clip(str(number), 500 if number == place else 16000) for number in range(11)]
        parts = hold_out_clips("toys", clips, {"val": 0.1, "test": 0.1}, None)
        assert all(sum(clip.samples for clip in part) >= 16000 for part in parts.values())
        assert sorted(int(clip.name) for part in parts.values() for clip in part) == list(range(11))
        clips = [Clip(str(number), 10**6 if number == place else 500) for number in range(6)]
        val = hold_out_clips("toys", clips, {"val": 0.1, "test": 0.0}, None)["val"]
        assert len(val) == 1 or str(place) not in [clip.name for clip in val]

    def test_shares_of_zero_and_of_everything(self):
        clips = [Clip(str(number), 1000 + number) for number in range(100)]  # about the same length
        parts = hold_out_clips("toys", clips, {"val": 0.1, "test": 0.2}, None)
        assert {part: len(found) for part, found in parts.items()} == {"train": 70, "val": 10, "test": 20}
        assert list(hold_out_clips("toys", self.CLIPS, {"val": 0.0, "test": 0.0}, None)) == ["train"]
        assert len(hold_out_clips("toys", self.CLIPS, {"val": 0.001, "test": 0.0}, 3)["train"]) == 3
        with pytest.raises(ConfigError, match="20 for val and 20 for test leaves none of 40 recordings of toys"):
            hold_out_clips("toys", self.CLIPS, {"val": 0.5, "test": 0.5}, None)
        with pytest.raises(ConfigError, match=r"dataset.train_samples=41"):
            hold_out_clips("toys", self.CLIPS, {"val": 0.0, "test": 0.0}, 41)


def write(path, samples, rate=8000, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(torch.tensor(samples, dtype=torch.int16).numpy().tobytes())


class TestRecordings:
    def load(self, root, **changed):
        whole = {"rate": 8000, "window": 100, "context": 7, "val_share": 0.0, "test_share": 0.0}
        return load_recordings(root=root, **{**whole, **changed})

    def test_folders_are_speakers_and_texts_lie_beside(self, tmp_path):
        write(tmp_path / "ann" / "one.wav", ramp(20))
        write(tmp_path / "bob" / "deep" / "two.WAV", ramp(20))
        (tmp_path / "ann" / "one.txt").write_text("Héllo 7 you\n")
        (tmp_path / "bob" / "deep" / "two.txt").write_text("...")
        (tmp_path / "README.txt").write_text("No recording lies beside this.")
        (tmp_path / "ann" / "._one.txt").write_text("what macOS leaves behind")
        dataset = self.load(tmp_path)
        assert dataset.speakers == ("ann", "bob")
        by_name = {clip.name.rpartition("/")[2]: clip for clip in dataset.train.clips}
        assert [by_name[name].speaker for name in ("one.wav", "two.WAV")] == [0, 1]
        letters = [dataset.alphabet[number] for number in by_name["one.wav"].letters]
        assert "".join(letters) == "hllo seven you"  # what the alphabet cannot write is left out
        assert by_name["two.WAV"].letters == ()
        assert dataset.facts() == {**ALIKE, "speakers": 2, "speaker_names": ("ann", "bob"), "vocabulary_size": 29}
        silent = self.load(tmp_path, text=False, speakers=False)
        assert silent.facts() == {**ALIKE, "speakers": 0, "speaker_names": (), "vocabulary_size": 0}

    def test_stereo_other_rates_and_short_clips_become_one_batch(self, tmp_path):
        write(tmp_path / "a.wav", ramp(20))
        write(tmp_path / "b.wav", [8000, 4000] * 150, channels=2)
        write(tmp_path / "c.wav", [0] * 100, rate=16000)
        dataset = self.load(tmp_path)
        batch = dataset.train.fetch(range(len(dataset.train)), 0, 0)
        assert sorted(batch.counts) == [20, 50, 50, 100]
        assert batch.inputs.shape == (4, 108)
        assert 6000 in batch.inputs

    def test_the_files_of_each_part_are_on_record_and_counted(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for number in range(5):
            write(tmp_path / "wavs" / f"{number}.wav", ramp(20))
        (tmp_path / "wavs" / "README.txt").write_text("who speaks, and where")
        dataset = self.load(Path("wavs"), val_share=0.2, test_share=0.2)
        files = dataset.card()["files"]
        assert {part: len(some) for part, some in files.items()} == {"train": 3, "val": 1, "test": 1}
        expected = [str(tmp_path / "wavs" / f"{number}.wav") for number in range(5)]
        assert sorted(file for some in files.values() for file in some) == expected
        assert dataset.describe() == "0.0125 s at 8,000 Hz in 256 levels, from 3, 1 and 1 recordings"
        assert dataset.facts()["vocabulary_size"] == 0

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("bad.wav", b"RIFF", "bad.wav: is not a WAV file that can be read"),
            ("none.wav", None, "none.wav: holds no samples"),
            ("good.txt", b"\xff\xfe\xff", "good.wav: its text file good.txt cannot be read"),
        ],
    )
    def test_a_broken_file_stops_or_is_left_out(self, tmp_path, stops_or_skips, name, content, said):
        write(tmp_path / "good.wav", ramp(20))
        write(tmp_path / "other.wav", ramp(20))
        (tmp_path / "other.txt").write_text("other")
        if content is None:
            write(tmp_path / name, [])
        else:
            (tmp_path / name).write_bytes(content)
        data = stops_or_skips(self.load, said, root=tmp_path, text=name.endswith("txt"))
        assert len(data.train.clips) == (1 if name.endswith("txt") else 2)

    @pytest.mark.parametrize(
        ("alone", "said"),
        [
            ("mute.wav", "has no text next to it, but other recordings have one"),
            ("gone.txt", "has no recording next to it"),
        ],
    )
    def test_what_has_no_counterpart_stops_or_is_counted(self, tmp_path, stops_or_skips, alone, said):
        write(tmp_path / "one.wav", ramp(20))
        (tmp_path / "one.txt").write_text("one")
        write(tmp_path / alone, ramp(20))  # whatever is in it: it is not read
        dataset = stops_or_skips(self.load, f"{alone}: {said}", root=tmp_path)
        assert [clip.name for clip in dataset.train.clips] == [str(tmp_path / "one.wav")]
        plain = self.load(tmp_path, text=False)
        assert (len(plain.train.clips), plain.train.skipped) == (2 if alone == "mute.wav" else 1, 0)

    def test_a_folder_without_recordings_says_what_it_looked_for(self, tmp_path):
        with pytest.raises(DataError, match=r"recordings not found: no file in .* ends in \.wav") as error:
            self.load(tmp_path)
        assert "made_up_sounds" in error.value.hint
        with pytest.raises(DataError, match="looked for the folder"):
            self.load(tmp_path / "nosuch")
        (tmp_path / "bad.wav").write_bytes(b"RIFF")
        with pytest.raises(DataError, match=r"no recording in .* can be used"):
            self.load(tmp_path, on_error="skip")


class TestMadeUpSounds:
    def test_they_are_the_same_every_time_and_differ(self):
        for kind in range(len(KINDS)):
            assert torch.equal(sound(kind, 0, kind), sound(kind, 0, kind))
            assert not torch.equal(sound(kind, 0, kind), sound(kind, 0, kind + 4))
            assert not torch.equal(sound(kind, 0, kind), sound(kind, 1, kind))
            assert 0.2 * 32767 < sound(kind, 0, kind).abs().max() < 0.8 * 32767
        assert sound(0, 0, 0).shape == (LENGTH,)

    def test_a_string_has_the_pitch_that_it_was_asked_for(self):
        """A loop of p samples that are averaged with the one before has a period of p + 1/2 (Karplus and Strong 1983)."""
        source = torch.Generator().manual_seed(0)
        for frequency in (125.0, 200.0, 300.0):
            wave = _string(frequency, RATE, torch.rand(RATE, generator=source, dtype=torch.float64))
            spectrum = torch.fft.rfft(wave * torch.hann_window(RATE, dtype=torch.float64), n=8 * RATE).abs()
            near = slice(int(8 * frequency * 0.9), int(8 * frequency * 1.1))
            found = (near.start + int(spectrum[near].argmax())) / 8
            period = round(RATE / frequency - 0.5) + 0.5
            assert found == pytest.approx(RATE / period, rel=0.003)

    def test_the_shipped_choice_has_the_size_that_its_file_says(self):
        dataset = make_sounds()
        assert [len(part.clips) for part in (dataset.train, dataset.val, dataset.test)] == [160, 24, 48]
        assert dataset.facts() == {**ALIKE, "speakers": 4, "speaker_names": tuple(KINDS), "vocabulary_size": 0}
        assert make_sounds(val_samples=0).val is None


@pytest.mark.skipif(
    not (SOUNDS.exists() and TRANSCRIPTS.exists()), reason="Debian's Asterisk prompts are not installed"
)
def test_the_asterisk_prompts_have_the_size_of_their_file():
    dataset = load_asterisk_audio()
    clips = [clip for part in (dataset.train, dataset.val, dataset.test) for clip in part.clips]
    assert len(clips) == 551
    assert sum(clip.samples for clip in clips) / dataset.rate / 60 == pytest.approx(24.26, abs=0.01)
    assert all(clip.letters for clip in clips)
    assert dataset.facts() == {**ALIKE, "speakers": 0, "speaker_names": (), "vocabulary_size": 29}
    assert load_asterisk_audio(text=False).facts()["vocabulary_size"] == 0
