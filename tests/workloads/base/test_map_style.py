"""Map-style datasets of torch are taken as they are, and what cannot be taken is said in one sentence."""

from __future__ import annotations

import json
import random
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from mptrain.cli.main import main
from mptrain.system.errors import DataError
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.map_style import MapDataset, torch_parts
from tests import small_runs

OWN = """
import random
import types
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split


class Squares(Dataset):
    def __init__(self, count=120, moving=True, double=False):
        chance = torch.Generator().manual_seed(0)
        self.images = torch.rand(count, 3, 8, 8, generator=chance) * (torch.arange(count) % 3 + 1).view(-1, 1, 1, 1)
        self.moving, self.double = moving, double

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.moving:
            image = image + 0.1 * (torch.rand(()) + random.random() + np.random.rand())
        return image.double() if self.double else image, index % 3


def parts(double: bool = False):
    return {"train": Subset(Squares(double=double), range(80)), "val": Subset(Squares(moving=False, double=double), range(80, 120))}


class Holder:
    def __init__(self, workers: int = 0):
        self.train, self.val, self.test = random_split(Squares(), [80, 20, 20], torch.Generator().manual_seed(1))


def tensors():
    whole = Squares()
    return (whole.images[:80], torch.arange(80) % 3), TensorDataset(whole.images[80:], torch.arange(80, 120) % 3)


def endless():
    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.zeros(3), 1
    return {"train": Endless()}


def alone():
    return Squares()
"""
WORDS = (
    "model=mlp",
    "model.hidden=[16]",
    "precision=fp32",
    "device=cpu",
    "threads=1",
    "train.batch_size=16",
    "train.epochs=3",
    "extensions.allow=[own_squares.*]",
)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_squares.py").write_text(OWN)
    (tmp_path / "my/dataset").mkdir(parents=True)
    for name in ("parts", "Holder", "tensors", "endless", "alone"):
        more = {"parts": "double: false\n", "Holder": "workers: 0\n"}.get(name, "")
        (tmp_path / f"my/dataset/{name}.yaml").write_text(f"_target_: own_squares.{name}\n{more}")
    sys.modules.pop("own_squares", None)
    yield tmp_path
    sys.modules.pop("own_squares", None)


def train(target, *words):
    return main(["--config-dir", "my", *WORDS, f"dataset={target}", *words])


@pytest.mark.parametrize(
    "words", [("parts",), ("parts", "dataset.double=true"), ("Holder", "dataset.workers=2"), ("tensors",)], ids=" ".join
)
def test_they_train_and_evaluate_with_facts_of_the_samples(own, words, capsys):
    assert train(*words, "run.name=run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"3x8x8 float{64 if 'dataset.double=true' in words else 32}, 3 classes" in said
    card = json.loads((own / "outputs/run/data.json").read_text())
    assert (card["num_classes"], card["in_channels"], card["image_size"], card["labels"]) == (3, 3, 8, ["0", "1", "2"])
    if words == ("tensors",):
        assert main(["eval", "outputs/run", "extensions.allow=[own_squares.*]"]) == 0
        assert "split=val samples=" in capsys.readouterr().out


def test_random_transforms_follow_seed_epoch_and_index(own):
    import own_squares

    data = MapDataset("squares", torch_parts(own_squares.parts()), 2)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    whole = data.train.fetch(list(range(6)), 1, 5).inputs
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[::2]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(torch.cat([data.train.fetch([index], 1, 5).inputs for index in range(6)]), whole)
    assert not torch.equal(data.train.fetch(list(range(6)), 2, 5).inputs, whole)
    loader = Loader(data.train, 32, 5, shuffle=False, workers=2)
    assert torch.equal(next(iter(loader.batches(1))).inputs[:6], whole)
    loader.close()


@pytest.mark.long
def test_a_resumed_run_has_the_same_samples(own, monkeypatch):
    monkeypatch.setattr(small_runs, "compose", partial(small_runs.compose, config_dirs=[own / "my"]))
    whole, resumed = small_runs.whole_and_resumed(own, *WORDS, "dataset=parts", after=7)
    losses = [[step["loss"] for step in small_runs.steps_of(loop)] for loop in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 15


def test_what_cannot_be_taken_is_named(own, capsys):
    assert train("endless") == 6
    assert "train is an Endless: " in capsys.readouterr().err
    assert train("alone", "train.max_steps=2") == 0
    assert "there is no validation data" in capsys.readouterr().err


class Pairs(Dataset):
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


ONE = torch.zeros(3, 4, 4)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ((), "train has no samples"),
        (({"image": ONE},), "train sample 0 is a dict"),
        (((ONE, 1, 2),), "train sample 0 is a tuple"),
        (((object(), 1),), "train samples make no batch: default_collate: batch must contain tensors"),
        (((ONE.byte(), 1),), "the inputs of train are uint8"),
        (((ONE > 0, 1),), "the inputs of train are bool"),
        ((({"x": ONE}, 1),), "train samples are pairs of a dict and an int"),
    ],
)
def test_samples_that_are_no_pairs_of_tensors_are_named(samples, why):
    with pytest.raises(DataError) as caught:
        MapDataset("own", torch_parts({"train": Pairs(*samples)}), 0)
    assert str(caught.value).startswith(why)
    assert caught.value.hint


