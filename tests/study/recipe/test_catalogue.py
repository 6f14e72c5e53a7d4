"""A recipe is checked completely before any run and expands to plain command lines."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mptrain.config.compose import Composer
from mptrain.runlog.sweeps import Sweep, SweepJob
from mptrain.study.recipe.catalogue import (
    check_own_words,
    find_recipe,
    recipe_names,
    recipe_points,
    require_same_arms,
    start_of,
)
from mptrain.study.recipe.recipe import RESERVED, read_recipe
from mptrain.system.errors import ConfigError, UsageError
from tests.loops import each
from tests.small_runs import environment

SOUND = """
title: Mine
claim: >-
  It works
  well.
source: a paper, section 1
base: [model=mlp]
arms:
  fp32: [precision=fp32]
  s2^0: [precision=fp16_static, scaler.scale=1]
reference: fp32
seeds: [0, 1]
margin: 0.03
expect:
  - {arm: s2^0, measure: top1, below: fp32, by: 0.5}
  - {arm: s2^0, measure: skip_rate, above: 0.95}
needs: {minutes: 4}
smoke: [train.max_steps=2]
"""


@pytest.fixture
def recipe_of(tmp_path):
    """Return a function that reads a recipe from a text after replacing pairs of texts."""

    def read(*changes, text=SOUND):
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_text(text)
        return read_recipe(folder / "recipe.yaml")

    return read


def problems_of(read, *changes, text=SOUND):
    with pytest.raises(ConfigError) as caught:
        read(*changes, text=text)
    return [(problem.what.rpartition("recipe.yaml: ")[2], problem.hint) for problem in caught.value.problems]


def test_a_sound_recipe_is_read_as_it_was_meant(recipe_of):
    found = recipe_of()
    assert (found.name, found.title, found.claim) == ("mine", "Mine", "It works well.")
    assert found.arms == {"fp32": ("precision=fp32",), "s2^0": ("precision=fp16_static", "scaler.scale=1")}
    assert (found.reference, found.seeds, found.margin, found.metric) == ("fp32", (0, 1), 0.03, None)
    assert (found.needs.gpu, found.needs.minutes, found.needs.data) == ("optional", 4, "none")
    assert [one.text for one in found.expectations] == ["s2^0 top1 below fp32 by 0.5", "s2^0 skip_rate above 0.95"]


def test_every_problem_is_reported_at_once(recipe_of):
    text = """
    titel: Mine
    claim: ""
    base: [model=mlp, novalue, seed=3]
    arms: {fp32: [precision=fp32], "a b": [x=1], amp: precision=amp_dynamic}
    reference: fp23
    seeds: [0, -1]
    expect:
      - {arm: amp, measure: top1, below: fp32, by: x}
      - {arm: amq, measure: top1, below: fp32}
      - {arm: amp, measure: top1, equals: fp32, whitin: 0.5}
      - {arm: amp, measure: top1}
    needs: {gpus: 3, minutes: 0}
    smoke: [train.max_steps=1]
    arithmetic: {}
    """
    found = problems_of(recipe_of, text=textwrap.dedent(text))
    for problem in [
        ("unknown key 'titel'", "did you mean title?"),
        ("title is missing", "add title:"),
        ("claim: ", ""),
        ("source is missing", "add source:"),
        ("margin is missing", ""),
        ("base.1: 'novalue' is not of the form KEY=VALUE", ""),
        (f"base.2: 'seed=3' is not allowed in a recipe: {RESERVED['seed']}", "remove it"),
        ("arms.a b: ", ""),
        ("arms.amp: precision=amp_dynamic must be a list, each entry text", "write arms.amp: [precision=amp_dynamic]"),
        ("reference: there is no arm 'fp23'", "did you mean fp32?"),
        ("seeds.1: -1 must be a whole number, at least 0", ""),
        ("unknown key 'needs.gpus'", "did you mean needs.gpu?"),
        ("needs.minutes: 0 must be a number above 0", ""),
        ("expect.0.by: x must be a number, at least 0", ""),
        ("expect.1.arm: there is no arm 'amq'", "did you mean amp?"),
        ("unknown key 'expect.2.whitin'", "did you mean expect.2.within?"),
        ("expect.3: an expectation has one of the keys equals, below and above", ""),
        ("unknown key 'arithmetic'", ""),
    ]:
        assert any(what.startswith(problem[0]) and hint.startswith(problem[1]) for what, hint in found), problem
    assert len(found) == 18


@each(
    ("expectation", "what", "hint"),
    [
        ("{arm: s2^0, measure: top1, below: fp32, within: 1}", "'within' belongs to equals", "write by: 1"),
        ("{arm: s2^0, measure: top1, equals: 1, by: 2}", "'by' belongs to below and above", "write within: 2"),
        ("{arm: s2^0, measure: top1, below: 1, above: 2}", "an expectation has one of", "make one for each relation"),
        ("{arm: fp32, measure: top1, below: fp32}", "below: an arm is compared with itself", "name another arm"),
        ("{arm: s2^0, measure: top1, below: .inf}", "below: inf must be the name of an arm, or a number", ""),
        ("{arm: s2^0, measure: top1, below: 1, times: 0}", "times: 0 must be a number above 0", ""),
        ("3", "3 must be a mapping", "its keys are arm, measure, equals, below, above, within, by, times"),
    ],
)
def test_an_expectation_that_cannot_be_is_refused(recipe_of, expectation, what, hint):
    [found] = problems_of(recipe_of, ("{arm: s2^0, measure: skip_rate, above: 0.95}", expectation))
    assert found[0].replace("expect.1.", "").replace("expect.1: ", "").startswith(what)
    assert found[1] == hint


def test_sentences_of_version_0_1_are_refused_in_one_line(recipe_of):
    sentence = "s2^0.top1 < fp32.top1 by 0.5"
    [(what, hint)] = problems_of(recipe_of, ("{arm: s2^0, measure: top1, below: fp32, by: 0.5}", sentence))
    assert what.startswith(f"expect: '{sentence}' is a sentence, as in version 0.1")
    assert hint == "write for example {arm: fp16, measure: top1, equals: fp32, within: 0.03}"


@each("key", sorted(RESERVED))
def test_a_recipe_cannot_say_what_is_the_users_to_say(recipe_of, key):
    word = f"{key}=3" if key == "seed" else f"{key}.name=x"
    [(what, _)] = problems_of(recipe_of, ("model=mlp", f"model=mlp, +{word}"))
    assert what == f"base.1: '+{word}' is not allowed in a recipe: {RESERVED[key]}"


def test_interpolations_in_a_recipe_are_not_evaluated(recipe_of, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    assert recipe_of(("title: Mine", "title: ${oc.env:SECRET}")).title == "${oc.env:SECRET}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "not a mapping"),
        ("title: [x\n", "is not YAML"),
        ("title: a\ntitle: b\n", "title"),
        ("title: a\xff", "UTF-8"),
    ],
)
def test_what_cannot_be_read_names_the_file(tmp_path, text, says):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)


def test_control_characters_do_not_reach_the_terminal(recipe_of):
    found = problems_of(
        recipe_of, ("title: Mine", 'title: "\\e[2J"'), ("base: [model=mlp]", "base: [model=mlp, \"model.x='\\e'\"]")
    )
    assert [what.partition(" ")[0] for what, _ in found] == ["title:", "base.1:"]


def test_one_arm_alone_is_no_comparison_and_one_with_a_wrong_name_is_still_an_arm(recipe_of):
    found = problems_of(recipe_of, ("  s2^0: [precision=fp16_static, scaler.scale=1]\n", ""))
    assert ("there is only one arm", "add the arms to compare it with") in found
    told = [what for what, _ in problems_of(recipe_of, ("  s2^0: [", "  s 2: ["))]
    assert "arms.s 2: s 2 must be a name of letters, digits, _, - and ^" in told
    assert "there is only one arm" not in told


def test_repeated_seeds_and_arms_with_and_without_their_group_are_refused(recipe_of):
    found = problems_of(
        recipe_of,
        ("seeds: [0, 1]", "seeds: [0, 0]"),
        ("arms:\n", "groups: {sgd: [optimizer=sgd]}\narms:\n"),
        ("below: fp32", "below: sgd/fp32"),
    )
    assert found == [
        ("seeds: [0,0] has a duplicate", "list each seed once"),
        ("expect.0: only one of the two arms has its group", "name both as GROUP/ARM"),
    ]


def test_every_arm_is_run_with_every_seed(recipe_of):
    points = recipe_points(recipe_of(), ["train.epochs=3"])
    assert [(point.number, point.arm, point.overrides) for point in points] == [
        (0, "fp32", ("model=mlp", "precision=fp32", "seed=0", "train.epochs=3")),
        (1, "fp32", ("model=mlp", "precision=fp32", "seed=1", "train.epochs=3")),
        (2, "s2^0", ("model=mlp", "precision=fp16_static", "scaler.scale=1", "seed=0", "train.epochs=3")),
        (3, "s2^0", ("model=mlp", "precision=fp16_static", "scaler.scale=1", "seed=1", "train.epochs=3")),
    ]
    assert points[2].varied == ("precision=fp16_static", "scaler.scale=1", "seed=0")
    assert {point.count for point in points} == {4}


GROUPS = ("arms:\n", "groups: {sgd: [optimizer=sgd], adam: [optimizer=adam]}\narms:\n")


def test_groups_repeat_all_arms_unless_one_is_named(recipe_of):
    recipe = recipe_of(GROUPS)
    points = recipe_points(recipe)
    assert [point.arm for point in points[::2]] == ["sgd/fp32", "sgd/s2^0", "adam/fp32", "adam/s2^0"]
    assert points[0].overrides == ("model=mlp", "optimizer=sgd", "precision=fp32", "seed=0")
    assert [one.text for one in recipe.expectations] == [
        "sgd/s2^0 top1 below sgd/fp32 by 0.5",
        "adam/s2^0 top1 below adam/fp32 by 0.5",
        "sgd/s2^0 skip_rate above 0.95",
        "adam/s2^0 skip_rate above 0.95",
    ]

    named = ("arm: s2^0, measure: top1, below: fp32", "arm: sgd/s2^0, measure: top1, below: adam/fp32")
    recipe = recipe_of(GROUPS, named)
    assert recipe.expectations[0].text == "sgd/s2^0 top1 below adam/fp32 by 0.5"  # which is the only one
    assert len(recipe.expectations) == 3


def test_arms_may_stand_in_the_groups_that_are_best_for_them(recipe_of):
    named = ("arm: s2^0, measure: top1, below: fp32", "arm: best/s2^0, measure: top1, below: best/fp32")
    recipe = recipe_of(GROUPS, named)
    assert recipe.compares_best
    assert recipe.expectations[0].text == "best/s2^0 top1 below best/fp32 by 0.5"
    assert not recipe_of(GROUPS).compares_best
    right = ("arm: s2^0, measure: top1, below: fp32", "arm: sgd/s2^0, measure: top1, below: best/fp32")
    assert recipe_of(GROUPS, right).compares_best
    with pytest.raises(ConfigError, match=r"expect.0.arm: there is no arm 'best/s2\^0'"):
        recipe_of(named)
    with pytest.raises(ConfigError, match="groups: best is the group in which"):
        recipe_of(("arms:\n", "groups: {sgd: [optimizer=sgd], best: [optimizer=adam]}\narms:\n"))


def test_arms_start_from_the_weights_of_a_run_of_the_first_seed(recipe_of):
    recipe = recipe_of(("base: [model=mlp]", "base: [model=mlp]\nstart: [train.epochs=9]"), ("[0, 1]", "[3, 4]"))
    point = start_of(recipe, ["train.batch_size=8"])
    assert point.overrides == ("model=mlp", "train.epochs=9", "seed=3", "train.batch_size=8")
    points = recipe_points(recipe, weights=Path("out/mine-start"))
    assert {point.overrides[-1] for point in points} == {"model.weights=out/mine-start"}
    assert recipe_points(recipe)[0].overrides[-1] == "seed=3"
    assert start_of(recipe, smoke=True).overrides == ("model=mlp", "train.epochs=9", "train.max_steps=2", "seed=3")
    for word in ("train.epochs=2", "model.weights=mine.pt"):
        with pytest.raises(ConfigError, match=re.escape(f"'{word}': mine varies {word.partition('=')[0]}")):
            check_own_words(recipe, [word])


def test_a_smoke_run_has_one_seed_and_words_that_outdo_those_of_arms(recipe_of):
    recipe = recipe_of(("[precision=fp32]", "[precision=fp32, train.max_steps=500]"))
    points = recipe_points(recipe, smoke=True)
    assert [point.overrides for point in points] == [
        ("model=mlp", "precision=fp32", "train.max_steps=500", "train.max_steps=2", "seed=0"),
        ("model=mlp", "precision=fp16_static", "scaler.scale=1", "train.max_steps=2", "seed=0"),
    ]


def test_the_users_words_change_the_place_but_nothing_that_the_recipe_decides(recipe_of):
    recipe = recipe_of()
    mine = ["train.epochs=3", "extensions.allow=[mine]"]
    assert check_own_words(recipe, [*mine, "run.root=/data/x"]) == (mine, "/data/x")
    assert check_own_words(recipe, []) == ([], "outputs")
    for word in ("precision=fp32", "seed=1", "run.name=x", "train.epochs=1,2", "nothing"):
        with pytest.raises(ConfigError) as caught:
            check_own_words(recipe, [word])
        assert word in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check_own_words(recipe, ["seed=1", "nothing"])
    assert len(caught.value.problems) == 2


def test_going_on_with_another_version_names_the_arms_that_changed(recipe_of, tmp_path):
    points = recipe_points(recipe_of())
    jobs = tuple(SweepJob(p.number, f"{p.number}", p.overrides, p.varied, p.arm) for p in points)
    sweep = Sweep(tmp_path, "recipe", (), (), "train", 1, jobs)
    require_same_arms(sweep, points)
    changed = recipe_of(("scaler.scale=1]", "scaler.scale=2]\n  amp: [precision=amp_dynamic]"))
    with pytest.raises(ConfigError, match=r"amp is new; s2\^0 has other overrides or seeds") as caught:
        require_same_arms(sweep, recipe_points(changed))
    assert "run.root=DIR" in caught.value.hint
    with pytest.raises(ConfigError, match="fp32 has other overrides or seeds"):
        require_same_arms(sweep, recipe_points(recipe_of(), ["train.epochs=3"]))
    with pytest.raises(ConfigError, match=r"s2\^0 was removed"):
        require_same_arms(sweep, points[:2])


def test_a_recipe_is_found_by_name_folder_or_file(recipe_of, tmp_path, monkeypatch):
    recipe = recipe_of()
    assert find_recipe(str(tmp_path / "mine")) == recipe
    assert find_recipe(str(tmp_path / "mine" / "recipe.yaml")) == recipe
    monkeypatch.chdir(tmp_path)
    assert find_recipe("mine").path == recipe.path
    assert find_recipe("two_cliffs").name == "two_cliffs"
    with pytest.raises(UsageError, match="no recipe 'two_clif'") as caught:
        find_recipe("two_clif")
    assert caught.value.hint == "did you mean two_cliffs?"
    with pytest.raises(UsageError, match=r"without a recipe\.yaml"):
        find_recipe(".")


@pytest.mark.workload
@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("smoke", [False, True])
def test_every_recipe_that_comes_with_mptrain_is_sound_and_its_words_compose(name, smoke):
    recipe = find_recipe(name)
    composer = Composer()
    for point in recipe_points(recipe, smoke=smoke):
        if point.varied[-1] == f"seed={recipe.seeds[0]}":  # the others differ in nothing else
            assert composer.compose(point.overrides).seed == recipe.seeds[0]
    if recipe.start:
        assert composer.compose(start_of(recipe, smoke=smoke).overrides).seed == recipe.seeds[0]


def test_reading_recipes_imports_no_torch():
    code = (
        "import sys; from mptrain.study.recipe.catalogue import *; recipe_points(find_recipe('two_cliffs')); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


@each("name", recipe_names())
def test_title_and_claim_are_those_of_the_recipes_page(name):
    recipe = find_recipe(name)
    page = (recipe.path.parent / "README.md").read_text().replace("`", "")
    assert page.startswith(f"# {recipe.title}\n")
    claim = " ".join(page.partition("**Claim.**")[2].partition("\n\n")[0].split())
    assert claim
    assert recipe.claim.startswith(claim.rstrip("."))
