"""CIFAR through torchvision: its arrays become splits, and its failures become one kind of error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision import datasets

from mptrain.system.errors import DataError
from mptrain.workloads.images.datasets.cifar import load_cifar10, load_cifar100


class Published:
    """What torchvision's classes offer once they have read their files."""

    classes = [f"thing {number}" for number in range(10)]

    def __init__(self, root, train, download):
        count = 60 if train else 20
        self.data = np.arange(count * 32 * 32 * 3, dtype=np.int64).astype(np.uint8).reshape(count, 32, 32, 3)
        self.targets = [number % 10 for number in range(count)]


def test_arrays_become_channel_first_splits(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "CIFAR10", Published)
    data = load_cifar10(root=tmp_path, val_samples=10, augment=False)
    assert [len(part) for part in (data.train, data.val, data.test)] == [50, 10, 20]
    assert (data.name, data.describe(), len(data.class_names)) == ("cifar10", "3x32x32", 10)
    expected = torch.from_numpy(Published(None, False, False).data[7]).permute(2, 0, 1)
    assert torch.equal(data.test.fetch([7], 0, 0).inputs[0], expected)
    batch = data.prepare(data.train.fetch([0], 0, 0), torch.device("cpu"), torch.contiguous_format)
    value = data.train.images[0, 2, 5, 6].item() / 255
    assert batch.inputs[0, 2, 5, 6].item() == pytest.approx((value - 0.4465) / 0.2616, abs=1e-5)


@pytest.mark.parametrize("load", [load_cifar10, load_cifar100])
def test_missing_and_damaged_files_are_told_with_a_way_out(tmp_path, load):
    with pytest.raises(DataError, match=str(tmp_path)) as caught:
        load(root=tmp_path, download=False)
    assert "dataset.download=true" in caught.value.hint
    for folder in ("cifar-10-batches-py", "cifar-100-python"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not found or corrupted") as caught:
        load(root=tmp_path, download=False)
    assert "dataset=digits needs no download" in caught.value.hint


def test_no_network(monkeypatch, tmp_path):
    def refuse(*arguments, **keywords):
        raise OSError("Temporary failure in name resolution")

    monkeypatch.setattr(datasets.utils.urllib.request, "urlopen", refuse)
    with pytest.raises(DataError, match="name resolution") as caught:
        load_cifar10(root=tmp_path)
    assert "dataset=digits needs no download" in caught.value.hint
