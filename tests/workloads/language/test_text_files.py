"""Text: every token is a target once, lanes read on, and no part of the data sees another's words."""

from __future__ import annotations

import re

import pytest
import torch

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.language.datasets.python_docs import load_python_docs, read_topics
from mptrain.workloads.language.datasets.text_files import load_text
from mptrain.workloads.language.language_dataset import TextSplit, divide, joined
from mptrain.workloads.text.tokens import UNKNOWN, learn
from tests.loops import each


def split_of(tokens=101, length=5, lanes=0, **more):
    return TextSplit("toys train", torch.arange(tokens, dtype=torch.int32), length, lanes=lanes, **more)


def batches_of(split, size, epoch=0, start=0, shuffle=True, seed=0):
    return list(Loader(split, size, seed=seed, shuffle=shuffle).batches(epoch, start))


class TestWindows:
    def test_every_token_but_the_first_is_a_target_once(self):
        split = split_of(tokens=101, length=5)
        batches = batches_of(split, 3)
        for batch in batches:
            assert torch.equal(batch.targets, batch.inputs + 1)
            assert batch.inputs.dtype == batch.targets.dtype == torch.int64
            assert batch.terms == batch.inputs.numel()
            assert batch.extras == {}
        assert sorted(torch.cat([batch.targets.flatten() for batch in batches]).tolist()) == list(range(1, 101))

    @pytest.mark.parametrize(("tokens", "windows"), [(6, 1), (10, 1), (11, 2), (15, 2), (16, 3)])
    def test_a_window_needs_one_token_more_than_its_length(self, tokens, windows):
        assert len(split_of(tokens=tokens, length=5)) == windows

    @pytest.mark.parametrize(
        ("choices", "said", "hint"),
        [
            ({"tokens": 5}, "toys train has 5 tokens; .*sequence_length=5 needs 6", "sequence_length=4 or less"),
            ({"tokens": 2, "length": 64}, "has 2 tokens", "choose a longer text"),
            ({"tokens": 9, "length": 64}, "has 9 tokens", "sequence_length=8 or less"),
            ({"tokens": 3, "shares": "dataset.val_share"}, "has 3 tokens", "change dataset.val_share"),
            ({"tokens": 0}, "has 0 tokens", ""),
            ({"limit": 21}, "dataset.train_samples=21, but toys train has 20 windows of 5 tokens", ""),
        ],
    )
    def test_a_text_too_short_is_refused_with_the_numbers(self, choices, said, hint):
        assert len(split_of(limit=4)) == 4
        with pytest.raises(ConfigError, match=said) as error:
            split_of(**choices)
        assert hint in str(error.value.hint)


