"""Each data set's YAML file describes it, comments every key, and gives exactly the keys that it takes."""

from __future__ import annotations

import importlib
import inspect
import typing
from pathlib import Path

import pytest
import yaml
from loops import each

CONFIGS = Path(__file__).parents[2] / "configs" / "dataset"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


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


IMAGES = {"digits", "fashion_mnist", "cifar10", "cifar100", "imagenet", "image_folder", "synthetic"}
BOXED = {"digit_scenes", "voc", "coco"}
TEXT = {"python_docs", "text"}
LABELLED = {"docstrings", "labelled_text"}
SOUND = {"asterisk_audio", "made_up_sounds", "recordings"}
SPEECH = {"asterisk", "speech", "tone_words"}
PHOTOS = {"photos", "photo_folder"}
PAIRS = {"number_words", "pairs", "gettext", "trans_de_en"}
#: Keys whose values follow the model, and what a target learns from the program instead of its file.
FOLLOWING = {
    "augment",
    "image_size",
    "channels",
    "normalise",
    "fit",
    "tokens",
    "sequence_length",
    "stream",
    "pieces",
    "vocabulary",
    "target_vocabulary",
    "shared",
    "features",
    "stride",
    "max_vocabulary",
    "window",
    "context",
    "degradation",
    "factor",
    "patch_size",
}
FACTS = {"batch_size", "labels"}


def test_these_data_sets_are_offered():
    kinds = {
        "IMAGES": IMAGES,
        "TEXT": TEXT,
        "LABELLED": LABELLED,
        "BOXED": BOXED,
        "PAIRS": PAIRS,
        "SPEECH": SPEECH,
        "SOUND": SOUND,
        "PHOTOS": PHOTOS,
    }
    known = set().union(*kinds.values())
    missing, gone = sorted(set(NAMES) - known), sorted(known - set(NAMES))
    assert not missing, (
        f"add {missing} to the set of its kind in tests/workloads/test_dataset_configs.py: {', '.join(kinds)}"
    )
    assert not gone, f"configs/dataset has no {gone}: take it out of its set in tests/workloads/test_dataset_configs.py"


@each("name", NAMES)
def test_the_file_gives_every_key_its_target_takes_and_no_other(name):
    _, keys = read(name)
    assert set(keys) - {"_target_"} == set(inspect.signature(target_of(keys)).parameters) - FACTS


@each("name", NAMES)
def test_values_in_the_file_are_the_targets_defaults(name):
    _, keys = read(name)
    for key, parameter in inspect.signature(target_of(keys)).parameters.items():
        if key not in FOLLOWING | FACTS:
            default = parameter.default
            assert keys[key] == as_in_yaml(default), key


@pytest.mark.parametrize("name", sorted(TEXT))
def test_text_follows_the_model_and_falls_back_to_the_targets_defaults(name):
    _, keys = read(name)
    for key, default in (("tokens", "word"), ("sequence_length", 128), ("stream", True)):
        assert inspect.signature(target_of(keys)).parameters[key].default == default
        assert keys[key] == f"${{oc.select:model.defaults.{key},{str(default).lower()}}}"


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_pairs_follow_the_model_and_fall_back_to_the_targets_defaults(name):
    _, keys = read(name)
    for key in ("pieces", "vocabulary", "target_vocabulary", "shared"):
        default = inspect.signature(target_of(keys)).parameters[key].default
        said = "null" if default is None else str(default).lower()
        assert keys[key] == f"${{oc.select:model.defaults.{key},{said}}}"


@pytest.mark.parametrize("name", sorted(SPEECH))
def test_speech_follows_the_model_and_falls_back_to_the_targets_defaults(name):
    _, keys = read(name)
    for key, default in (("features", "log_mel"), ("stride", 2)):
        assert inspect.signature(target_of(keys)).parameters[key].default == default
        assert keys[key] == f"${{oc.select:model.defaults.{key},{default}}}"


@pytest.mark.parametrize("name", sorted(PHOTOS))
def test_photos_follow_the_model_and_fall_back_to_the_targets_defaults(name):
    _, keys = read(name)
    for key in ("degradation", "factor", "patch_size"):
        default = inspect.signature(target_of(keys)).parameters[key].default
        assert keys[key] == f"${{oc.select:model.defaults.{key},{default}}}"


@each("name", NAMES)
def test_annotations_can_be_resolved_at_run_time(name):
    _, keys = read(name)
    target = target_of(keys)
    assert set(inspect.signature(target).parameters) <= set(typing.get_type_hints(target, include_extras=True))


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


@pytest.mark.parametrize("name", sorted(SOUND))
def test_sound_follows_what_the_model_sees_and_falls_back_to_the_targets_defaults(name):
    _, keys = read(name)
    for key, default in (("window", 4000), ("context", 510)):
        assert inspect.signature(target_of(keys)).parameters[key].default == default
        assert keys[key] == f"${{oc.select:model.defaults.{key},{default}}}"
