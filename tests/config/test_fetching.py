"""Files download nothing: only what was typed, or chosen among mptrain's own data sets, may."""

from __future__ import annotations

import shutil

import pytest
import torchvision.models._api as torchvision_api
from torchvision import datasets

from mptrain.cli.main import main
from mptrain.config.allowed_targets import PACKAGES
from mptrain.config.compose import Composer, allowed_downloads, compose, reload
from mptrain.config.targets import Target
from mptrain.run.build.workload import build_dataset
from mptrain.study.commands import sweep
from mptrain.study.recipe import reproduction
from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.detection.datasets.voc import load_voc
from mptrain.workloads.images.datasets import fashion as fashion_module
from mptrain.workloads.images.datasets.cifar import load_cifar10
from mptrain.workloads.images.datasets.fashion import load_fashion_mnist
from tests import jobs_that_end as jobs


class Asked(Exception):
    """Somebody wanted to download."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*arguments, **keywords):
        raise Asked

    monkeypatch.setattr(torchvision_api, "load_state_dict_from_url", refuse)


@pytest.fixture
def downloads(monkeypatch):
    """The values of ``download`` that torchvision's CIFAR-10 was given."""
    told = []

    def read(root, train, download):
        told.append(download)
        raise OSError("no route to host")

    monkeypatch.setattr(datasets, "CIFAR10", read)
    return told


def own_folder(tmp_path, group, text):
    folder = tmp_path / "mine" / group
    folder.mkdir(parents=True)
    (folder / "theirs.yaml").write_text(text)
    return [tmp_path / "mine"]


RECIPE = """
title: A title
claim: A claim.
source: nowhere
base: [model=mlp, dataset=cifar10, train.max_steps=1, threads=1]
arms: {a: [precision=fp32], b: [precision=amp_bf16]}
reference: a
margin: 1
seeds: [0]
expect: [{arm: b, measure: top1, equals: a, within: 1}]
needs: {gpu: optional, minutes: 1, data: CIFAR-10}
smoke: [train.max_steps=1]
"""

CIFAR = "_target_: mptrain.workloads.images.datasets.cifar.load_cifar10\nroot: {}\ndownload: true\n"


def test_a_data_set_that_was_typed_is_downloaded_and_one_that_a_file_names_is_not(tmp_path, downloads):
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    root = f"dataset.root={tmp_path / 'data'}"
    typed = compose(["dataset=cifar10", "model=mlp", root])
    saved = [reload(typed.yaml, words) for words in ((), ("dataset.download=true",), ("train.epochs=1",))]
    folders = own_folder(tmp_path, "dataset", CIFAR.format(tmp_path / "data"))
    own = [
        compose(["dataset=theirs", "model=mlp", *more], config_dirs=folders)
        for more in ((), ("dataset.download=true",))
    ]
    for config in (typed, *saved, *own):
        with pytest.raises(DataError):
            build_dataset(config)
    assert downloads == [True, False, True, False, False, True]
    assert (
        allowed_downloads(reload(typed.yaml, fetch=allowed_downloads(typed)))
        == allowed_downloads(typed)
        == {"dataset": ("download", "root"), "model": ()}
    )


def test_words_out_of_a_strangers_file_download_nothing_unless_they_were_typed():
    words = ["dataset=cifar10", "model=mlp", "dataset.root=there", "dataset.download=true"]
    for typed, expected in (
        (None, ("download", "root")),
        ((), ()),
        (("model=mlp",), ()),
        (("dataset.root=there",), ("root",)),
        (("dataset=cifar10",), ("download",)),
        (("dataset.download=true",), ("download",)),
    ):
        assert Composer(typed=typed).compose(words).dataset.fetch == expected, typed


