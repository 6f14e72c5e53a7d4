"""Each data set's YAML file describes it, comments every key, and gives exactly the keys that it takes."""

from __future__ import annotations

import importlib
import inspect
import typing
from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs" / "dataset"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def read(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    keys = yaml.safe_load(text)
    return text, keys.get("dataset", keys)


def target_of(keys):
    module, _, function = keys["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), function)


IMAGES = {"digits", "fashion_mnist", "cifar10", "cifar100", "imagenet", "image_folder", "synthetic"}
TEXT = {"python_docs", "text"}
#: Keys whose values follow the model, and what a target learns from the program instead of its file.
FOLLOWING = {"augment", "image_size", "channels", "normalise", "tokens", "sequence_length", "stream"}
FACTS = {"batch_size"}


def test_these_data_sets_are_offered():
    assert set(NAMES) == IMAGES | TEXT


@pytest.mark.parametrize("name", NAMES)
def test_the_file_gives_every_key_its_target_takes_and_no_other(name):
    _, keys = read(name)
    assert set(keys) - {"_target_"} == set(inspect.signature(target_of(keys)).parameters) - FACTS


@pytest.mark.parametrize("name", NAMES)
def test_values_in_the_file_are_the_targets_defaults(name):
    _, keys = read(name)
    for key, parameter in inspect.signature(target_of(keys)).parameters.items():
        if key not in FOLLOWING | FACTS:
            default = parameter.default
            assert keys[key] == (str(default) if isinstance(default, Path) else default), key


@pytest.mark.parametrize("name", sorted(TEXT))
def test_text_follows_the_model_and_falls_back_to_the_targets_defaults(name):
    _, keys = read(name)
    for key, default in (("tokens", "word"), ("sequence_length", 128), ("stream", True)):
        assert inspect.signature(target_of(keys)).parameters[key].default == default
        assert keys[key] == f"${{oc.select:model.defaults.{key},{str(default).lower()}}}"


@pytest.mark.parametrize("name", NAMES)
def test_annotations_can_be_resolved_at_run_time(name):
    _, keys = read(name)
    target = target_of(keys)
    assert set(inspect.signature(target).parameters) <= set(typing.get_type_hints(target, include_extras=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_file_describes_itself_and_each_key(name):
    text, _ = read(name)
    lines = text.splitlines()
    first = lines[1] if "@package" in lines[0] else lines[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    for line in lines[1:]:
        if ": " in line and "_target_" not in line and not line.startswith("#"):
            assert "  # " in line, line