def test_a_sample_unreadable_or_of_another_shape_is_named():
    class Broken(Pairs):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError("gone")
            return super().__getitem__(index)

    with pytest.raises(DataError, match="train sample 2 cannot be read: KeyError: 'gone'"):
        MapDataset("own", torch_parts(Broken(*[(ONE, 0.5)] * 3)), 0).train.fetch([1, 2], 0, 0)
    odd = MapDataset("own", torch_parts(Pairs((ONE, 0), (ONE[:, :3], 1))), 0)
    with pytest.raises(DataError, match="train samples make no batch: stack expects each tensor to be equal size"):
        odd.train.fetch([0, 1], 0, 0)


def test_classes_come_from_names_targets_or_the_samples():
    names = Pairs((ONE, 0), (ONE, 1))
    names.classes = ["cat", "dog", "eel"]
    data = MapDataset("own", torch_parts((Subset(names, [1]), names)), 0)
    assert (data.facts()["class_names"], data.card()["labels"]) == (("cat", "dog", "eel"), ["cat", "dog", "eel"])
    assert data.train.survey().labels.tolist() == [1]
    shifted = Pairs((ONE, 4), (ONE, 7))
    shifted.targets = [0, 1]  # before a target_transform
    assert MapDataset("own", torch_parts(shifted), 0).facts()["num_classes"] == 8
    numbers = MapDataset("own", torch_parts((torch.zeros(6, 5), torch.zeros(6, 1))), 0)
    assert (numbers.facts(), numbers.describe(), numbers.train.in_memory) == ({}, "5 float32", True)
    assert "shows no classes" in numbers.lacks["num_classes"].what
    tokens = MapDataset("own", torch_parts(TensorDataset(torch.ones(4, 7, dtype=torch.int64), torch.arange(4))), 0)
    batch = tokens.prepare(tokens.train.fetch([2, 3], 0, 0), torch.device("cpu"), torch.contiguous_format)
    assert (batch.inputs.dtype, batch.targets.tolist()) == (torch.int64, [2, 3])


class Halved(TensorDataset):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image / 2, target % 2


class HalvedSubset(Subset):
    def __getitem__(self, index):
        image, target = self.dataset[self.indices[index]]
        return image / 2, target % 2

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Renamed(TensorDataset):
    """A subclass of torch's that leaves its samples as they are."""


def test_what_a_subclass_of_torchs_datasets_makes_of_samples_is_kept():
    images, targets = torch.rand(9, 3, 4, 4), torch.arange(9)
    plain = TensorDataset(images, targets)
    rows = [8, 2, 5, 3, 0, 1]
    for samples in (
        Subset(Halved(images, targets), rows),
        HalvedSubset(plain, rows),
        HalvedSubset(Subset(plain, [0, *rows]), range(1, 7)),
        Subset(HalvedSubset(plain, [1, *rows]), range(1, 7)),
    ):
        data = MapDataset("own", torch_parts(samples), 0)
        batch = data.train.fetch([0, 3, 5], 0, 0)
        assert torch.equal(batch.inputs, images[[8, 3, 1]] / 2)
        assert batch.targets.tolist() == [0, 1, 1]
        assert (data.facts()["num_classes"], data.train.in_memory, data.train.digests()) == (2, False, [])
        assert data.train.survey().labels.tolist() == [0, 0, 1, 1, 0, 1]
    data = MapDataset("own", torch_parts(Subset(Renamed(images, targets), rows)), 0)
    assert torch.equal(data.train.fetch([0, 3], 0, 0).inputs, images[[8, 3]])
    assert (data.facts()["num_classes"], data.train.in_memory, len(data.train.digests())) == (9, True, 6)


class Brighter(Subset):
    def __getitem__(self, index):
        return self.dataset[self.indices[index]][0] + 1, self.dataset[self.indices[index]][1]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Twice(Brighter):
    def __len__(self):
        return 2 * len(self.indices)

    def __getitem__(self, index):
        return super().__getitem__(index % len(self.indices))


