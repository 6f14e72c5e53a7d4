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
from mptrain.config.targets import facts_in
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


def arrays():
    whole = Squares(moving=False).images.numpy()
    return {"train": (whole[:80], whole.mean((2, 3))[:80]), "val": (whole[80:], whole.mean((2, 3))[80:].tolist())}


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
    for name in ("parts", "Holder", "tensors", "arrays", "endless", "alone"):
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


def test_arrays_of_a_function_are_trained_on_evaluated_and_their_task_is_named(own, capsys):
    assert train("arrays") == 2
    assert "for these targets: task=regression" in " ".join(capsys.readouterr().err.split())
    assert train("arrays", "task=regression", "run.name=run") == 0
    assert "3x8x8 float32, 3 outputs" in " ".join(capsys.readouterr().out.split())
    assert main(["eval", "outputs/run", "extensions.allow=[own_squares.*]"]) == 0
    assert "rmse_95=" in capsys.readouterr().out


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
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no validation data: give train, val and test" in said


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
    shapeless = MapDataset("own", torch_parts((torch.zeros(6, 5), torch.zeros(6, 1, 1))), 0)
    assert (shapeless.facts(), shapeless.describe()) == ({"input_shape": (5,)}, "5 float32")
    assert shapeless.train.in_memory
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
    for part, hint in ((DataLoader(TensorDataset(ONE)), "data=loader.dataset"), (ChainDataset([]), "a map-style")):
        with pytest.raises(DataError, match=r"^train is a .*Data.*: a run makes its own batches") as caught:
            torch_parts((part, None))
        assert hint in caught.value.hint
    assert list(torch_parts(random_split(Pairs((ONE, 1), (ONE, 2)), [1, 1]))) == ["train", "val"]


def facts_of(data):
    return MapDataset("own", torch_parts(data), 0).facts()


ROWS = np.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize("order", [">f8", "<f4", "f2"])
@pytest.mark.parametrize("change", [np.asfortranarray, lambda array: array[::-1], np.array])
def test_arrays_of_any_layout_are_taken_without_a_copy_where_possible(order, change, recwarn):
    array = change(ROWS.astype(order))
    array.flags.writeable = False
    data = MapDataset("own", torch_parts((array, [0, 1, 2] * 2)), 0)
    assert data.train.in_memory
    batch = data.prepare(data.train.fetch([5, 1], 0, 0), torch.device("cpu"), torch.channels_last)
    assert torch.equal(batch.inputs, torch.tensor(array[[5, 1]].astype("f4")))
    assert (batch.inputs.dtype, batch.targets.tolist()) == (torch.float32, [2, 1])
    if order == "<f4" and change is np.array:
        assert data.train.inner.tensors[0].data_ptr() == array.ctypes.data
    assert not recwarn


@pytest.mark.parametrize("kind", ["u2", "u4", "u8", "i1", "i4", "i8", "?"])
def test_integers_of_any_width_are_classes(kind):
    data = MapDataset("own", torch_parts((ROWS, np.array([0, 1] * 3, kind))), 0)
    assert (data.facts()["num_classes"], data.facts()["num_outputs"], data.describe()) == (2, 2, "2 float64, 2 classes")


def test_pairs_of_arrays_are_parts_and_two_arrays_of_one_length_are_one():
    pair = (ROWS, torch.arange(6))
    for data, names in (
        (pair, ["train"]),
        ([ROWS, ROWS[:, 0]], ["train"]),
        ((pair, list(pair)), ["train", "val"]),
        ({"train": pair, "valid": TensorDataset(torch.ones(3, 2), torch.ones(3).long())}, ["train", "val"]),
        ((pair, None, pair), ["train", "test"]),
    ):
        assert list(torch_parts(data)) == names
    for data, said in (
        ((ROWS, ROWS[:4]), r"train is a pair of tensors \[6, 2\] and \[4, 2\]"),
        ((pair, ROWS), "val is a ndarray alone"),
        ({"train": torch.ones(3)}, "train is a Tensor alone"),
        ((ROWS, ["cat"] * 6), "the targets of train are <U3, not numbers"),
        ((ROWS.astype(object), [1] * 6), "the inputs of train are object, not numbers"),
        ((ROWS, [[1], [2, 3]]), "the targets of train make no array"),
        ((ROWS * 1j, [1] * 6), "the inputs of train are complex128, not numbers"),
    ):
        with pytest.raises(DataError, match=said):
            torch_parts(data)
    with pytest.raises(DataError, match="the inputs of train are uint8, and a network computes with floats"):
        facts_of((ROWS.astype(np.uint8), [1] * 6))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_numbers_in_memory_that_are_not_finite_are_counted_and_placed(value):
    odd = ROWS.copy()
    odd[3, 1] = odd[5, 0] = value
    for data, what in (((odd, ROWS), "inputs"), ((ROWS, odd), "targets"), ((ROWS, odd[:, 1:]), "targets")):
        count = 2 - (data[1].shape[1] == 1)
        said = f"the {what} of train have NaN or inf in {count} of 6 samples, first in sample 3"
        with pytest.raises(DataError, match=said):
            facts_of(data)
    whole = TensorDataset(torch.tensor(odd), torch.arange(6) % 2)
    assert facts_of(Subset(whole, [0, 1]))["num_classes"] == 2  # the others are not trained on
    with pytest.raises(DataError, match="in 1 of 2 samples, first in sample 1"):
        facts_of(Subset(whole, [0, 5]))


