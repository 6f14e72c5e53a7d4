"""Labelled texts: what stands in a batch, how they are divided, and what becomes of lines that cannot be used."""

from __future__ import annotations

import json

import pytest
import torch
from loops import each

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.text.datasets.docstrings import PACKAGES, load_docstrings
from mptrain.workloads.text.datasets.labelled_files import load_labelled_text
from mptrain.workloads.text.subwords import PAD

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
        (dataset.class_names[label], dataset.vocabulary.text(row))
        for label, row in zip(batch.targets.tolist(), rows, strict=True)
    ]


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl"])
def test_files_of_each_kind_give_the_same_texts_with_the_classes_in_every_part(tmp_path, suffix):
    dataset = load_labelled_text(path=written(tmp_path / f"all.{suffix}"), min_count=1)
    assert dataset.class_names == ("cat", "dog")
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (48, 6, 6)
    found = [texts(dataset, split) for split in (dataset.train, dataset.val, dataset.test)]
    assert {len({label for label, _ in part}) for part in found} == {2}
    everything = {text for _, text in LINES}
    assert {text for part in found for _, text in part} | {"<unk>"} >= {text.strip() for text in everything} - {
        text for part in found[1:] for _, text in part
    } - {text for text in everything if text.split()[-1] not in dataset.vocabulary.entries}
    assert (
        dataset.facts()["vocabulary_size"]
        == len(dataset.vocabulary) + 1
        > max(int(split.fetch([0], 0, 0).inputs.max()) for split in (dataset.train, dataset.val, dataset.test))
    )


def test_a_batch_is_padded_at_its_end_and_long_texts_are_cut(tmp_path):
    lines = [("a", "one two three four"), ("b", "five"), ("a", "six seven"), ("b", "eight nine")]
    dataset = load_labelled_text(
        path=written(tmp_path / "t.tsv", lines), min_count=1, sequence_length=3, val_share=0, test_share=0
    )
    lengths = dataset.train.texts.lengths.tolist()
    assert sorted(lengths) == [1, 2, 2, 3]
    batch = dataset.train.fetch(range(4), 0, 0)
    assert batch.inputs.shape == (4, 3)
    assert (batch.inputs == PAD).sum(1).tolist() == [3 - length for length in lengths]
    assert torch.equal(batch.inputs != PAD, torch.arange(3) < torch.tensor(lengths)[:, None])


def test_a_header_names_the_columns_and_names_of_files_give_the_parts(tmp_path):
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
        ("a.tsv", "cat\tmeow\ndog\n", "line 2: it has no text"),
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


def test_unusable_lines_can_be_skipped_and_are_counted(tmp_path):
    path = written(tmp_path / "train.tsv")
    path.write_bytes(path.read_bytes() + b"cat\tm\xffow\ndog\n")
    written(tmp_path / "test.tsv", [*LINES[:3], ("cow", "moo")])
    with pytest.raises(DataError, match=r"not UTF-8|it has no text"):
        load_labelled_text(path=tmp_path)
    dataset = load_labelled_text(path=tmp_path, on_error="skip")
    assert (dataset.train.skipped, dataset.test.skipped, len(dataset.test)) == (2, 1, 3)


def test_shares_that_leave_nothing_and_too_many_samples_are_refused(tmp_path):
    path = written(tmp_path / "t.tsv")
    with pytest.raises(ConfigError, match="leave none to train on"):
        load_labelled_text(path=path, val_share=0.5, test_share=0.5)
    with pytest.raises(ConfigError, match=r"dataset.train_samples=100, but the training split has 48"):
        load_labelled_text(path=path, train_samples=100)


def test_docstrings_of_the_standard_library_are_eight_classes_in_every_part():
    dataset = load_docstrings()
    assert dataset.class_names == PACKAGES
    assert len(dataset.train) > 1500
    for split in (dataset.train, dataset.val, dataset.test):
        assert split.targets.unique().tolist() == list(range(8))
    train, test = ({text for _, text in texts(dataset, split)} for split in (dataset.train, dataset.test))
    assert len(train & test) < 10  # those that differ in rare words only
