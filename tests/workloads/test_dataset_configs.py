"""Each data set's YAML file describes it, comments every key, and gives exactly the keys that it takes."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from pathlib import Path

import yaml

from tests.loops import each

CONFIGS = Path(__file__).parents[2] / "configs" / "dataset"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
#: What a target learns from the program instead of its file.
FACTS = {"batch_size", "labels", "fitted"}
#: Keys that follow the model wherever a data set has them.
FOLLOWING = {
    *("tokens", "sequence_length", "stream", "pieces", "vocabulary", "target_vocabulary", "shared", "features"),
    *("stride", "window", "context", "degradation", "factor", "patch_size"),
}
#: Keys of images, whose values follow what each kind of data has.
OWN = {"image_size", "channels", "augment"}
FOLLOWS = re.compile(r"\$\{oc\.select:model\.defaults\.(\w+)(?:\.small|\.full)?,(\w+)\}")


def read(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    keys = yaml.safe_load(text)
    return text, keys.get("dataset", keys)


def as_in_yaml(default):
    if isinstance(default, Path):
        return str(default)
    return list(default) if isinstance(default, tuple) else default


def target_of(keys):
    module, _, function = keys["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), function)


@each("name", NAMES)
def test_the_file_gives_every_key_its_target_takes(name):
    _, keys = read(name)
    target = target_of(keys)
    taken = set(inspect.signature(target).parameters)
    assert set(keys) - {"_target_"} == taken - FACTS
    assert taken <= set(typing.get_type_hints(target, include_extras=True))


@each("name", NAMES)
def test_values_are_the_targets_defaults_or_follow_the_model(name):
    _, keys = read(name)
    for key, parameter in inspect.signature(target_of(keys)).parameters.items():
        if key in FACTS:
            continue
        given = keys[key]
        follows = FOLLOWS.fullmatch(str(given))
        assert follows or key not in FOLLOWING, key
        if follows:
            assert follows[1] == key
            given = yaml.safe_load(follows[2])
        assert key in OWN or given == as_in_yaml(parameter.default), key


@each("name", NAMES)
def test_the_file_describes_itself_and_each_key(name):
    text, _ = read(name)
    lines = text.splitlines()
    first = lines[1] if "@package" in lines[0] else lines[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    for line in lines[1:]:
        if ": " in line and "_target_" not in line and not line.startswith("#"):
            assert "  # " in line, line