def test_floats_are_outputs_with_their_mean_and_deviation_over_the_training_targets():
    targets = np.stack([ROWS[:, 0] * 1e5 + 7, ROWS[:, 0] % 4], 1)
    facts = facts_of(((ROWS, targets), (ROWS, -targets)))
    assert facts["num_outputs"] == 2
    assert facts["output_names"] == ("0", "1")
    assert facts["target_mean"] == pytest.approx(targets.mean(0).tolist(), rel=1e-12)
    assert facts["target_std"] == pytest.approx(targets.std(0).tolist(), rel=1e-12)
    assert facts.keys() == {"input_shape", "num_outputs", "output_names", "target_mean", "target_std"}
    alone = facts_of((torch.ones(6, 3, 4, 4), targets[:, 0].tolist()))
    assert alone == {
        **{name: facts[name][:1] for name in ("output_names", "target_mean", "target_std")},
        "num_outputs": 1,
        "input_shape": (3, 4, 4),
        "in_channels": 3,
        "image_size": 4,
    }


@pytest.mark.parametrize("kind", [bool, int, np.float32])
def test_targets_of_zeros_and_ones_are_labels_if_those_of_all_parts_are(kind):
    labels = np.array([[0, 1, 1], [0, 0, 1], [0, 1, 1]], kind)
    data = MapDataset("own", torch_parts(((ROWS[:3], labels), (ROWS[:3], labels))), 0)
    assert data.facts()["label_counts"] == (0, 2, 3)
    assert ("target_mean" in data.facts()) == (kind is np.float32)
    assert data.describe() == "2 float64, 3 labels"
    assert data.warnings == ("in float32 the training targets of output 0, 2 are constant",)
    assert "label_counts" not in facts_of(((ROWS[:3], labels), (ROWS[:3], labels * 2.0)))
    assert "num_outputs" not in facts_of(((ROWS[:3], labels.astype(int)), (ROWS[:3], labels * 2)))


def test_constant_and_coarse_targets_are_warned_of():
    targets = np.stack([np.full(6, 0.1), ROWS[:, 0], 1e9 + 100 * ROWS[:, 0]], 1)
    data = MapDataset("own", torch_parts(((ROWS, targets), (ROWS, targets))), 0)
    assert data.facts()["target_std"][0] == 1.0
    assert data.warnings == (
        "in float32 the training targets of output 0 are constant",
        "in float32 the training targets of output 2 are too coarse: subtract their mean",
    )


class Read(Pairs):
    """Samples that are made when they are read; the number of reads of each is counted."""

    def __init__(self, count, target, **more):
        self.count, self.target, self.reads = count, target, 0
        vars(self).update(more)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads += 1
        return torch.zeros(2), self.target(index)