def test_classes_behind_a_subset_with_samples_of_its_own_count_if_they_are_theirs():
    named = Pairs(*[(ONE, number % 4) for number in range(12)])
    named.classes, named.targets = ["ant", "bee", "cat", "dog"], [number % 4 for number in range(12)]
    for part in (Brighter(named, [5, 2, 3]), Subset(Brighter(named, range(12)), [5, 2, 3])):
        data = MapDataset("own", torch_parts(part), 0)
        assert (data.class_names, data.train.survey().labels.tolist()) == (("ant", "bee", "cat", "dog"), [1, 2, 3])
        assert data.train.first.inputs.min() == 1
    other = MapDataset("own", torch_parts(HalvedSubset(named, range(12))), 0)  # not the classes with those names
    assert (other.class_names, other.train.survey().labels.tolist()) == (("0", "1"), [0, 1] * 6)
    assert MapDataset("own", torch_parts(Twice(named, [5, 2])), 0).train.survey().labels.tolist() == [1, 2, 1, 2]
    named.targets = ["ant", "bee"] * 6  # no numbers
    assert MapDataset("own", torch_parts(named), 0).train.survey().labels.tolist() == [0, 1, 2, 3] * 3


def test_targets_of_a_dataset_count_only_if_its_samples_have_them():
    parity = Pairs(*[(ONE, number % 2) for number in range(10)])
    parity.targets = list(range(10))  # the first sample of both has class 0
    data = MapDataset("own", torch_parts(parity), 0)
    assert (data.facts()["num_classes"], data.train.survey().labels.tolist()) == (2, [0, 1] * 5)


class Moving(Pairs):
    """Samples with a generator of their own, which no seed repeats."""

    def __init__(self, *samples, which):
        super().__init__(*samples)
        self.generator, self.which = np.random.default_rng(0), which

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return (image + self.generator.random() if index == self.which else image), target


def test_samples_that_no_seed_repeats_are_warned_of():
    for which, said in ((0, True), (2, True), (None, False)):
        moving = Moving(*[(ONE, 0)] * 3, which=which)
        data = MapDataset("own", torch_parts((Pairs((ONE, 0)), moving)), 0)
        assert [one[:37] for one in data.warnings] == ["a sample of val that is read twice is"] * said
    nothing = Pairs((ONE / 0, 0), (ONE.bfloat16() / 0, 1))  # NaN equals NaN here
    assert not MapDataset("own", torch_parts((nothing, nothing)), 0).warnings


@pytest.mark.parametrize("wrong", [(ONE, torch.zeros(2)), (torch.zeros(3), torch.zeros(())), (torch.zeros(()),) * 2])
def test_a_pair_of_tensors_of_different_lengths_is_named(wrong):
    with pytest.raises(DataError, match=r"^val is a pair of tensors \["):
        torch_parts({"train": (ONE, torch.zeros(3)), "val": wrong})


def test_tensors_of_any_kind_train_without_a_graph_to_them():
    images = torch.rand(6, 3, 4, 4)
    for inputs in (images.clone().requires_grad_(), images.bfloat16(), images.double().requires_grad_()):
        for part in ((inputs, torch.arange(6)), Pairs(*[(one, number) for number, one in enumerate(inputs)])):
            data = MapDataset("own", torch_parts(part), 0)
            batch = data.train.fetch([3, 1], 0, 0)
            assert not batch.inputs.requires_grad
            assert torch.equal(batch.inputs, inputs[[3, 1]].detach())
            assert len(data.train.digests()) == 6 * data.train.in_memory


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["dog", "cat"], "val has 'dog' as class 0, and train has 'cat'"),
        (["cat", "dog", "eel"], "val has the class 'eel', and train has 2 others"),
        (["cat"], None),
        (("cat", "dog"), None),
        (3, None),
        (None, None),
    ],
)
def test_parts_with_other_classes_are_refused_by_name(classes, said):
    train, val = Pairs((ONE, 0), (ONE, 1)), Pairs((ONE, 0))
    train.classes, val.classes = ["cat", "dog"], classes
    if said is None:
        assert MapDataset("own", torch_parts((train, val)), 0).class_names == ("cat", "dog")
    else:
        with pytest.raises(DataError, match=said):
            MapDataset("own", torch_parts((train, val)), 0)


def test_no_part_is_left_out_without_a_word():
    part = Pairs((ONE, 0))
    with pytest.raises(DataError, match="data has 4 parts"):
        torch_parts((part,) * 4)
    with pytest.raises(DataError, match="two parts of one kind: train, val, validation"):
        torch_parts({"train": part, "val": part, "validation": part})


def test_what_is_no_dataset_is_left_to_the_other_protocol():
    class Own:
        train = 3

    assert torch_parts(Own()) == torch_parts({}) == torch_parts(5) == {}
    for part in (DataLoader(TensorDataset(ONE)), ChainDataset([])):
        with pytest.raises(DataError, match=r"^train is a .*Data.*: a run makes its own batches"):
            torch_parts((part, None))
    assert list(torch_parts(random_split(Pairs((ONE, 1), (ONE, 2)), [1, 1]))) == ["train", "val"]
