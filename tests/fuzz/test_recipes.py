"""Whatever a recipe file holds, it is a recipe or one error that lists what is wrong with it."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mptrain.config.catalogue import configs_folder
from mptrain.study.recipe.recipe import RELATIONS, read_recipe
from mptrain.system.errors import ConfigError
from tests.fuzz.hostile import examples, misfit, only_our_errors, spoiled, texts
from tests.fuzz.test_overrides import odd_words

RECIPES = sorted(configs_folder().parent.glob("recipes/**/*.yaml"))
SOUND = {
    "title": "Mine",
    "claim": "It works.",
    "source": "me",
    "base": ["model=mlp"],
    "groups": {"small": ["model.hidden=[8]"], "large": []},
    "arms": {"fp32": ["precision=fp32"], "s2^8": ["precision=fp16_static", "scaler.scale=256"]},
    "reference": "fp32",
    "seeds": [0, 1],
    "margin": 0.1,
    "metric": "top1",
    "needs": {"gpu": "optional", "minutes": 2},
    "expect": [
        {"arm": "s2^8", "measure": "top1", "equals": "fp32", "within": 0.03},
        {"arm": "fp32", "measure": "skip_rate", "below": 0.5},
    ],
    "smoke": ["train.max_steps=2"],
}
YAML_TOKENS = [
    *("&a ", "*a", "<<: *a", "!!python/object/apply:os.system [touch x]", "!!binary x", "!!set {a}", "!!timestamp 2001-01-01"),
    *("- ", ": ", "? ", "---\n", "...\n", "%YAML 9.9\n", "|\n", ">\n", "\t", "# ", "${a}", "${oc.env:HOME}", "???", "~", ".inf"),
    *("0x", "1_000", "1:30", "!", "!!", "@", "`", "{", "}", "[", "]", "'", '"', "{a: b}", "{[a]: b}", "{{a: b}: c}", "\u2028", "\x85"),
    *("[" * 2000, "{a: " * 2000, "- " * 2000, "9" * 5000, "x" * 100_000, "a\x1b[31m", "\ud800"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read(folder, content):
    path = folder / "recipe.yaml"
    path.write_bytes(content)
    with only_our_errors(folder):
        read_recipe(path)


@examples(40, 5000)
@given(st.data())
def test_a_spoiled_recipe(folder, data):
    whole = data.draw(st.sampled_from(RECIPES)).read_bytes()
    read(folder, data.draw(spoiled(whole, *(path.read_bytes() for path in RECIPES[:3]))))


@examples(40, 5000)
@given(st.data())
def test_a_recipe_with_odd_pieces_of_yaml(folder, data):
    text = yaml.safe_dump(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        text = text[:place] + data.draw(st.sampled_from(YAML_TOKENS)) + text[place:]
    read(folder, text.encode("utf-8", "surrogatepass"))


@examples(40, 5000)
@given(st.data())
def test_a_recipe_with_a_value_of_another_kind(folder, data):
    read(folder, json.dumps(data.draw(misfit(SOUND))).encode())


@examples(40, 5000)
@given(
    st.lists(odd_words(), max_size=2),
    st.dictionaries(
        st.sampled_from(("arm", "measure", *RELATIONS, "within", "by", "times", "odd")),
        st.one_of(texts, st.floats(), st.sampled_from(("fp32", "small/fp32"))),
    ),
)
def test_a_recipe_with_odd_words_and_expectations(folder, words, expectation):
    tree = {**SOUND, "base": words, "arms": {**SOUND["arms"], "odd": words}, "expect": [expectation]}
    read(folder, json.dumps(tree).encode())


def laughs(levels):
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a, a]"]
    lines += [f"x{at}: &x{at} [{', '.join([f'*x{at - 1}'] * 10)}]" for at in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [laughs(9), "a: &a [*a]", "a: &a {b: *a}", "base: &a\n  - *a\n"])
def test_aliases_that_unfold_to_more_than_there_is_memory_for_are_refused(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text)
    with only_our_errors(folder), pytest.raises(ConfigError, match="expand to more than"):
        read_recipe(path)
