"""Sentence pairs: what stands in a batch, how they are divided, and what becomes of lines that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.text.subwords import END, PAD
from mptrain.workloads.translation.datasets.number_words import draw_numbers, load_number_words, name_of
from mptrain.workloads.translation.datasets.pairs import load_pairs
from mptrain.workloads.translation.pair_dataset import Pair, distinct, hold_out_pairs, tidied
from tests.loops import each

LINES = [f"{name_of(number, 'de')}\t{name_of(number, 'en')}" for number in range(300)]


def written(path, lines=LINES):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def texts(dataset, split):
    batch = split.fetch(range(len(split)), 0, 0)
    sources = map(dataset.source.decode, batch.inputs.tolist())
    return list(zip(sources, map(dataset.target.decode, batch.targets.tolist()), strict=True))


@pytest.fixture(scope="module")
def numbers():
    return load_number_words(samples=400, batch_size=16)


class TestNames:
    @each(
        ("number", "english", "german", "french"),
        [
            (0, "zero", "null", "zéro"),
            (1, "one", "eins", "un"),
            (16, "sixteen", "sechzehn", "seize"),
            (21, "twenty-one", "einundzwanzig", "vingt et un"),
            (71, "seventy-one", "einundsiebzig", "soixante et onze"),
            (80, "eighty", "achtzig", "quatre-vingts"),
            (81, "eighty-one", "einundachtzig", "quatre-vingt-un"),
            (99, "ninety-nine", "neunundneunzig", "quatre-vingt-dix-neuf"),
            (101, "one hundred one", "einhunderteins", "cent un"),
            (200, "two hundred", "zweihundert", "deux cents"),
            (1000, "one thousand", "eintausend", "mille"),
            (80_000, "eighty thousand", "achtzigtausend", "quatre-vingt mille"),
            (201_000, "two hundred one thousand", "zweihunderteintausend", "deux cent un mille"),
        ],
    )
    def test_by_the_grammar(self, number, english, german, french):
        assert [name_of(number, language) for language in ("en", "de", "fr")] == [english, german, french]

    @pytest.mark.parametrize("language", ["en", "de", "fr"])
    def test_no_two_numbers_have_the_same_name(self, language):
        some = [*range(2000), *range(2000, 1_000_000, 997)]
        assert len({name_of(number, language) for number in some}) == len(some)

    def test_numbers_drawn_differ_and_many_are_small(self):
        drawn = draw_numbers(1000)
        assert len(set(drawn)) == 1000
        assert drawn == draw_numbers(1000)
        assert 0.25 < sum(number < 1000 for number in drawn) / 1000 < 0.6
        assert max(drawn) > 500_000

    def test_other_numbers_and_one_language_are_refused(self):
        for number in (-1, 1_000_000):
            with pytest.raises(ValueError, match="is out of range"):
                name_of(number, "en")
        with pytest.raises(ConfigError, match="both de"):
            load_number_words(source="de", target="de")


class TestBatches:
    def test_padding_stands_behind_the_end(self, numbers):
        batch = numbers.train.fetch([0, 5, 9, 40], 0, 0)
        lengths = batch.extras["source_lengths"].tolist()
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        for row, length in zip(batch.inputs.tolist(), lengths, strict=True):
            assert row[length - 1] == END
            assert PAD not in row[:length]
            assert set(row[length:]) <= {PAD}
        assert batch.inputs.shape[1] == max(lengths)
        for row, count in zip(batch.targets.tolist(), batch.counts, strict=True):
            assert row[count - 1] == END
            assert set(row[count:]) <= {PAD}
        assert batch.terms == int((batch.targets != PAD).sum())

    def test_facts_and_card_tell_all_that_is_needed_elsewhere(self, numbers):
        sizes = {f"{side}_vocabulary_size": len(getattr(numbers, side)) for side in ("source", "target")}
        assert numbers.facts().items() >= {**sizes, "shared_vocabulary": False}.items()
        assert len(numbers.card()["labels"]) == sum(sizes.values())
        assert set(numbers.card()["sentencepiece"]) == {"source", "target"}
        assert numbers.describe() == "pairs in vocabularies of 200 and 200 pieces"
        shared = load_number_words(samples=100, shared=True, vocabulary=60)
        assert shared.facts()["shared_vocabulary"] is True
        assert shared.source is shared.target
        assert len(shared.card()["labels"]) == len(shared.source)
        assert set(shared.card()["sentencepiece"]) == {"source"}
        assert shared.describe() == "pairs in a vocabulary of 60 pieces"

    def test_pairs_that_are_too_long_are_left_out_counted_and_told(self):
        whole, short = load_number_words(samples=400), load_number_words(samples=400, max_tokens=7)
        few = load_number_words(samples=400, train_samples=10)
        assert texts(few, few.train) == texts(whole, whole.train)[:10]
        with pytest.raises(ConfigError, match="train_samples=321, but the training split has 320 samples"):
            load_number_words(samples=400, train_samples=321)
        assert max(short.train.sources.lengths.max(), short.train.targets.lengths.max()) <= 7
        assert short.train.skipped == short.train.left_out == len(whole.train) - len(short.train) > 0
        assert short.card()["too_long"]["train"] == short.train.left_out
        left_out = sum(split.left_out for split in (short.train, short.val, short.test))
        assert short.describe().endswith(f", {left_out} too long")
        assert "too long" not in whole.describe()
        with pytest.raises(DataError, match=r"all 320 pairs have more than dataset.max_tokens=1 tokens"):
            load_number_words(samples=400, max_tokens=1)

    def test_vocabularies_are_learned_from_the_training_pairs_alone(self, tmp_path):
        folder = tmp_path / "data"
        written(folder / "train.tsv")
        written(folder / "test.tsv", ["ж\tж"])
        dataset = load_pairs(path=folder, vocabulary=80)
        assert not any("ж" in piece for piece in dataset.card()["labels"])
        assert len(dataset.test) == 1


class TestDivision:
    def test_no_source_is_in_two_parts(self):
        pairs = [Pair(f"s{number}", f"t{number} {other}") for number in range(100) for other in range(1 + number % 3)]
        parts = hold_out_pairs("toys", pairs, {"val": 0.1, "test": 0.2})
        sources = {part: {pair.source for pair in given} for part, given in parts.items()}
        assert {part: len(given) for part, given in sources.items()} == {"train": 70, "val": 10, "test": 20}
        assert len(set.union(*sources.values())) == 100
        assert sorted(pair.target for given in parts.values() for pair in given) == sorted(one.target for one in pairs)
        assert parts == hold_out_pairs("toys", pairs, {"val": 0.1, "test": 0.2})
        assert set(hold_out_pairs("toys", pairs, {"val": 0, "test": 0})) == {"train"}
        assert len(hold_out_pairs("toys", pairs, {"val": 0.001, "test": 0})["val"]) == 1
        assert tidied("  u\u0308ber\u00a0 den\tBerg ") == "über den Berg"
        assert distinct([Pair("a", "b"), Pair("a", "c"), Pair("a", "b")]) == [Pair("a", "b"), Pair("a", "c")]

    @pytest.mark.parametrize(("count", "val", "test"), [(10, 0.5, 0.5), (2, 0.1, 0.1), (1, 0.1, 0)])
    def test_shares_that_leave_nothing_are_refused(self, count, val, test):
        with pytest.raises(ConfigError, match=f"leaves none of {count} source sentences of toys to train on"):
            hold_out_pairs("toys", [Pair(f"s{number}", "t") for number in range(count)], {"val": val, "test": test})


class TestFiles:
    def test_one_file_is_divided_whatever_its_line_ends(self, tmp_path):
        dataset = load_pairs(path=written(tmp_path / "my.tsv"), vocabulary=100)
        assert [len(split) for split in (dataset.train, dataset.val, dataset.test)] == [240, 30, 30]
        whole = {pair for split in (dataset.train, dataset.val, dataset.test) for pair in texts(dataset, split)}
        assert whole == {tuple(line.split("\t")) for line in LINES}
        assert dataset.card()["files"] == {"train": [str(tmp_path / "my.tsv")]}
        content = b"\xef\xbb\xbf" + (tmp_path / "my.tsv").read_bytes().replace(b"\n", b"\r\n")
        (tmp_path / "other.tsv").write_bytes(content)
        other = load_pairs(path=tmp_path / "other.tsv", vocabulary=100)
        assert other.source.model == dataset.source.model
        assert texts(other, other.train) == texts(dataset, dataset.train)

    def test_pairs_that_are_there_several_times_are_taken_once(self, tmp_path):
        once = load_pairs(path=written(tmp_path / "once.tsv"), vocabulary=100)
        again = load_pairs(path=written(tmp_path / "again.tsv", [*LINES, *LINES[:7], LINES[0]]), vocabulary=100)
        assert texts(again, again.train) == texts(once, once.train)
        assert again.describe() == f"{once.describe()}, 8 repeated"
        assert "repeated" not in once.describe()
        assert (once.card()["repeated"], again.card()["repeated"], again.train.skipped) == (0, 8, 0)
        short = load_pairs(path=tmp_path / "again.tsv", vocabulary=100, max_tokens=5)
        assert ", 8 repeated, " in short.describe()
        assert short.describe().endswith(" too long")

    def test_files_that_say_what_they_are_for_are_that(self, tmp_path):
        written(tmp_path / "corpus.train.tsv", LINES[:200])
        written(tmp_path / "corpus.dev.tsv", LINES[200:230])
        written(tmp_path / "corpus.test.tsv", LINES[230:])
        written(tmp_path / "notes.txt", ["no pair"])
        dataset = load_pairs(path=tmp_path, vocabulary=100)
        assert [len(split) for split in (dataset.train, dataset.val, dataset.test)] == [200, 30, 70]
        (tmp_path / "corpus.dev.tsv").unlink()
        assert len(load_pairs(path=tmp_path, vocabulary=100).train) == 180

    def test_columns_choose_the_direction(self, tmp_path):
        path = written(tmp_path / "my.tsv", [f"{number}\t{line}" for number, line in enumerate(LINES)])
        dataset = load_pairs(path=path, columns=(3, 2), vocabulary=100)
        assert texts(dataset, dataset.train)[0] in [tuple(reversed(line.split("\t"))) for line in LINES]
        with pytest.raises(ConfigError, match="2 cannot be both"):
            load_pairs(path=path, columns=(2, 2))

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            (b"no tab", "1 column between tabs, but dataset.columns has 2"),
            (b"a source without a target\t", "column 2 is empty"),
            (b"\ta target without a source", "column 1 is empty"),
            (b"caf\xe9\tcoffee", "byte 4 is not UTF-8"),
            (b'"one house\tand more"\t"ein Haus"', "a tab stands within quotes"),
        ],
    )
    def test_a_line_that_cannot_be_used_stops_or_is_counted(self, tmp_path, stops_or_skips, line, why):
        path = written(tmp_path / "my.tsv")
        path.write_bytes(b"\n\r\n" + line + b"\n" + path.read_bytes())
        dataset = stops_or_skips(load_pairs, f"line 3.*{why}", path=path, vocabulary=100)
        assert len(dataset.train) == 240
        assert dataset.describe().endswith(" pieces, 1 left out")

    @pytest.mark.parametrize("on_error", ["stop", "skip"])
    def test_a_file_without_a_single_tab_is_said_to_be_that(self, tmp_path, on_error):
        path = written(tmp_path / "my.csv", ["", *[line.replace("\t", ";") for line in LINES]])
        with pytest.raises(DataError, match=r"my\.csv: no line has a tab") as caught:
            load_pairs(path=path, vocabulary=100, on_error=on_error)
        assert "on_error" not in caught.value.hint

    def test_what_is_missing_is_said_with_what_would_do(self, tmp_path):
        for path, said in ((tmp_path / "no.tsv", "looked for"), (tmp_path, "no file in"), (Path(), "is empty")):
            with pytest.raises(DataError, match=said):
                load_pairs(path=path)
        written(tmp_path / "test.tsv")
        for other in ("mine.tsv", "corpus.txt"):
            with pytest.raises(DataError, match=r"found .*test\.tsv, but no file to train on"):
                load_pairs(path=tmp_path)
            written(tmp_path / other)  # which is not merged with the test data into training data
        with pytest.raises(DataError) as caught:
            load_pairs(path=tmp_path)
        assert caught.value.hint.startswith(f"rename {tmp_path / 'corpus.txt'} to train.tsv, or set dataset.path")
        (tmp_path / "test.tsv").write_text("\tno source\n" * 3)
        with pytest.raises(DataError, match=r"has no pairs: .*test\.tsv line 1: column 1 is empty"):
            load_pairs(path=tmp_path / "test.tsv", on_error="skip")
        (tmp_path / "test.tsv").write_text("\n\n")
        with pytest.raises(DataError, match="has no pairs"):
            load_pairs(path=tmp_path / "test.tsv")
