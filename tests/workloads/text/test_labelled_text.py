"""Labelled texts: what stands in a batch, how they are divided, and what becomes of lines that cannot be used."""

from __future__ import annotations

import json

import pytest
import torch

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.data_files import checking
from mptrain.workloads.text.datasets.docstrings import PACKAGES, load_docstrings
from mptrain.workloads.text.datasets.labelled_files import load_labelled_text
from mptrain.workloads.text.subwords import PAD
from tests.loops import each

LINES = [
    ("cat" if number % 3 else "dog", f"it says {'meow' if number % 3 else 'woof'} {'again ' * (number % 4)}n{number}")
    for number in range(60)
]


def written(path, lines=LINES):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        text = "\n".join(json.dumps({"text": text, "label": label}) for label, text in lines)
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        text = "\n".join(f"{label}{mark}{text}" for label, text in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def texts(dataset, split):
    batch = split.fetch(range(len(split)), 0, 0)
    rows = [[number - 1 for number in row if number != PAD] for row in batch.inputs.tolist()]
    return [
        (dataset.class_names[label], dataset.encoding.text(row))
        for label, row in zip(batch.targets.tolist(), rows, strict=True)
    ]


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl"])
def test_files_of_each_kind_give_every_part_both_classes(tmp_path, suffix):
    dataset = load_labelled_text(path=written(tmp_path / f"all.{suffix}"), min_count=1)
    splits = (dataset.train, dataset.val, dataset.test)
    assert dataset.class_names == ("cat", "dog")
    assert [len(split) for split in splits] == [48, 6, 6]
    found = [texts(dataset, split) for split in splits]
    assert [{label for label, _ in part} for part in found] == [{"cat", "dog"}] * 3
    assert set(found[0]) <= {(label, " ".join(text.split())) for label, text in LINES}
    largest = max(int(split.fetch([0], 0, 0).inputs.max()) for split in splits)
    assert dataset.facts()["vocabulary_size"] == len(dataset.encoding) + 1 > largest


def test_a_batch_is_padded_at_its_end_and_long_texts_are_cut(tmp_path):
    path = written(tmp_path / "t.tsv", [("a", "one two three four"), ("b", "five"), ("a", "six seven"), ("b", "8 9")])
    whole = {"min_count": 1, "sequence_length": 3, "val_share": 0, "test_share": 0}
    dataset = load_labelled_text(path=path, **whole)
    lengths = dataset.train.texts.lengths.tolist()
    assert sorted(lengths) == [1, 2, 2, 3]
    batch = dataset.train.fetch(range(4), 0, 0)
    assert batch.inputs.shape == (4, 3)
    assert torch.equal(batch.inputs != PAD, torch.arange(3) < torch.tensor(lengths)[:, None])


def test_a_header_names_columns_and_file_names_give_parts(tmp_path):
    rows = [("id", "sentence", "kind"), *((str(number), text, label) for number, (label, text) in enumerate(LINES))]
    (tmp_path / "train.csv").write_text("\n".join(",".join(row) for row in rows))
    written(tmp_path / "test.tsv", LINES[:4])
    dataset = load_labelled_text(path=tmp_path, columns=("kind", "sentence"), name="mine")
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (54, 6, 4)
    assert dataset.card()["class_names"] == ["cat", "dog"]
    assert dataset.card()["files"]["test"] == [str(tmp_path / "test.tsv")]


@each(
    ("name", "content", "reason"),
    [
        ("a.tsv", "cat\tmeow\ndog\n", "line 2: it has no text; a .tsv has tabs between its cells and no quotes around"),
        ("a.tsv", '"cat"\t"meow"\n"dog"\t"woof"\n', "line 1: its label is in quotes; a .tsv has tabs between"),
        ("a.csv", "cat,meow\n,woof\n", "line 2: it has no label"),
        ("a.jsonl", '{"label": "cat", "text": "meow"}\n{"label": 1\n', "line 2: it has no label"),
        ("a.jsonl", '{"label": "cat", "text": "meow"}\n{"label": "dog", "text": null}\n', "line 2: it has no text"),
        ("a.tsv", "cat\tmeow\ncat\tpurr\n", "all texts have the label 'cat'"),
    ],
)
def test_a_line_without_a_label_or_a_text_is_named(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=reason):
        load_labelled_text(path=tmp_path / name)


def test_a_file_of_unusable_lines_alone_says_what_they_have(tmp_path):
    (tmp_path / "a.tsv").write_text('"cat"\t"film\twith a tab"\n' * 9)
    with pytest.raises(DataError, match=r"has no labelled text: .*a\.tsv line 1: its label is in quotes"):
        load_labelled_text(path=tmp_path / "a.tsv", on_error="skip")
    with checking() as seen, pytest.raises(DataError, match="its label is in quotes"):
        load_labelled_text(path=tmp_path / "a.tsv")
    assert len(seen.stopping) == 9


def test_unusable_lines_can_be_skipped_and_are_counted(tmp_path, stops_or_skips):
    path = written(tmp_path / "train.tsv")
    path.write_bytes(path.read_bytes() + b"cat\tm\xffow\ndog\n")
    written(tmp_path / "test.tsv", [*LINES[:3], ("cow", "moo")])
    dataset = stops_or_skips(load_labelled_text, "not UTF-8|it has no text", 2, path=tmp_path)
    assert (dataset.test.skipped, len(dataset.test)) == (1, 3)


def test_shares_of_everything_and_too_many_samples_are_refused(tmp_path):
    path = written(tmp_path / "t.tsv")
    with pytest.raises(ConfigError, match="leaves none of 60 texts of labelled_text to train on"):
        load_labelled_text(path=path, val_share=0.5, test_share=0.5)
    with pytest.raises(ConfigError, match=r"dataset.train_samples=100, but the training split has 48"):
        load_labelled_text(path=path, train_samples=100)


def test_docstrings_are_eight_classes_in_every_part():
    dataset = load_docstrings()
    assert dataset.class_names == PACKAGES
    assert len(dataset.train) > 1500
    for split in (dataset.train, dataset.val, dataset.test):
        assert split.targets.unique().tolist() == list(range(8))