def test_targets_that_are_not_in_memory_are_read_up_to_a_number_of_them(monkeypatch):
    monkeypatch.setattr("mptrain.workloads.base.map_style.READ_ALL", 50)
    few, many = (MapDataset("own", {"train": Read(count, lambda at: at / 7)}, 0) for count in (50, 200))
    assert few.facts()["target_mean"] == pytest.approx((24.5 / 7,), rel=1e-6)
    assert len(few.warnings) == 1  # there is no validation data
    assert many.facts()["target_mean"] == pytest.approx((98 / 7,), rel=1e-6)  # of 0, 4, ... 196
    assert many.warnings[1:] == (
        "the facts of the targets are from 50 of 200 training samples, evenly spaced: the others were not looked at",
    )
    labels = MapDataset("own", {"train": Read(200, lambda at: torch.tensor([1, int(at % 8 == 0)]))}, 0)
    assert labels.facts()["label_counts"] == (200, 100)  # half of those that were read
    has_them = Read(200, lambda at: at / 7, targets=[at / 7 for at in range(200)])
    assert MapDataset("own", {"train": has_them}, 0).facts()["target_mean"] == pytest.approx((99.5 / 7,), rel=1e-6)
    assert has_them.reads < 30
    others = Read(200, lambda at: at / 7, targets=[1.0 + at / 7 for at in range(200)])
    assert MapDataset("own", {"train": others}, 0).facts()["target_mean"] == many.facts()["target_mean"]
    for target in (lambda at: float("nan") if at == 3 else 1.0, lambda at: torch.ones(1 + at % 2)):
        data = MapDataset("own", {"train": Read(20, target)}, 0)
        assert data.facts() == {"input_shape": (2,)}
        assert data.lacks["target_mean"].what.endswith(", and some are NaN or inf, or of another shape")


def named(count, *names, attribute="output_names"):
    data = TensorDataset(torch.ones(4, 2), torch.eye(4)[:, :count] * 3)
    setattr(data, attribute, names)
    return data


def test_outputs_have_the_names_that_the_dataset_gives():
    data = MapDataset("own", torch_parts((named(2, "height", "width"), named(2))), 0)
    assert (data.facts()["output_names"], data.card()["labels"]) == (("height", "width"), ["height", "width"])
    assert MapDataset("own", torch_parts(named(2)), 0).card()["labels"] == []  # as before there were such names
    labels = TensorDataset(torch.ones(4, 2), torch.eye(4))
    labels.classes = list("abcd")
    assert facts_of(labels)["output_names"] == tuple("abcd")
    for parts, said in (
        ((named(2, "a"),), "output_names are a, for 2 outputs"),
        ((named(2, "a", "a"),), "output_names are a, a, for 2 outputs"),
        ((named(2, "a", "b"), named(2, "b", "a")), "output_names are a, b and b, a, for 2 outputs"),
        ((named(2), named(1)), r"a target of val is \[1\], and one of train \[2\]"),
    ):
        with pytest.raises(DataError, match=said):
            MapDataset("own", torch_parts(parts), 0)


@pytest.mark.parametrize(
    ("targets", "fact", "said", "hint"),
    [
        (ROWS, "num_classes", "the targets are float64 [N, 2]", "for these targets: task=regression; "),
        (ROWS % 2, "num_classes", "the targets are float64 [N, 2]", "task=multilabel and task=regression; "),
        (np.arange(6), "target_mean", "the targets are int64 [N]", "for these targets: task=classify; "),
        (np.arange(6), "label_counts", "the targets are int64 [N]", "for these targets: task=classify; "),
        (
            np.arange(6)[:, None],
            "num_classes",
            "int64 [N, 1]",
            "classes are integers [N], also targets.squeeze(1) of [N, 1]",
        ),
        (np.arange(6) * 10**9, "num_classes", "of type int64 shows no classes", "numbers floats [N] or [N, K]"),
        (ROWS, "num_classes", "the targets", "model.facts={num_classes: num_outputs}"),
        (ROWS, "image_size", "the inputs are [2]", "model=mlp takes inputs of any shape"),
    ],
)
def test_what_targets_are_for_is_named(targets, fact, said, hint):
    data = MapDataset("own", torch_parts((ROWS, targets)), 0)
    assert fact not in data.facts()
    assert said in data.lacks[fact].what
    assert hint in data.lacks[fact].hint


def test_a_card_has_all_facts_as_json():
    for targets in (np.arange(6) % 3, ROWS, ROWS % 2):
        data = MapDataset("own", torch_parts((ROWS, targets)), 0)
        card = json.loads(json.dumps(data.card()))
        assert card == data.card()
        assert facts_in(card) == data.facts()
        assert (card["input_dtype"], card["target_shape"]) == (
            "float64",
            [2] * (targets is not None and targets.ndim - 1),
        )
