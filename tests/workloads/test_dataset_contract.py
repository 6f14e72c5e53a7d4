"""Contract of every data set that is offered: order, samples, facts, card, survey, digests and pickling."""

from __future__ import annotations

import gzip
import json
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile
from torchvision import datasets

from mptrain.config.compose import compose
from mptrain.config.targets import DATA_FACTS
from mptrain.workloads.images.datasets import fashion
from mptrain.workloads.translation.datasets.number_words import name_of

CPU = torch.device("cpu")
CHANCE = np.random.default_rng(0)
HELD = ("dataset.val_share=0.2", "dataset.test_share=0.2")
SOUND = ("dataset.window=600", "dataset.context=20")


def noise(*shape):
    return CHANCE.integers(0, 256, shape, dtype=np.uint8)


def pictures(folder, count=6):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(noise(40, 48, 3)).save(folder / f"{number}.png")
    return folder


def classes(root):
    for name in ("train/ant", "train/bee", "val/ant", "val/bee"):
        pictures(root / name, 4)
    return (f"dataset.root={root}", "dataset.image_size=16", "dataset.workers=0")


def wavs(folder, count=20):
    folder.mkdir(parents=True)
    for number in range(count):
        samples = CHANCE.integers(-999, 999, 8000 + 100 * number).astype(np.int16)
        wavfile.write(folder / f"{number}.wav", 8000, samples)
        (folder / f"{number}.txt").write_text(name_of(number, "en"))
    return folder


def prompts(root):
    wavs(root / "sounds")
    (root / "list.txt").write_text("".join(f"{number}: {name_of(number, 'en')}\n" for number in range(20)))
    return (f"dataset.sounds={root}/sounds", f"dataset.transcripts={root}/list.txt", *HELD)


def coco(root):
    for part in ("train2017", "val2017"):
        pictures(root / part)
    (root / "annotations").mkdir()
    said = {
        "images": [{"id": number, "file_name": f"{number}.png", "width": 48, "height": 40} for number in range(6)],
        "categories": [{"id": 1, "name": "person"}],
        "annotations": [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [0, 0, 20, 10], "iscrowd": 0}],
    }
    for part in ("train2017", "val2017"):
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(said))
    return (f"dataset.root={root}", "dataset.image_size=32", "dataset.workers=0")


def voc(root):
    box = "<bndbox><xmin>2</xmin><ymin>2</ymin><xmax>20</xmax><ymax>20</ymax></bndbox>"
    pictures(root / "mine/JPEGImages").joinpath("0.png").rename(root / "mine/JPEGImages/0.jpg")
    (root / "mine/Annotations").mkdir()
    (root / "mine/Annotations/0.xml").write_text(f"<annotation><object><name>cat</name>{box}</object></annotation>")
    (root / "mine/ImageSets/Main").mkdir(parents=True)
    (root / "mine/ImageSets/Main/all.txt").write_text("0\n")
    lists = [f"dataset.{part}=[mine/all]" for part in ("train", "val", "test")]
    return (f"dataset.root={root}", *lists, "dataset.image_size=32", "dataset.workers=0")


def idx(values):
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def fashion_mnist(root):
    root.mkdir()
    for part, count in (("train", 40), ("t10k", 10)):
        for kind, values in (("images-idx3", noise(count, 4, 4)), ("labels-idx1", noise(count) % 10)):
            (root / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(values)))
    return (f"dataset.root={root}", "dataset.val_samples=10", "dataset.image_size=4")


def pairs(root, separator="\t", **languages):
    root.mkdir()
    lines = [separator.join((name_of(number, "de"), name_of(number, "en"))) for number in range(100)]
    (root / "all.tsv").write_text("".join(f"{line}\n" for line in lines))
    return (f"dataset.path={root}/all.tsv", "dataset.vocabulary=90", *HELD)


def trans_de_en(root):
    root.mkdir()
    lines = [f"Das ist {name_of(n, 'de')}. :: This is {name_of(n, 'en')}.\n" for n in range(100)]
    (root / "de-en").write_text("".join(lines))
    return (f"dataset.path={root}/de-en", "dataset.vocabulary=90", *HELD)