def test_a_sweep_that_is_resumed_and_a_recipe_of_others_download_nothing(tmp_path, monkeypatch):
    asked = []

    def note(points, composer, *rest, **options):
        asked.append(composer.compose(points[0].overrides).dataset.fetch)
        raise DataError("nobody looks for it")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "PROGRAM", jobs.program())
    assert main(["-m", "run.name=theirs", "model=mlp", "dataset=digits", f"seed={jobs.DONE},9"]) == 0
    table = tmp_path / "outputs" / "theirs" / "sweep.json"
    table.write_text(table.read_text().replace("dataset=digits", "dataset=cifar10"))
    for record in list(table.parent.glob("00*/run.json")):
        shutil.rmtree(record.parent)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.setattr(sweep, "check", note)
    monkeypatch.setattr(reproduction, "check", note)
    for words, expected in (
        (["-m", "model=mlp", "dataset=cifar10", "seed=0,1"], ("download",)),
        (["resume", "theirs"], ()),
        (["reproduce", "recipe.yaml"], ()),
        (["reproduce", "recipe.yaml", "dataset=cifar10"], ("download",)),
    ):
        assert main(words) == 6
        assert asked.pop() == expected, words


def test_a_network_file_cannot_choose_a_data_set_that_is_downloaded(tmp_path):
    text = "# @package _global_\ndefaults:\n  - override /dataset: cifar10\nmodel:\n  _target_: mptrain.workloads.classification.models.perceptron.mlp\n"
    folders = own_folder(tmp_path, "model", text)
    assert compose(["model=theirs"], config_dirs=folders).dataset.fetch == ()
    assert compose(["model=theirs", "dataset=cifar10"], config_dirs=folders).dataset.fetch == ("download",)


def test_pretrained_weights_can_be_typed_and_a_file_alone_does_not_get_them(tmp_path):
    text = "_target_: torchvision.models.segmentation.lraspp_mobilenet_v3_large\nweights_backbone: DEFAULT\n"
    folders = own_folder(tmp_path, "model", text)
    typed = compose(["model=theirs", "model.weights_backbone=DEFAULT"], config_dirs=folders)
    for config in (compose(["model=theirs"], config_dirs=folders), reload(typed.yaml)):
        with pytest.raises(ConfigError, match="would download pretrained weights") as caught:
            config.model.build(num_classes=3)
        assert caught.value.hint == "set model.weights_backbone=DEFAULT"
    with pytest.raises(ConfigError, match="Asked"):
        typed.model.build(num_classes=3)


def network(path, *typed, **arguments):
    return Target(path, arguments, PACKAGES["model"], typed)


@pytest.mark.parametrize("name", ["segmentation.lraspp_mobilenet_v3_large", "detection.ssdlite320_mobilenet_v3_large"])
def test_networks_of_torchvision_begin_with_fresh_weights_where_their_default_is_downloaded(name):
    network(f"torchvision.models.{name}", num_classes=3).build()


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("torchvision.models.squeezenet1_1", "weights", "DEFAULT"),
        ("torchvision.models.segmentation.lraspp_mobilenet_v3_large", "weights_backbone", "IMAGENET1K_V1"),
    ],
)
def test_weights_that_a_file_asks_for_are_refused_and_typed_ones_are_fetched(path, key, value):
    with pytest.raises(ConfigError, match="would download pretrained weights") as caught:
        network(path, **{key: value}).build()
    assert caught.value.hint == f"set model.{key}={value}"
    with pytest.raises(ConfigError, match="Asked"):
        network(path, key, **{key: value}).build()


def test_a_default_within_another_function_is_refused_too():
    with pytest.raises(ConfigError, match="would download pretrained weights"):
        network("torchvision.models.get_model", name="lraspp_mobilenet_v3_large").build()


@pytest.mark.parametrize("load", [load_cifar10, load_fashion_mnist, load_voc])
@pytest.mark.parametrize("there", [False, True])
def test_a_failed_download_leaves_no_folder_behind(tmp_path, monkeypatch, load, there):
    def refuse(*arguments, **keywords):
        raise OSError("Temporary failure in name resolution")

    monkeypatch.setattr(fashion_module, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(datasets.utils.urllib.request, "urlopen", refuse)
    root = tmp_path / "a" / "b"
    if there:
        root.mkdir(parents=True)
        (root / "mine.txt").write_text("kept")
    with pytest.raises(DataError, match="the download failed"):
        load(root=root)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == (["a", "a/b", "a/b/mine.txt"] if there else [])
