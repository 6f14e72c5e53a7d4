"""An untrusted recipe only runs code that is meant to be called from YAML."""

from __future__ import annotations

import json

import pytest

from mptrain.config.compose import compose
from mptrain.study.recipe.catalogue import recipe_points
from mptrain.study.recipe.recipe import RESERVED, read_recipe
from mptrain.system.errors import ConfigError
from tests.loops import each

SOUND = {
    "title": "Mine",
    "claim": "It works.",
    "source": "me",
    "base": ["model=mlp"],
    "groups": {"small": ["model.hidden=[8]"]},
    "arms": {"fp32": ["precision=fp32"], "bf16": ["precision=bf16"]},
    "reference": "fp32",
    "seeds": [0],
    "margin": 0.1,
    "smoke": ["train.max_steps=2"],
}


@pytest.fixture
def recipe_of(tmp_path):
    def read(**more):
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({**SOUND, **more}))
        return read_recipe(path)

    return read


@each(
    "target",
    [
        "mptrain.cli.main.main",
        "mptrain.study.recipe.catalogue.find_recipe",
        "mptrain.runlog.atomic_files.write_atomically",
        "torchvision.datasets.utils.extract_archive",
        "torchvision.datasets.utils.download_url",
        "torchvision.io.write_png",
        "subprocess.getoutput",
    ],
)
@each("group", ["model", "dataset", "task", "optimizer", "schedule", "scaler"])
def test_the_words_of_a_recipe_choose_no_other_code(recipe_of, group, target):
    point = recipe_points(recipe_of(base=["model=mlp", f"{group}._target_={target}"]))[0]
    with pytest.raises(ConfigError, match=f"_target_ '{target}' is not in an allowed package"):
        compose(point.overrides)


def test_nor_do_those_of_one_learner(recipe_of):
    word = "+learners.main.optimizer={_target_: mptrain.cli.main.main, argv: [doctor]}"
    with pytest.raises(
        ConfigError, match=r"_target_ 'mptrain.cli.main.main' is not in an allowed package \(mptrain.op"
    ):
        compose(recipe_points(recipe_of(base=["model=mlp", word]))[0].overrides)


@each("place", ["base", "smoke", "groups.small", "arms.bf16"])
@each(
    "word",
    ["extensions.allow=[os.*]", "++extensions.allow=[os.*]", "+extensions.allow.0=os", "extensions={allow: [os.*]}"],
)
def test_no_place_of_a_recipe_allows_more_code(recipe_of, place, word):
    key, _, name = place.partition(".")
    with pytest.raises(ConfigError) as caught:
        recipe_of(**{key: {**SOUND[key], name: [word]} if name else [word]})
    assert f"{place}.0: '{word}' is not allowed in a recipe: {RESERVED['extensions']}" in str(caught.value)


def test_a_group_cannot_be_put_where_the_allowed_code_stands(recipe_of):
    for word in ("model@extensions=mlp", "+debug@extensions=smoke"):
        with pytest.raises(ConfigError, match=r"the package of (model|debug) is fixed"):
            compose(recipe_points(recipe_of(base=[word]))[0].overrides)