def gettext(root):
    (root / "fr/LC_MESSAGES").mkdir(parents=True)
    said = [f'msgid "{name_of(n, "en")}"\nmsgstr "{name_of(n, "fr")}"\n' for n in range(100)]
    (root / "fr/LC_MESSAGES/app.po").write_text("\n".join(said), encoding="utf-8")
    return (f"dataset.path={root}", "dataset.vocabulary=90", *HELD)


def text(root):
    root.mkdir()
    (root / "all.txt").write_text("".join(f"{name_of(number, 'en')} and\n\n" for number in range(400)))
    return (f"dataset.path={root}/all.txt", "dataset.sequence_length=8", "dataset.min_count=1")


def labelled_text(root):
    root.mkdir()
    lines = [f"{'odd' if number % 2 else 'even'}\t{name_of(number, 'en')}\n" for number in range(100)]
    (root / "all.tsv").write_text("".join(lines))
    return (f"dataset.path={root}/all.tsv", *HELD)


def table(root):
    root.mkdir()
    lines = [f"{number * 0.5},{'abc'[number % 3]},{'yes' if number % 2 else 'no'}\n" for number in range(100)]
    (root / "all.csv").write_text("size,kind,good\n" + "".join(lines))
    return (f"dataset.path={root}/all.csv", "dataset.target=good", *HELD)


def cifar(root):
    return ("dataset.val_samples=10", "dataset.image_size=32")


def made(*words):
    return lambda root: words


#: Words that make each data set, of files that are written into a folder where it needs some.
MADE = {
    "asterisk": prompts,
    "asterisk_audio": lambda root: (*prompts(root), *SOUND),
    "cifar10": cifar,
    "cifar100": cifar,
    "coco": coco,
    "digit_scenes": made("dataset.train_samples=12", "dataset.val_samples=4", "dataset.test_samples=4"),
    "digits": made("dataset.train_samples=40", "dataset.augment=true"),
    "docstrings": made(),
    "fashion_mnist": fashion_mnist,
    "gettext": gettext,
    "image_folder": classes,
    "imagenet": classes,
    "labelled_text": labelled_text,
    "made_up_sounds": made(*(f"dataset.{part}_samples=4" for part in ("train", "val", "test")), *SOUND),
    "number_words": made("dataset.samples=300"),
    "pairs": pairs,
    "photo_folder": lambda root: (
        f"dataset.root={pictures(root)}",
        "dataset.patch_size=16",
        "dataset.tile_size=16",
        "dataset.patches=12",
        "dataset.workers=0",
    ),
    "photos": made("dataset.patches=12", "dataset.skimage=false"),
    "python_docs": made("dataset.sequence_length=64", "dataset.stream=false"),
    "recordings": lambda root: (f"dataset.root={wavs(root)}", "dataset.rate=8000", *SOUND, *HELD),
    "speech": lambda root: (f"dataset.path={wavs(root)}", "dataset.sample_rate=8000", "dataset.bands=40", *HELD),
    "synthetic": made("dataset.samples=60", "dataset.val_samples=20", "dataset.test_samples=20"),
    "table": table,
    "text": text,
    "tone_words": made(*(f"dataset.{part}_samples=12" for part in ("train", "val", "test"))),
    "trans_de_en": trans_de_en,
    "voc": voc,
}
#: Data sets whose samples continue one another: each epoch has the same order.
STREAMS = {"text"}


class Published:
    """CIFAR as torchvision's classes offer it."""

    classes = [f"thing {number}" for number in range(10)]

    def __init__(self, root, train, download):
        self.data = noise(60 if train else 20, 32, 32, 3)
        self.targets = [number % 10 for number in range(len(self.data))]


@pytest.fixture(scope="module", params=sorted(MADE))
def named(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fashion, "DEBIAN", root / "none")
        for name in ("CIFAR10", "CIFAR100"):
            patch.setattr(datasets, name, Published)
        config = compose((f"dataset={request.param}", *MADE[request.param](root)))
        yield request.param, config.dataset.build(batch_size=4)


@pytest.fixture
def dataset(named):
    return named[1]


def parts(dataset):
    return {name: part for name in ("train", "val", "test") if (part := getattr(dataset, name)) is not None}


