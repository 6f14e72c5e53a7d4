"""Fashion-MNIST: found in three places, plain or gzipped; damage and absence are told apart."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from mptrain.system.errors import DataError
from mptrain.workloads.images.datasets import fashion
from mptrain.workloads.images.datasets.fashion import load_fashion_mnist, read_idx


def idx(values):
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + values.numpy().tobytes()


def write_set(folder, zipped, train=40, test=10, label=None):
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        images = (torch.arange(count * 4, dtype=torch.int64) % 251).to(torch.uint8).view(count, 2, 2)
        labels = (torch.arange(count) % 10).to(torch.uint8)
        if label is not None and part == "train":
            labels[3] = label
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{part}-{kind}-ubyte"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(values)))
            else:
                path.write_bytes(idx(values))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["FashionMNIST/raw", "."])
def test_files_are_read_where_torchvision_or_debian_leave_them(tmp_path, zipped, place):
    write_set(tmp_path / "root" / place, zipped) if place != "." else write_set(tmp_path / "root", zipped)
    data = load_fashion_mnist(root=tmp_path / "root", download=False, val_samples=10)
    assert [len(part) for part in (data.train, data.val, data.test)] == [30, 10, 10]
    facts = data.facts()
    assert len(facts.pop("class_names")) == 10
    assert facts == {
        "image_size": 2, "in_channels": 1, "input_shape": (1, 2, 2), "num_classes": 10, "num_outputs": 10,
    }  # fmt: skip
    assert data.test.images[1].flatten().tolist() == [4, 5, 6, 7]
    assert data.test.targets.tolist() == list(range(10))


def test_missing_files_are_told_with_ways_out(tmp_path, monkeypatch):
    def refuse(root, download):
        raise OSError("Name or service not known")

    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "debian")
    with pytest.raises(DataError, match=str(tmp_path / "FashionMNIST" / "raw")) as caught:
        load_fashion_mnist(root=tmp_path, download=False)
    words = ("dataset.download=true", "dataset.root=", "dataset-fashion-mnist", "dataset=digits needs no download")
    assert all(word in caught.value.hint for word in words)
    monkeypatch.setattr("torchvision.datasets.FashionMNIST", refuse)
    with pytest.raises(DataError, match="Name or service not known"):
        load_fashion_mnist(root=tmp_path)
    write_set(tmp_path / "debian", zipped=True)
    assert len(load_fashion_mnist(root=tmp_path / "none", val_samples=10).train) == 30


def test_a_label_outside_the_classes_is_named_by_its_place(tmp_path, stops_or_skips):
    write_set(tmp_path / "bad", zipped=False, label=10)
    said = "fashion_mnist train sample 3: label 10 is outside the classes 0 to 9"
    assert len(stops_or_skips(load_fashion_mnist, said, root=tmp_path / "bad", val_samples=10).train) == 29


def damaged():
    whole = idx(torch.arange(12, dtype=torch.uint8).view(3, 2, 2))
    yield "cut.gz", gzip.compress(whole)[:-6], "cannot be read"
    yield "cut", whole[:-1], "has 11 values, but its header says 12"
    yield "header", whole[:9], "truncated within its header"
    yield "empty", b"", "not an IDX file"
    yield "floats", b"\0\0\x0d\x01" + whole, "not an IDX file of unsigned bytes"


@pytest.mark.parametrize(("name", "content", "says"), list(damaged()), ids=[case[0] for case in damaged()])
def test_damaged_idx_files_are_named(tmp_path, name, content, says):
    path = Path(tmp_path / name)
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