class TestLanes:
    @each(("windows", "lanes"), [(20, 4), (23, 4), (20, 20), (3, 7), (40, 1), (41, 3)])
    def test_over_an_epoch_each_lane_reads_on_without_a_gap(self, windows, lanes):
        split = split_of(tokens=windows * 5 + 1, lanes=lanes)
        batches = batches_of(split, lanes)
        steps, rest = divmod(windows, lanes)
        assert [batch.samples for batch in batches] == [lanes] * steps + [rest] * (rest > 0)
        for step, batch in enumerate(batches[:steps]):
            assert batch.extras["lane"].tolist() == list(range(lanes))
            assert batch.extras["fresh"].tolist() == [step == 0] * lanes
        for lane in range(lanes):
            text = torch.cat([batch.inputs[lane] for batch in batches[:steps]]) if steps else torch.zeros(0)
            assert text.tolist() == list(range(lane * steps * 5, (lane + 1) * steps * 5))
        if rest:
            assert batches[-1].extras["fresh"].all()
            assert batches[-1].extras["lane"].tolist() == list(range(rest))
        targets = torch.cat([batch.targets.flatten() for batch in batches])
        assert sorted(targets.tolist()) == list(range(1, windows * 5 + 1))
        tail = batches_of(split, lanes, start=steps // 2)
        assert [one.inputs.tolist() for one in tail] == [one.inputs.tolist() for one in batches[steps // 2 :]]

    def test_more_samples_than_lanes_are_refused(self):
        with pytest.raises(ConfigError, match=r"a batch of 6 samples exceeds the 4 lanes"):
            batches_of(split_of(tokens=120, lanes=4), 6)
        batches = batches_of(split_of(tokens=121, lanes=4), 2)
        assert torch.cat([batch.inputs[0] for batch in batches[0:12:2]]).tolist() == list(range(30))
        parts = batches_of(split_of(tokens=120, lanes=4), 4)[1].split(3)
        assert [part.extras["lane"].tolist() for part in parts] == [[0, 1], [2], [3]]
        assert [part.terms for part in parts] == [10, 5, 5]


class TestTokens:
    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [
            ("word", ["it", "isn", "'", "t", "2", "==", "2", ".", UNKNOWN, "ok"]),
            ("char", list("it isn't\n2 == 2. <unk> ok")),
            ("space", ["it", "isn't", "\n", "2", "==", "2.", UNKNOWN, "ok"]),
        ],
    )
    def test_what_a_token_is(self, tokens, expected):
        text = "it isn't\n2 == 2. <unk> ok"
        vocabulary = learn("toys", text, tokens, 1, None)
        assert [vocabulary.entries[number] for number in vocabulary.numbers(text)] == expected

    def test_the_most_frequent_come_first_and_the_rare_are_unknown(self):
        vocabulary = learn("toys", "b b b a a c c d", "word", 2, None)
        assert vocabulary.entries == (UNKNOWN, "b", "a", "c")
        assert vocabulary.numbers("a b c d e").tolist() == [2, 1, 3, 0, 0]
        assert vocabulary.numbers("a").dtype == vocabulary.numbers("").dtype == torch.int32
        assert learn("toys", "b b b a a c c d", "word", 1, 3).entries == (UNKNOWN, "b", "a")
        with pytest.raises(DataError, match="toys: the text is empty"):
            learn("toys", " \n ", "word", 1, None)


class TestParts:
    def test_cuts_lie_between_documents_where_these_are_small_enough(self):
        documents = [f"{number:04d}" * 5 + "\n" for number in range(100)]
        parts = divide(documents, 0.1, 0.2)
        assert list(parts) == ["train", "val", "test"]
        assert "".join(parts.values()) == joined(documents)
        assert [len(part) // 21 for part in parts.values()] == [70, 10, 20]
        assert all(len(part) % 21 == 0 for part in parts.values())

    def test_one_document_is_cut_after_a_paragraph_or_a_line(self):
        paragraphs = "".join(f"line {number}\nline\n\n" for number in range(100))
        assert all(part.endswith("\n\n") for part in divide([paragraphs], 0.1, 0.1).values())
        lines = "".join(f"line {number}\n" for number in range(100))
        parts = divide([lines], 0.1, 0.1)
        assert all(part.endswith("\n") for part in parts.values())
        assert abs(len(parts["test"]) / len(lines) - 0.1) < 0.02
        assert [len(part) for part in divide(["x" * 999], 0.1, 0.2).values()] == [700, 100, 200]

    def test_shares_of_zero_and_of_everything(self):
        assert list(divide(["a\n" * 50], 0, 0.1)) == ["train", "test"]
        assert divide(["a"], 0, 0) == {"train": "a\n"}
        with pytest.raises(ConfigError, match=r"dataset.val_share=0.5 and dataset.test_share=0.5 leave no text"):
            divide(["a"], 0.5, 0.5)


class TestPythonDocs:
    def test_facts_follow_what_was_asked_for(self):
        words = load_python_docs(batch_size=8, min_count=1)
        assert not (words.train.numbers == 0).any()
        assert 0 < (words.test.numbers == 0).float().mean() < 0.15  # words of the test part alone
        facts = words.facts()
        assert facts.pop("decode")([0, 1]) == f"{UNKNOWN} {words.vocabulary.entries[1]}"
        assert facts == {"vocabulary_size": len(words.vocabulary), "sequence_length": 128, "lanes": 8}
        characters = load_python_docs(tokens="char", sequence_length=32, stream=False)
        facts = characters.facts()
        assert facts.pop("decode")(characters.vocabulary.numbers("with spaces\n").tolist()) == "with spaces\n"
        assert facts == {"vocabulary_size": len(characters.vocabulary), "sequence_length": 32, "lanes": 0}
        assert 80 < len(characters.vocabulary) < 250
        assert characters.describe() == f"32 characters (vocabulary {len(characters.vocabulary)})"

    def test_no_paragraph_is_in_two_parts(self):
        seen, parts = set(), divide(read_topics(), 0.1, 0.2)
        for part in parts.values():
            paragraphs = [" ".join(text.split()) for text in re.split(r"\n[^\S\n]*\n", part.strip("\n"))]
            own = {paragraph for paragraph in paragraphs if paragraph}
            assert len(own) == sum(map(bool, paragraphs))
            assert not own & seen
            seen |= own
        shares = {name: len(part) / sum(map(len, parts.values())) for name, part in parts.items()}
        assert shares == pytest.approx({"train": 0.7, "val": 0.1, "test": 0.2}, abs=0.17)
        assert shares["val"] == pytest.approx(0.1, abs=0.06)

    def test_a_python_without_topics_is_told_what_else_to_do(self, monkeypatch):
        monkeypatch.setattr("mptrain.workloads.language.datasets.python_docs.MODULE", "pydoc_data.nosuch")
        with pytest.raises(DataError, match=r"this Python has no pydoc_data.nosuch") as error:
            load_python_docs()
        assert "dataset=text" in error.value.hint


STORY = "".join(f"one two three {number} four\nfive six.\n\n" for number in range(200))


class TestText:
    def test_one_file_is_divided_and_the_training_part_read(self, tmp_path):
        path = tmp_path / "story.md"
        path.write_text(STORY)
        data = load_text(path=path, sequence_length=8, min_count=1, batch_size=4)
        assert "0" in data.vocabulary.entries
        assert "199" not in data.vocabulary.entries
        assert data.val is not None
        assert (data.test.numbers == 0).any()
        lengths = [len(split.numbers) for split in (data.train, data.val, data.test)]
        assert lengths[0] == pytest.approx(0.8 * sum(lengths), rel=0.02)

    def test_files_that_name_their_parts_are_those(self, tmp_path):
        for name, text in (("train", "a b c " * 50), ("valid", "a b d " * 20), ("test", "a e c " * 20)):
            (tmp_path / f"wiki.{name}.tokens").write_text(text)
        (tmp_path / "README.txt").write_text("not a part " * 100)
        data = load_text(path=tmp_path, sequence_length=8, tokens="space")
        assert set(data.vocabulary.entries) == {UNKNOWN, "a", "b", "c"}  # the one line end is too rare
        lengths = [len(split.numbers) for split in (data.train, data.val, data.test)]
        assert lengths == [151, 61, 61]  # a line end is a token

    def test_a_part_without_a_file_is_cut_off_the_training_text(self, tmp_path):
        (tmp_path / "train.txt").write_text(STORY)
        (tmp_path / "test.txt").write_text("one two " * 50)
        data = load_text(path=tmp_path, sequence_length=8)
        assert len(data.test.numbers) == 100
        assert len(data.val.numbers) == pytest.approx(0.1 * (len(data.train.numbers) + len(data.val.numbers)), rel=0.1)
        assert load_text(path=tmp_path, sequence_length=8, val_share=0.0).val is None

    def test_a_folder_a_pattern_and_a_list_read_the_same_files(self, tmp_path):
        for number in range(10):
            (tmp_path / f"chapter{number}.txt").write_text(f"chapter {number} " * 40)
        (tmp_path / "picture.png").write_bytes(b"\x89PNG")
        expected = load_text(path=tmp_path, sequence_length=8).train.numbers
        for path in (tmp_path / "*.txt", tuple(tmp_path / f"chapter{number}.txt" for number in range(10))):
            assert torch.equal(load_text(path=path, sequence_length=8).train.numbers, expected)

    def test_a_validation_file_is_not_merged_with_other_files(self, tmp_path):
        for name in ("story.txt", "wiki.valid.txt"):
            (tmp_path / name).write_text(STORY)
        with pytest.raises(DataError, match=r"found .*wiki\.valid\.txt, but no file to train on") as caught:
            load_text(path=tmp_path, sequence_length=8)
        assert caught.value.hint.startswith(f"rename {tmp_path / 'story.txt'} to train.txt, or set dataset.path")
        alone = load_text(path=tmp_path / "wiki.valid.txt", sequence_length=8)
        assert alone.files == {"train": [str(tmp_path / "wiki.valid.txt")]}

    @pytest.mark.parametrize("path", ["nosuch.txt", "*.nosuch", "nosuch/folder"])
    def test_what_is_not_there_is_named_with_the_data_that_is(self, tmp_path, path):
        with pytest.raises(DataError, match=re.escape(f"text not found: looked for {tmp_path / path}")) as error:
            load_text(path=tmp_path / path)
        assert "dataset=python_docs" in error.value.hint
        (tmp_path / "a.pdf").write_text("")
        with pytest.raises(DataError, match=r"no file in .* ends in \.txt or \.tokens"):
            load_text(path=tmp_path)

    def test_a_line_that_is_not_utf_8_stops_or_is_counted(self, tmp_path, stops_or_skips):
        path = tmp_path / "latin.txt"
        path.write_bytes(b"good line\n" * 50 + b"caf\xe9\n" + b"good line\n" * 50)
        data = stops_or_skips(load_text, "latin.txt line 51: byte 4 is not UTF-8", path=path, sequence_length=8)
        assert data.vocabulary.entries == (UNKNOWN, "good", "line")

    def test_marks_and_line_ends_of_other_systems_do_not_matter(self, tmp_path):
        (tmp_path / "unix.txt").write_bytes(STORY.encode())
        (tmp_path / "other.txt").write_bytes(b"\xef\xbb\xbf" + STORY.replace("\n", "\r\n").encode())
        one, other = (
            load_text(path=tmp_path / f"{name}.txt", tokens="char", sequence_length=8) for name in ("unix", "other")
        )
        assert one.vocabulary == other.vocabulary
        assert torch.equal(one.train.numbers, other.train.numbers)

    def test_a_part_of_empty_files_is_refused_by_its_names(self, tmp_path):
        (tmp_path / "train.txt").write_text(STORY)
        (tmp_path / "more.train.txt").write_text("")
        for name, content in (("a.valid.txt", ""), ("b.valid.txt", " \n\n")):
            (tmp_path / name).write_text(content)
            with pytest.raises(DataError, match=rf"(?m)^text: there is no text in {tmp_path}/{name}$") as error:
                load_text(path=tmp_path / name, tokens="char")
            assert "dataset.path" in error.value.hint
        with pytest.raises(DataError, match=r"(?m)there is no text in .*a\.valid\.txt, nor in 1 more$"):
            load_text(path=tmp_path, sequence_length=8)
        (tmp_path / "b.valid.txt").write_text("one two " * 50)
        assert len(load_text(path=tmp_path, sequence_length=8).val) == 12
