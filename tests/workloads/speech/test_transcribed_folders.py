"""Speech of the user's own: manifests and folders, what is wrong with some of it, and what a batch is made of."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from loops import each
from scipy.io import wavfile

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.sound.alphabet import Alphabet
from mptrain.workloads.speech.datasets.transcribed_folders import entries_of, load_speech
from mptrain.workloads.speech.speech_dataset import Utterance, divided_by, hold_out_utterances


def record(path, seconds=1.0, rate=16000, channels=1, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (int(rate * seconds), channels) if channels > 1 else int(rate * seconds)
    wavfile.write(path, rate, np.random.default_rng(seed).integers(-999, 999, shape).astype(np.int16))


def table(folder, rows, name="all.tsv"):
    for place, (file, _) in enumerate(rows):
        record(folder / file, 1.0 + place / 10, seed=place)
    (folder / name).write_text("".join(f"{file}\t{text}\n" for file, text in rows))
    return folder / name


ROWS = [("a.wav", "Hello, world!"), ("sub/b.wav", "It\u2019s 5 o'clock."), ("c.wav", "..."), ("d.wav", "good-bye")]
NOTHING_HELD = {"val_share": 0.0, "test_share": 0.0}


class TestAlphabet:
    @each(
        ("text", "spelled"),
        [
            ("Hello, world!", "hello world"),
            ("It\u2019s 5 o'clock.", "it's five o'clock"),
            ("  well -- known ", "well known"),
            ("good-bye", "good bye"),
            ("...", ""),
            ("50", "50"),
        ],
    )
    def test_english_is_spelled_in_small_letters_without_punctuation(self, text, spelled):
        assert Alphabet().spelled(text) == spelled

    def test_letters_that_are_in_the_alphabet_stay(self):
        assert Alphabet("AB-5 ").spelled("AB-5 AB") == "AB-5 AB"
        assert Alphabet("äö ").spelled("ÄÖ") == "äö"

    def test_numbers_begin_at_1_and_lead_back(self):
        alphabet = Alphabet()
        assert len(alphabet) == 29
        assert alphabet.text(alphabet.numbers("it's a z")) == "it's a z"
        assert min(alphabet.numbers("abc")) == 1
        assert alphabet.text([0, 1, 0]) == "a"
        assert alphabet.labels()[:2] == ["<blank>", "a"]

    def test_foreign_letters_are_named(self):
        assert Alphabet("ab ").problem("abc d") == "its transcript has 'c' 'd', not in dataset.alphabet"
        assert Alphabet("ab ").problem("ab a") == ""

    @pytest.mark.parametrize("letters", ["", "aba"])
    def test_an_alphabet_without_letters_or_with_one_twice_is_refused(self, letters):
        with pytest.raises(ConfigError, match=r"dataset\.alphabet="):
            Alphabet(letters)


class TestManifests:
    def test_a_table_has_paths_relative_to_it_and_transcripts(self, tmp_path):
        found = entries_of(table(tmp_path, ROWS), Faults())
        assert [(entry.path, entry.text) for entry in found] == [(str(tmp_path / file), text) for file, text in ROWS]

    def test_lines_of_json_may_say_how_long_a_recording_is(self, tmp_path):
        lines = [
            {"audio_filepath": "a.wav", "text": "x", "duration": 2},
            {"audio": str(tmp_path / "b.wav"), "text": ""},
        ]
        (tmp_path / "all.json").write_text("\n".join(map(json.dumps, lines)))
        found = entries_of(tmp_path / "all.json", Faults())
        assert [(entry.path, entry.seconds) for entry in found] == [
            (str(tmp_path / "a.wav"), 2),
            (str(tmp_path / "b.wav"), None),
        ]

    def test_a_folder_as_librispeech_has_them(self, tmp_path):
        record(tmp_path / "84" / "121" / "84-121-0000.flac")
        (tmp_path / "84" / "121" / "84-121.trans.txt").write_text("84-121-0000 GO DO YOU HEAR\n")
        found = entries_of(tmp_path, Faults())
        assert [(entry.path.rpartition("/")[2], entry.text) for entry in found] == [
            ("84-121-0000.flac", "GO DO YOU HEAR"),
        ]

    def test_a_folder_of_recordings_beside_their_texts(self, tmp_path):
        record(tmp_path / "x" / "one.wav")
        (tmp_path / "x" / "one.txt").write_text("what\nis said\n")
        (tmp_path / "readme.txt").write_text("there are no recordings in this folder")
        for name in ("._one.wav", "._one.txt"):
            (tmp_path / "x" / name).write_text("what macOS leaves behind")
        assert [entry.text for entry in entries_of(tmp_path, Faults())] == ["what is said"]

    def test_a_recording_in_two_formats_is_one(self, tmp_path):
        for name in ("one.wav", "one.flac", "two.WAV"):
            record(tmp_path / name)
        (tmp_path / "one.txt").write_text("one")
        (tmp_path / "two.txt").write_text("two")
        found = [(entry.path.rpartition("/")[2], entry.text) for entry in entries_of(tmp_path, Faults())]
        assert found == [("one.wav", "one"), ("two.WAV", "two")]

    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            ("list", r"s\.trans\.txt line 2: there is no recording gone next to it"),
            ("text", r"gone\.txt: there is no recording of this name next to it"),
            ("recording", r"mute\.wav: has no transcript next to it"),
            ("words of a list", r"s\.trans\.txt line 2: .*mute\.wav: its transcript is empty"),
            ("words of a text", r"mute\.txt: is empty, so the recording next to it has no transcript"),
        ],
    )
    def test_transcripts_and_recordings_without_each_other_stop_or_are_counted(self, tmp_path, kind, said):
        record(tmp_path / "one.wav")
        more = {"list": "gone NO\n", "words of a list": "mute\n"}
        (tmp_path / "s.trans.txt").write_text("one IT IS SAID\n" + more.get(kind, ""))
        if kind.startswith("words"):
            record(tmp_path / "mute.wav")
        if kind == "words of a text":
            (tmp_path / "mute.txt").write_text(" \n")
        if kind == "text":
            (tmp_path / "gone.txt").write_text("no")
        if kind == "recording":
            record(tmp_path / "mute.wav")
            record(tmp_path / "mute2.wav")
            said += r" \(and 1 more like it\)"
        with pytest.raises(DataError, match=said) as caught:
            load_speech(path=tmp_path, **NOTHING_HELD)
        assert "dataset.on_error=skip" in caught.value.hint
        data = load_speech(path=tmp_path, on_error="skip", **NOTHING_HELD)
        assert (len(data.train), data.train.skipped) == (1, 2 if kind == "recording" else 1)

    def test_recordings_without_a_single_transcript_are_no_fault_of_each(self, tmp_path):
        record(tmp_path / "one.wav")
        with pytest.raises(DataError, match="no recording with a transcript below"):
            entries_of(tmp_path, Faults())

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("only a path\n", "line 1: is not PATH, tab, TRANSCRIPT"),
            ("a.wav\t \n", "line 1: a.wav: its transcript is empty"),
            ('{"audio": "a.wav"}\n', "line 1: has no audio_filepath and text"),
            ('{"audio": "a.wav", "text": "x", "duration": -1}\n', "has an invalid duration of -1 seconds"),
            ('{"audio": "a.wav", "text": "x"}\n{oops\n', "line 2: is not JSON"),
        ],
    )
    def test_a_line_that_cannot_be_understood_stops_or_is_counted(self, tmp_path, content, said):
        (tmp_path / "all").write_text(content)
        with pytest.raises(DataError, match=said):
            entries_of(tmp_path / "all", Faults())
        good = "good.wav\tb\n" if "{" not in content else '{"audio": "good.wav", "text": "b"}\n'
        (tmp_path / "all").write_text(content + good)
        faults = Faults("skip")
        assert "good.wav" in entries_of(tmp_path / "all", faults)[-1].path
        assert len(faults.found) == 1

    def test_nothing_there_is_an_error_that_says_what_there_could_be(self, tmp_path):
        for place, said in ((tmp_path / "no", "looked for"), (tmp_path, "no recording with a transcript")):
            with pytest.raises(DataError, match=said) as caught:
                load_speech(path=place)
            assert "dataset=tone_words needs no files" in caught.value.hint
        (tmp_path / "empty.tsv").write_text("")
        with pytest.raises(DataError, match="lists no recording"):
            load_speech(path=tmp_path / "empty.tsv")


class TestLoading:
    def test_batches_hold_samples_letters_and_their_lengths(self, tmp_path):
        dataset = load_speech(path=table(tmp_path, ROWS), **NOTHING_HELD)
        order = dataset.train.order(0, 0, shuffle=False).tolist()
        batch = dataset.train.fetch(order, 0, 0)
        assert batch.inputs.dtype == torch.int16
        assert batch.more["lengths"].tolist() == [16000, 17600, 19200, 20800]
        said = [
            dataset.facts()["decode"](row[:size])
            for row, size in zip(batch.targets.tolist(), batch.more["target_lengths"].tolist(), strict=True)
        ]
        assert said == ["hello world", "it's five o'clock", "", "good bye"]
        prepared = dataset.prepare(batch, torch.device("cpu"), torch.contiguous_format)
        assert prepared.inputs.shape == (4, 131, 80)
        assert prepared.inputs.dtype == torch.float32
        assert prepared.more["lengths"].tolist() == [101, 111, 121, 131]
        assert all(len(part.inputs) == 2 for part in prepared.split(2))

    def test_a_batch_of_empty_transcripts_has_a_column_all_the_same(self, tmp_path):
        dataset = load_speech(path=table(tmp_path, [("a.wav", "?"), ("b.wav", "...")]), **NOTHING_HELD)
        batch = dataset.train.fetch([0, 1], 0, 0)
        assert batch.targets.tolist() == [[0], [0]]
        assert batch.more["target_lengths"].tolist() == [0, 0]

    def test_where_nothing_is_said_lines_of_json_may_say_so_and_it_is_counted(self, tmp_path):
        record(tmp_path / "a.wav")
        (tmp_path / "all.jsonl").write_text('{"audio": "a.wav", "text": ""}\n{"audio": "a.wav", "text": "a word"}\n')
        dataset = load_speech(path=tmp_path / "all.jsonl", **NOTHING_HELD)
        assert len(dataset.train) == 2
        assert dataset.describe().endswith(" 28 letters, 1 without words")
        only = load_speech(path=table(tmp_path, [("a.wav", "fine")]), **NOTHING_HELD)
        assert "without words" not in only.describe()

    def test_a_recording_without_samples_is_found_before_training_and_called_so(self, tmp_path):
        manifest = table(tmp_path, [("a.wav", "fine"), ("b.wav", "ab")])
        record(tmp_path / "b.wav", 0)
        with pytest.raises(DataError, match=r"line 2: .*b\.wav: holds no samples"):
            load_speech(path=manifest, **NOTHING_HELD)
        assert load_speech(path=manifest, on_error="skip", **NOTHING_HELD).train.skipped == 1

    @pytest.mark.parametrize(("rows", "hinted"), [(["path\ttext", "a.wav\tfine"], True), (["b.wav\tfine"], False)])
    def test_a_header_line_is_no_recording_and_the_hint_says_so(self, tmp_path, monkeypatch, rows, hinted):
        monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
        record(tmp_path / "a.wav")
        (tmp_path / "all.tsv").write_text("\n".join(rows))
        with pytest.raises(DataError, match=r"all\.tsv line 1: .*: there is no such file") as caught:
            load_speech(path=tmp_path / "all.tsv", **NOTHING_HELD)
        assert ("(a table has no header line)" in caught.value.hint) == hinted

    def test_other_rates_and_stereo_come_to_one_rate(self, tmp_path):
        manifest = table(tmp_path, ROWS[:1])
        record(tmp_path / "a.wav", 1.0, 44100, channels=2)
        dataset = load_speech(path=manifest, sample_rate=8000, bands=40, **NOTHING_HELD)
        assert dataset.train.fetch([0], 0, 0).inputs.shape == (1, 8000)

    @pytest.mark.parametrize(
        ("text", "seconds", "said"),
        [
            ("naïve", 1.0, "its transcript has 'ï', not in dataset.alphabet"),
            ("room 101", 1.0, "not in dataset.alphabet"),
            ("a" * 40, 1.0, "its transcript of 40 letters needs 79 frames, but the network has 51"),
            ("abc", 0.02, "its transcript of 3 letters needs 3 frames, but the network has 2"),
        ],
    )
    def test_a_transcript_that_no_network_could_give_stops_or_is_counted(self, tmp_path, text, seconds, said):
        manifest = table(tmp_path, [("a.wav", "fine"), ("b.wav", text)])
        record(tmp_path / "b.wav", seconds)
        with pytest.raises(DataError, match=rf"all\.tsv line 2: {tmp_path}/b\.wav: .*{said}"):
            load_speech(path=manifest, **NOTHING_HELD)
        dataset = load_speech(path=manifest, on_error="skip", **NOTHING_HELD)
        assert (len(dataset.train), dataset.train.skipped) == (1, 1)

    def test_what_is_too_long_is_left_out_and_counted_and_a_limit_that_leaves_nothing_is_an_error(self, tmp_path):
        train, val = table(tmp_path, ROWS[:2], "train.tsv"), table(tmp_path, ROWS[2:], "val.tsv")
        record(tmp_path / ROWS[0][0], 2.5)
        dataset = load_speech(path=train, val_path=val, test_share=0.0, max_seconds=2.0)
        assert (len(dataset.train), len(dataset.val), dataset.too_long) == (1, 2, {"val": 0, "train": 1})
        assert dataset.describe().endswith(" letters, 1 too long, 1 without words")
        assert "too long" not in load_speech(path=train, max_seconds=None, **NOTHING_HELD).describe()
        with pytest.raises(
            DataError, match=r"speech train: all 2 utterances are longer than dataset.max_seconds=0.5"
        ) as caught:
            load_speech(path=train, max_seconds=0.5, **NOTHING_HELD)
        assert caught.value.hint == "set dataset.max_seconds=3, or null for no limit"

    def test_a_stride_says_how_many_frames_are_left_for_letters(self, tmp_path):
        manifest = table(tmp_path, [("a.wav", "ab" * 20)])
        assert len(load_speech(path=manifest, stride=2, **NOTHING_HELD).train) == 1
        with pytest.raises(DataError, match="needs 40 frames, but the network has 26"):
            load_speech(path=manifest, stride=4, **NOTHING_HELD)

    def test_a_broken_recording_stops_or_makes_the_batch_smaller(self, tmp_path):
        manifest = tmp_path / "all.jsonl"
        rows = [
            {"audio": "a.wav", "text": "fine", "duration": 1},
            {"audio": "b.wav", "text": "fine too", "duration": 1},
        ]
        manifest.write_text("\n".join(map(json.dumps, rows)))
        record(tmp_path / "a.wav")
        (tmp_path / "b.wav").write_bytes(b"RIFF and no more")
        with pytest.raises(DataError, match=r"all.jsonl line 2: .*b.wav: is not a WAV file that can be read"):
            load_speech(path=manifest, **NOTHING_HELD).train.fetch([0, 1], 0, 0)
        dataset = load_speech(path=manifest, on_error="skip", **NOTHING_HELD)
        assert dataset.train.fetch([0, 1], 0, 0).samples == 1
        assert dataset.train.skipped == 1
        with pytest.raises(DataError, match=r"no utterance of the batch is usable; the first is .*all.jsonl line 2: "):
            dataset.train.fetch([1], 0, 0)

    def test_a_recording_that_is_not_there_is_found_before_training(self, tmp_path):
        manifest = table(tmp_path, ROWS)
        (tmp_path / "a.wav").unlink()
        with pytest.raises(DataError, match=r"all.tsv line 1: .*a.wav: there is no such file"):
            load_speech(path=manifest)
        assert load_speech(path=manifest, on_error="skip", **NOTHING_HELD).train.skipped == 1

    def test_a_recording_shorter_than_its_manifest_says_does_not_reach_the_loss(self, tmp_path):
        record(tmp_path / "a.wav", 0.02)
        (tmp_path / "all").write_text('{"audio": "a.wav", "text": "hello", "duration": 3}')
        with pytest.raises(DataError, match=r"all line 1: .*a.wav: .* needs 6 frames, but the network has 2"):
            load_speech(path=tmp_path / "all", **NOTHING_HELD).train.fetch([0], 0, 0)

    @pytest.mark.parametrize("words", [24, 4])
    def test_parts_are_the_same_in_every_run_and_it_is_said_how_they_were_made(self, tmp_path, words):
        manifest = table(
            tmp_path, [(f"{place}.wav", "abcdefghijklmnopqrstuvwxyz"[place % words]) for place in range(24)]
        )
        one, other = (load_speech(path=manifest, val_share=0.25, test_share=0.25) for _ in range(2))
        texts = []
        for part in ("train", "val", "test"):
            assert getattr(one, part).utterances == getattr(other, part).utterances
            texts.append({utterance.text for utterance in getattr(one, part).utterances})
        assert [len(part) for part in (one.train, one.val, one.test)] == [12, 6, 6]
        by = "utterance" if words == 4 else "transcript"
        assert one.describe() == f"80 bands every 10 ms, 28 letters, held out by {by}"
        assert one.card()["held_out_by"] == by
        assert len(set.union(*texts)) == words
        assert sum(map(len, texts)) == (3 * words if by == "utterance" else words)
        with pytest.raises(ConfigError, match="none is left to train on"):
            load_speech(path=manifest, val_share=0.6, test_share=0.6)

    def test_nothing_is_said_of_dividing_where_each_part_has_files(self, tmp_path):
        manifest = table(tmp_path, ROWS)
        assert "held out" not in load_speech(path=manifest, val_path=manifest, test_path=manifest).describe()
        assert "held out" not in load_speech(path=manifest, **NOTHING_HELD).describe()

    def test_files_for_validation_and_test_are_taken_as_they_are(self, tmp_path):
        train, val = table(tmp_path, ROWS[:2], "train.tsv"), table(tmp_path, ROWS[2:], "val.tsv")
        dataset = load_speech(path=train, val_path=val, test_share=0.0)
        assert (len(dataset.train), len(dataset.val), dataset.test) == (2, 2, None)


def uttered(texts):
    """Utterances of these transcripts, in an order of their own."""
    return [Utterance(f"{place * 7 % 1009:04}", text, 16000) for place, text in enumerate(texts)]


class TestDivision:
    """Whole transcripts are held out, so that none is known; but of a few words each part has its share."""

    @each(
        ("texts", "shares", "by"),
        [
            (["yes", "no", "up", "down"] * 20, (0.1, 0.1), "utterance"),
            ([str(number % 35) for number in range(700)], (0.1, 0.1), "utterance"),  # commands
            ([str(number % 300) for number in range(900)], (0.1, 0.1), "transcript"),  # sentences, read by three
            ([str(number % 300) for number in range(900)], (0.0, 0.02), "utterance"),
            ([str(number) for number in range(30)] + ["0"], (0.1, 0.1), "transcript"),  # hardly one twice
            (["yes", "no"] * 20, (0.0, 0.0), ""),
            (["yes", "no"] * 20, (0.1, 0.0), "utterance"),
            (["yes"] * 20, (0.1, 0.1), "utterance"),
            # Half of the utterances are five words, six times each: a part was one of these words.
            (
                [f"{n:02}" for n in range(35) for _ in range(6 if n in {20, 33, 24, 11, 18} else 1)],
                (0.1, 0.1),
                "utterance",
            ),
        ],
    )
    def test_what_stays_together(self, texts, shares, by):
        assert divided_by(uttered(texts), dict(zip(("val", "test"), shares, strict=True))) == by

    def test_divided_by_utterance_each_part_has_its_share_of_each_word(self):
        utterances = uttered(["yes", "no", "up", "down"] * 20)
        parts = hold_out_utterances("toys", utterances, {"val": 0.1, "test": 0.2}, "utterance", None)
        assert {part: Counter(one.text for one in found) for part, found in parts.items()} == {
            part: dict.fromkeys(("yes", "no", "up", "down"), count)
            for part, count in (("train", 14), ("val", 2), ("test", 4))
        }
        assert len({one.name for found in parts.values() for one in found}) == 80

    def test_divided_by_transcript_no_transcript_is_in_two_parts(self):
        utterances = uttered(str(number % 300) for number in range(900))
        parts = hold_out_utterances("toys", utterances, {"val": 0.1, "test": 0.2}, "transcript", None)
        assert {part: len(found) for part, found in parts.items()} == {"train": 630, "val": 90, "test": 180}
        assert sum(len({one.text for one in found}) for found in parts.values()) == 300

    def test_fewer_to_train_on_are_the_first_of_more(self):
        utterances = uttered(["yes", "no"] * 20)
        whole, few = (hold_out_utterances("toys", utterances, {"val": 0.1}, "utterance", n) for n in (None, 5))
        assert len(few["train"]) == 5
        assert set(few["train"]) <= set(whole["train"])
        assert few["val"] == whole["val"]


@pytest.mark.parametrize(
    "line",
    [
        '{"audio": "a\\u0000.wav", "text": "hi", "duration": 1}',
        '{"audio": "a\\ud800.wav", "text": "hi"}',
        '{"a":' * 100_000,
    ],
)
def test_lines_of_which_no_recording_can_come_are_skipped_and_counted(tmp_path, line):
    manifest = table(tmp_path, ROWS)
    rows = [json.dumps({"audio": file, "text": text}) for file, text in ROWS]
    manifest.write_text("\n".join([*rows, line]))
    with pytest.raises(DataError, match=r"no such file|too deep"):
        load_speech(path=manifest, workers=0, **NOTHING_HELD)
    data = load_speech(path=manifest, workers=0, on_error="skip", **NOTHING_HELD)
    assert (len(data.train), data.train.skipped) == (4, 1)
