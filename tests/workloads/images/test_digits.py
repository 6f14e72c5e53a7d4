"""The default data: its splits, its mapping to bytes, its constants, and what a damaged file gets."""

from __future__ import annotations

import gzip
import subprocess
import sys

import pytest
import torch

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.images.datasets import digits as module
from mptrain.workloads.images.datasets.digits import load_digits


def rows(split):
    return {split.images[index].numpy().tobytes() for index in range(len(split))}


def test_splits_have_stated_sizes_and_are_disjoint():
    data = load_digits()
    assert [len(part) for part in (data.train, data.val, data.test)] == [1200, 200, 397]
    assert data.class_names == tuple("0123456789")
    # No two of the images are equal, so sets of images compare splits.
    parts = [rows(part) for part in (data.train, data.val, data.test)]
    assert len(parts[0] | parts[1] | parts[2]) == 1797
    for part in (data.train, data.val, data.test):
        shares = torch.bincount(part.targets) / len(part)
        assert (shares - 0.1).abs().max() < 0.01


def test_the_test_split_does_not_depend_on_any_choice():
    first, other = load_digits(), load_digits(val_samples=0, train_samples=100, image_size=16, channels=3, augment=True)
    assert torch.equal(first.test.images, other.test.images)
    assert (other.val, len(other.train)) == (None, 100)
    assert (first.describe(), first.augment) == ("1x8x8", False)
    batch = other.prepare(other.train.fetch([0, 1], 0, 0), torch.device("cpu"), torch.channels_last)
    assert (other.describe(), tuple(batch.inputs.shape)) == ("3x16x16", (2, 3, 16, 16))


def test_the_first_image_is_the_zero_of_the_file():
    images, labels = module.read_digits(module.digits_path())
    assert (tuple(images.shape), images.dtype, labels.dtype) == ((1797, 1, 8, 8), torch.uint8, torch.int64)
    grey = [0, 0, 5, 13, 9, 1, 0, 0]
    assert images[0, 0, 0].tolist() == [round(value * 255 / 16) for value in grey]
    assert labels[:10].tolist() == list(range(10))
    assert images.max() == 255


def test_stated_mean_and_std_are_those_of_the_training_images():
    pixels = load_digits().train.images.double() / 255
    assert pytest.approx(pixels.mean().item(), abs=5e-5) == module.MEAN
    assert pytest.approx(pixels.std().item(), abs=5e-5) == module.STD


@pytest.mark.long
def test_reading_imports_neither_scikit_learn_nor_torchvision():
    script = (
        "import sys; from mptrain.workloads.images.datasets.digits import load_digits; load_digits();"
        "print([name for name in ('sklearn', 'torchvision', 'scipy', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b"1,2,3\n"),
        gzip.compress(b"x," * 64 + b"0\n"),
        gzip.compress(b"#" + b"0," * 64 + b"0\n" + b"0," * 64 + b"0\n"),
        gzip.compress(b"1" * 9)[:-9],
    ],
    ids=["empty", "not gzip", "too few columns", "not a number", "commented out", "cut short"],
)
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"digits.csv.gz is damaged"):
        module.read_digits(path)


def test_what_is_not_there_is_refused_with_a_hint(monkeypatch):
    with pytest.raises(ConfigError, match=r"dataset.train_samples=1201, but the training split has 1200"):
        load_digits(train_samples=1201)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        load_digits()
    assert caught.value.hint == "pip install scikit-learn"
