"""Speech of the user's own: manifests and folders, what is wrong with some of it, and what a batch is made of."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.sound.recordings import Alphabet
from mptrain.workloads.speech.datasets.transcribed_folders import entries_of, load_speech
from mptrain.workloads.speech.speech_dataset import Utterance, divided_by, hold_out_utterances
from tests.loops import each


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
    def test_english_is_spelled_in_small_letters_alone(self, text, spelled):
        assert Alphabet().spelled(text) == spelled

    def test_numbers_begin_at_1_and_lead_back(self):
        alphabet = Alphabet()
        assert len(alphabet) == 29
        assert alphabet.text(alphabet.numbers("it's a z")) == "it's a z"
        assert min(alphabet.numbers("abc")) == 1
        assert alphabet.text([0, 1, 0]) == "a"
        assert alphabet.labels()[:2] == ["<blank>", "a"]
        assert Alphabet("AB-5 ").spelled("AB-5 AB") == "AB-5 AB"
        assert Alphabet("äö ").spelled("ÄÖ") == "äö"
        assert Alphabet("ab ").problem("abc d") == "its transcript has 'c' 'd', not in dataset.alphabet"
        assert Alphabet("ab ").problem("ab a") == ""

    @pytest.mark.parametrize("letters", ["", "aba"])
    def test_an_alphabet_of_none_or_repeated_letters_is_refused(self, letters):
        with pytest.raises(ConfigError, match=r"dataset\.alphabet="):
            Alphabet(letters)


class TestManifests:
    def test_a_table_has_paths_relative_to_it_and_transcripts(self, tmp_path):
        found = entries_of(table(tmp_path, ROWS), Faults())
        assert [(entry.path, entry.text) for entry in found] == [(str(tmp_path / file), text) for file, text in ROWS]

    def test_lines_of_json_may_say_how_long_a_recording_is(self, tmp_path):
        lines = [{"audio_filepath": "a.wav", "text": "x", "duration": 2}, {"audio": f"{tmp_path}/b.wav", "text": ""}]
        (tmp_path / "all.json").write_text("\n".join(map(json.dumps, lines)))
        found = entries_of(tmp_path / "all.json", Faults())
        assert [(entry.path, entry.seconds) for entry in found] == [
            (str(tmp_path / "a.wav"), 2),
            (str(tmp_path / "b.wav"), None),
        ]

    def test_folders_have_texts_beside_recordings_or_lists(self, tmp_path):
        for name in ("x/one.wav", "x/one.flac", "x/two.WAV", "84/121/84-121-0000.flac"):  # two formats of one
            record(tmp_path / name)
        (tmp_path / "x" / "one.txt").write_text("what\nis said\n")
        (tmp_path / "x" / "two.txt").write_text("two")
        (tmp_path / "84/121/84-121.trans.txt").write_text("84-121-0000 GO DO YOU HEAR\n")  # as LibriSpeech
        (tmp_path / "readme.txt").write_text("there are no recordings in this folder")
        for name in ("._one.wav", "._one.txt"):
            (tmp_path / "x" / name).write_text("what macOS leaves behind")
        found = [(entry.path.rpartition("/")[2], entry.text) for entry in entries_of(tmp_path, Faults())]
        assert found == [("84-121-0000.flac", "GO DO YOU HEAR"), ("one.wav", "what is said"), ("two.WAV", "two")]

    @pytest.mark.parametrize(
        ("names", "texts", "line", "said"),
        [
            ([], {}, "gone NO\n", r"s\.trans\.txt line 2: there is no recording gone next to it"),
            ([], {"gone": "no"}, "", r"gone\.txt: there is no recording of this name next to it"),
            (["mute"], {}, "", r"(?m)mute\.wav: has no transcript next to it$"),
            (["mute", "mute2"], {}, "", r"mute\.wav: has no transcript next to it \(and 1 more like it\)"),
            (["mute"], {}, "mute\n", r"s\.trans\.txt line 2: .*mute\.wav: its transcript is empty"),
            (["mute"], {"mute": " \n"}, "", r"mute\.txt: is empty, so the recording next to it has no transcript"),
        ],
    )
    def test_what_has_no_counterpart_stops_or_is_counted(self, tmp_path, stops_or_skips, names, texts, line, said):
        for name in ("one", *names):
            record(tmp_path / f"{name}.wav")
        for name, content in texts.items():
            (tmp_path / f"{name}.txt").write_text(content)
        (tmp_path / "s.trans.txt").write_text(f"one IT IS SAID\n{line}")
        skipped = max(1, len(names))
        assert len(stops_or_skips(load_speech, said, skipped, path=tmp_path, **NOTHING_HELD).train) == 1

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("only a path", "line 1: is not PATH, tab, TRANSCRIPT"),
            ("a.wav\t ", "line 1: a.wav: its transcript is empty"),
            ('{"audio": "a.wav"}', "line 1: has no audio_filepath and text"),
            ('{"audio": "a.wav", "text": "x", "duration": -1}', "has an invalid duration of -1 seconds"),
            ('{"audio": "a\\u0000.wav", "text": "hi", "duration": 1}', "no such file"),
            ('{"audio": "a\\ud800.wav", "text": "hi"}', "no such file"),
            ('{"audio": "good.wav", "text": "x"}\n{oops', "line 2: is not JSON"),
            ('{"a":' * 100_000, "too deep"),
        ],
    )
    def test_a_line_that_cannot_be_used_stops_or_is_counted(self, tmp_path, stops_or_skips, line, said):
        record(tmp_path / "good.wav")
        good = '{"audio": "good.wav", "text": "b"}' if "{" in line else "good.wav\tb"
        (tmp_path / "all").write_text(f"{line}\n{good}\n")
        data = stops_or_skips(load_speech, said, path=tmp_path / "all", workers=0, **NOTHING_HELD)
        assert len(data.train) == 1 + line.count("good.wav")

    def test_nothing_there_is_an_error_that_says_what_there_could_be(self, tmp_path):
        (tmp_path / "empty.tsv").write_text("")
        record(tmp_path / "mute" / "one.wav")
        no_transcript = "no recording with a transcript"
        for name, said in (
            ("no", "looked for"),
            ("", no_transcript),
            ("mute", no_transcript),
            ("empty.tsv", "lists no"),
        ):
            with pytest.raises(DataError, match=said) as caught:
                load_speech(path=tmp_path / name)
            assert said == "lists no" or "dataset=tone_words needs no files" in caught.value.hint


class TestLoading:
    def test_batches_hold_samples_letters_and_their_lengths(self, tmp_path):
        dataset = load_speech(path=table(tmp_path, ROWS), **NOTHING_HELD)
        order = dataset.train.order(0, 0, shuffle=False).tolist()
        batch = dataset.train.fetch(order, 0, 0)
        assert batch.inputs.dtype == torch.int16
        assert batch.extras["lengths"].tolist() == [16000, 17600, 19200, 20800]
        said = [
            dataset.facts()["decode"](row[:size])
            for row, size in zip(batch.targets.tolist(), batch.extras["target_lengths"].tolist(), strict=True)
        ]
        assert said == ["hello world", "it's five o'clock", "", "good bye"]
        prepared = dataset.prepare(batch, torch.device("cpu"), torch.contiguous_format)
        assert prepared.inputs.shape == (4, 131, 80)
        assert prepared.inputs.dtype == torch.float32
        assert prepared.extras["lengths"].tolist() == [101, 111, 121, 131]
        assert all(len(part.inputs) == 2 for part in prepared.split(2))
        assert dataset.train.fetch([order[2]], 0, 0).targets.tolist() == [[0]]  # nothing is said
        assert "held out" not in dataset.describe()
        record(tmp_path / "a.wav", 1.0, 44100, channels=2)
        slow = load_speech(path=tmp_path / "all.tsv", sample_rate=8000, bands=40, **NOTHING_HELD)
        assert slow.train.fetch([order[0]], 0, 0).inputs.shape == (1, 8000)

    def test_lines_of_json_where_nothing_is_said_are_counted(self, tmp_path):
        record(tmp_path / "a.wav")
        (tmp_path / "all.jsonl").write_text('{"audio": "a.wav", "text": ""}\n{"audio": "a.wav", "text": "a word"}\n')
        dataset = load_speech(path=tmp_path / "all.jsonl", **NOTHING_HELD)
        assert len(dataset.train) == 2
        assert dataset.describe().endswith(" 28 letters, 1 without words")
        only = load_speech(path=table(tmp_path, [("a.wav", "fine")]), **NOTHING_HELD)
        assert "without words" not in only.describe()

    @pytest.mark.parametrize(("rows", "hinted"), [(["path\ttext", "a.wav\tfine"], True), (["b.wav\tfine"], False)])
    def test_a_header_line_is_no_recording_and_the_hint_says_so(self, tmp_path, monkeypatch, rows, hinted):
        monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
        record(tmp_path / "a.wav")
        (tmp_path / "all.tsv").write_text("\n".join(rows))
        with pytest.raises(DataError, match=r"all\.tsv line 1: .*: there is no such file") as caught:
            load_speech(path=tmp_path / "all.tsv", **NOTHING_HELD)
        assert ("(a table has no header line)" in caught.value.hint) == hinted

    @pytest.mark.parametrize(
        ("text", "seconds", "said"),
        [
            ("naïve", 1.0, "its transcript has 'ï', not in dataset.alphabet"),
            ("room 101", 1.0, "not in dataset.alphabet"),
            ("a" * 40, 1.0, "its transcript of 40 letters needs 79 frames, but the network has 51"),
            ("abc", 0.02, "its transcript of 3 letters needs 3 frames, but the network has 2"),
            ("ab", 0, "holds no samples"),
            ("ab", None, "there is no such file"),
        ],
    )
    def test_what_no_network_could_learn_stops_or_is_counted(self, tmp_path, stops_or_skips, text, seconds, said):
        manifest = table(tmp_path, [("a.wav", "fine"), ("b.wav", text)])
        (tmp_path / "b.wav").unlink()
        if seconds is not None:
            record(tmp_path / "b.wav", seconds)
        said = rf"all\.tsv line 2: {tmp_path}/b\.wav: .*{said}"
        assert len(stops_or_skips(load_speech, said, path=manifest, **NOTHING_HELD).train) == 1

    def test_what_is_too_long_is_left_out_and_counted(self, tmp_path):
        train, val = table(tmp_path, ROWS[:2], "train.tsv"), table(tmp_path, ROWS[2:], "val.tsv")
        record(tmp_path / ROWS[0][0], 2.5)
        dataset = load_speech(path=train, val_path=val, test_share=0.0, max_seconds=2.0)
        assert (len(dataset.train), len(dataset.val), dataset.test) == (1, 2, None)
        assert dataset.too_long == {"val": 0, "train": 1}
        assert dataset.describe().endswith(" letters, 1 too long, 1 without words")
        whole = load_speech(path=train, max_seconds=None, **NOTHING_HELD)
        assert (len(whole.train), "too long" in whole.describe(), "held out" in whole.describe()) == (2, False, False)
        with pytest.raises(DataError, match=r"all 2 utterances are longer than dataset.max_seconds=0.5") as caught:
            load_speech(path=train, max_seconds=0.5, **NOTHING_HELD)
        assert caught.value.hint == "set dataset.max_seconds=3, or null for no limit"
        with pytest.raises(DataError, match="needs 12 frames"):
            load_speech(path=train, stride=40, max_seconds=None, **NOTHING_HELD)

    def test_a_broken_recording_stops_or_makes_the_batch_smaller(self, tmp_path):
        manifest, texts = tmp_path / "all.jsonl", {"a": "fine", "b": "fine too", "c": "hello"}
        rows = [{"audio": f"{name}.wav", "text": text, "duration": 3} for name, text in texts.items()]
        manifest.write_text("\n".join(map(json.dumps, rows)))
        record(tmp_path / "a.wav")
        record(tmp_path / "c.wav", 0.02)  # shorter than its manifest says
        (tmp_path / "b.wav").write_bytes(b"RIFF and no more")
        train = load_speech(path=manifest, **NOTHING_HELD).train
        for index, said in ((1, "line 2: .*b.wav: is not a WAV file"), (2, "line 3: .*c.wav: .* needs 6 frames")):
            with pytest.raises(DataError, match=rf"all.jsonl {said}"):
                train.fetch([0, index], 0, 0)
        dataset = load_speech(path=manifest, on_error="skip", **NOTHING_HELD)
        assert dataset.train.fetch([0, 1], 0, 0).samples == 1
        assert dataset.train.skipped == 1
        with pytest.raises(DataError, match=r"no utterance of the batch is usable; the first is .*all.jsonl line 2: "):
            dataset.train.fetch([1], 0, 0)

    @pytest.mark.parametrize("words", [24, 4])
    def test_parts_are_the_same_in_every_run(self, tmp_path, words):
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
        with pytest.raises(ConfigError, match="leaves none of 24 utterances of speech to train on"):
            load_speech(path=manifest, val_share=0.6, test_share=0.6)


def uttered(texts):
    """Utterances of these transcripts, in an order of their own."""
    return [Utterance(f"{place * 7 % 1009:04}", text, 16000) for place, text in enumerate(texts)]


FREQUENT = {20, 33, 24, 11, 18}


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
            ([f"{n:02}" for n in range(35) for _ in range(6 if n in FREQUENT else 1)], (0.1, 0.1), "utterance"),
        ],
    )
    def test_what_stays_together(self, texts, shares, by):
        assert divided_by(uttered(texts), dict(zip(("val", "test"), shares, strict=True))) == by

    def test_parts_have_each_word_or_whole_transcripts(self):
        utterances, shares = uttered(["yes", "no", "up", "down"] * 20), {"val": 0.1, "test": 0.2}
        parts = hold_out_utterances("toys", utterances, shares, "utterance", None)
        for part, count in (("train", 14), ("val", 2), ("test", 4)):
            assert set(Counter(one.text for one in parts[part]).values()) == {count}
            assert len({one.text for one in parts[part]}) == 4
        assert len({one.name for found in parts.values() for one in found}) == 80
        few = hold_out_utterances("toys", utterances, shares, "utterance", 5)
        assert len(few["train"]) == 5
        assert set(few["train"]) <= set(parts["train"])
        assert few["val"] == parts["val"]
        whole = hold_out_utterances("toys", uttered(str(n % 300) for n in range(900)), shares, "transcript", None)
        assert {part: len(found) for part, found in whole.items()} == {"train": 630, "val": 90, "test": 180}
        assert sum(len({one.text for one in found}) for found in whole.values()) == 300