def same(one, other):
    """Two batches agree in every tensor, up to padding behind their ends."""
    for name, tensor in one.tensors().items():
        wider = other.tensors()[name]
        cut = tuple(slice(0, min(sizes)) for sizes in zip(tensor.shape[1:], wider.shape[1:], strict=True))
        if not torch.equal(tensor[(slice(None), *cut)], wider[(slice(None), *cut)]):
            return False
    return one.counts == other.counts


def test_every_data_set_that_is_offered_is_here(pytestconfig):
    offered = {path.stem for path in (pytestconfig.rootpath / "configs/dataset").glob("*.yaml")}
    assert set(MADE) == offered - {"from_python"}  # which has no data of its own


def test_an_order_is_whole_and_follows_seed_and_epoch(named):
    name, dataset = named
    for part in parts(dataset).values():
        assert len(part) > 0
        plain, first, next_one = (
            part.order(3, epoch, shuffle=shuffle).tolist() for epoch, shuffle in ((0, False), (0, True), (1, True))
        )
        assert sorted(plain) == sorted(first) == sorted(next_one) == list(range(len(part)))
        assert plain == part.order(4, 1, shuffle=False).tolist()
        assert first == part.order(3, 0, shuffle=True).tolist()
        assert len(part) < 10 or (first == next_one) == (name in STREAMS)


def test_a_sample_is_the_same_alone_in_company_and_elsewhere(dataset):
    before = torch.get_rng_state()
    for part in parts(dataset).values():
        indices = list(range(min(4, len(part))))
        together, last = part.fetch(indices, 1, 5), part.fetch(indices[-1:], 1, 5)
        assert together.samples == len(indices)
        crossing = (torch.uint8, torch.int16, torch.int64, torch.float32)  # what crosses to the device
        assert together.inputs.dtype in crossing
        assert same(pickle.loads(pickle.dumps(part)).fetch(indices, 1, 5), together)
        one, row = last.tensors(), {name: tensor[-1:] for name, tensor in together.tensors().items()}
        for name, tensor in one.items():
            cut = tuple(slice(0, min(sizes)) for sizes in zip(tensor.shape, row[name].shape, strict=True))
            assert torch.equal(tensor[cut], row[name][cut]), name
    assert torch.equal(torch.get_rng_state(), before)


def test_held_out_samples_do_not_vary(dataset):
    for name in parts(dataset).keys() - {"train"}:
        part = getattr(dataset, name)
        assert same(part.fetch([0], 0, 0), part.fetch([0], 3, 7))


def test_facts_and_card_say_what_others_need(dataset):
    facts, card = dataset.facts(), dataset.card()
    assert set(facts) <= set(DATA_FACTS)
    assert json.loads(json.dumps(card)) == card
    assert len(facts.get("class_names", ())) == facts.get("num_classes", 0)
    assert all(isinstance(label, str) for label in card.get("labels", ()))
    assert dataset.name
    assert dataset.describe()
    assert "\n" not in dataset.describe()


def test_a_survey_and_digests_count_every_sample(dataset):
    known = {}
    for name, part in parts(dataset).items():
        survey = part.survey()
        assert survey.labels is None or survey.labels.dtype == torch.int64
        assert all(total > 0 for total in survey.totals.values())
        assert all(len(lengths) > 0 for lengths in survey.lengths.values())
        known[name] = part.digests()
        assert len(known[name]) in (0, len(part))
        for number in range(min(2, getattr(part, "files", 0))):
            part.read(number)
        assert part.skipped == 0
    assert not set(known["train"]) & {digest for name in known.keys() - {"train"} for digest in known[name]}


def test_a_prepared_batch_is_float32_or_numbers_and_splits(dataset):
    prepared = dataset.prepare(dataset.train.fetch(range(min(4, len(dataset.train))), 0, 0), CPU, torch.channels_last)
    assert {tensor.dtype for tensor in prepared.tensors().values()} <= {torch.float32, torch.int64, torch.bool}
    assert all(tensor.isfinite().all() for tensor in prepared.tensors().values())
    assert sum(prepared.share(part) for part in prepared.split(2)) == pytest.approx(1)
