"""A recipe is checked completely before any run and expands to plain command lines."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from loops import each
from small_runs import environment

from mptrain.config.compose import Composer
from mptrain.errors import ConfigError, UsageError
from mptrain.recipe.catalogue import check_own_words, find_recipe, recipe_names, recipe_points, require_same_arms
from mptrain.recipe.recipe import RESERVED, read_recipe
from mptrain.runlog.sweeps import Sweep, SweepJob

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
  - s2^0.top1 < fp32.top1 by 0.5
  - s2^0.skip_rate > 0.95
  - sum.value = 2^11 within 0
arithmetic:
  sum: {_target_: mptrain.numerics.demonstrations.sequential_sum, dtype: float16, terms: 5000}
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
    assert [one.text for one in found.expectations][1] == "s2^0.skip_rate > 0.95"
    assert found.arithmetic["sum"].arguments == {"dtype": "float16", "terms": 5000}


def test_every_problem_is_reported_at_once(recipe_of):
    text = """
    titel: Mine
    claim: ""
    base: [model=mlp, novalue, seed=3]
    arms: {fp32: [precision=fp32], "a b": [x=1], amp: precision=amp_dynamic}
    reference: fp23
    seeds: [0, -1]
    expect:
      - amp.top1 < fp32.top1 by x
      - amq.top1 < fp32.top1
      - amp.top1 = fp32.top1
    needs: {gpus: 3, minutes: 0}
    arithmetic: {fp32: {_target_: os.system, command: ls}, other: 3}
    """
    found = problems_of(recipe_of, text=textwrap.dedent(text))
    whats = [what for what, _ in found]
    for what, hint in [
        ("unknown key 'titel'", "did you mean title?"),
        ("title is missing", "add title:"),
        ("source is missing", "add source:"),
        ("unknown key 'needs.gpus'", "did you mean needs.gpu?"),
        (
            "arithmetic.other names no function",
            "write {_target_: mptrain.numerics.demonstrations.FUNCTION, KEY: VALUE}",
        ),
        ("arithmetic.fp32: an arm has the same name", "choose another name"),
    ]:
        assert (what, hint) in found
    assert any(what.startswith("seeds: [0,-1] must be a list") for what in whats)
    assert any(what.startswith("needs.minutes: 0 must be a number above 0") for what in whats)
    assert any(what.startswith("arms.a b: a name may only have") for what in whats)
    assert any(what.startswith("arms.amp: precision=amp_dynamic must be a list") for what in whats)
    assert any("'os.system' is not in mptrain.numerics.demonstrations" in what for what in whats)


def test_words_statements_and_plan_are_checked_together(recipe_of):
    found = problems_of(
        recipe_of,
        ("[model=mlp]", "[model=mlp, novalue, 'train.epochs=1,2']"),
        ("reference: fp32", "reference: fp23"),
        ("seeds: [0, 1]", "seeds: [0, 0]"),
        ("margin: 0.03", ""),
        ("by 0.5", "within 0.5"),
        ("s2^0.skip_rate", "s2^1.skip_rate"),
        ("2^11 within 0", "2^11"),
    )
    assert found == [
        ("base: 'novalue' is not of the form KEY=VALUE", "write for example train.epochs=3"),
        ("base: train.epochs=1,2: several values for one key", "make an arm for each value"),
        ("reference: there is no arm 'fp23'", "did you mean fp32?"),
        ("seeds: [0,0] has a duplicate", "list each seed once"),
        ("margin is missing", "set it to the largest difference in the metric that counts as equivalent"),
        ("expect: 's2^0.top1 < fp32.top1 within 0.5': '<' must be used with 'by', not with 'within'", "write by 0.5"),
        ("expect: 's2^1.skip_rate > 0.95': there is no arm 's2^1'", "did you mean s2^0?"),
        ("expect: 'sum.value = 2^11': '=' needs a tolerance", "add: within AMOUNT"),
    ]


@each("key", sorted(RESERVED))
def test_a_recipe_cannot_say_what_is_the_users_to_say(recipe_of, key):
    word = f"{key}=3" if key == "seed" else f"{key}.name=x"
    [(what, _)] = problems_of(recipe_of, ("model=mlp", f"model=mlp, +{word}"))
    assert what == f"base: '+{word}' is not allowed in a recipe: {RESERVED[key]}"


@pytest.mark.parametrize(
    "target", ["os.system", "mptrainer.x", "mptrain.cli.main.main", "mptrain.numerics.formats.scale_in_words"]
)
def test_a_strangers_recipe_calls_nothing_but_demonstrations(recipe_of, target):
    [(what, _)] = problems_of(recipe_of, ("mptrain.numerics.demonstrations.sequential_sum", target))
    assert what == f"arithmetic.sum: _target_ '{target}' is not in mptrain.numerics.demonstrations.*"


def test_nothing_leads_out_of_mptrain_through_what_it_imports(recipe_of):
    recipe = recipe_of(("demonstrations.sequential_sum", "demonstrations.torch.load"))
    with pytest.raises(ConfigError, match="demonstrations"):
        recipe.arithmetic["sum"].check("arithmetic.sum")


def test_interpolations_in_a_recipe_are_not_evaluated(recipe_of, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    assert recipe_of(("title: Mine", "title: ${oc.env:SECRET}")).title == "${oc.env:SECRET}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "not a mapping"),
        ("title: [x\n", "is not YAML"),
        ("title: a\ntitle: b\n", "title"),
        ("title: ${oops\n", "oops"),
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
    assert [what.partition(" ")[0] for what, _ in found] == ["title", "base:"]


def test_one_arm_alone_is_no_comparison(recipe_of):
    found = problems_of(recipe_of, ("  s2^0: [precision=fp16_static, scaler.scale=1]\n", ""))
    assert ("there is only one arm", "add the arms to compare it with") in found


def test_an_arm_with_a_wrong_name_is_still_an_arm(recipe_of):
    found = problems_of(recipe_of, ("  s2^0: [", "  s 2: ["))
    told = [what for what, _ in found]
    assert "arms.s 2: a name may only have letters, digits, _ - and ^" in told
    assert "there is only one arm" not in told


def test_arithmetic_alone_is_a_recipe(recipe_of):
    text = """
    title: t
    claim: c
    source: s
    arithmetic: {sum: {_target_: mptrain.numerics.demonstrations.sequential_sum}}
    expect: [sum.value = 2048 within 0]
    """
    found = recipe_of(text=textwrap.dedent(text))
    assert recipe_points(found) == []
    assert problems_of(recipe_of, text="title: t\nclaim: c\nsource: s\n") == [
        ("there is nothing to run: no arms and no arithmetic", "add arms: {fp32: [precision=fp32], ...}")
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


def test_groups_repeat_all_arms(recipe_of):
    recipe = recipe_of(("arms:\n", "groups: {sgd: [optimizer=sgd], adam: [optimizer=adam]}\narms:\n"))
    points = recipe_points(recipe)
    assert [point.arm for point in points[::2]] == ["sgd/fp32", "sgd/s2^0", "adam/fp32", "adam/s2^0"]
    assert points[0].overrides == ("model=mlp", "optimizer=sgd", "precision=fp32", "seed=0")
    assert [one.text for one in recipe.expectations][:2] == [
        "sgd: s2^0.top1 < fp32.top1 by 0.5",
        "adam: s2^0.top1 < fp32.top1 by 0.5",
    ]
    assert len(recipe.expectations) == 5


def test_a_smoke_run_has_one_seed_and_words_that_outdo_those_of_arms(recipe_of):
    recipe = recipe_of(("[precision=fp32]", "[precision=fp32, train.max_steps=500]"))
    points = recipe_points(recipe, smoke=True)
    assert [point.overrides for point in points] == [
        ("model=mlp", "precision=fp32", "train.max_steps=500", "train.max_steps=2", "seed=0"),
        ("model=mlp", "precision=fp16_static", "scaler.scale=1", "train.max_steps=2", "seed=0"),
    ]


def test_the_users_words_keep_the_place_apart(recipe_of):
    assert check_own_words(recipe_of(), ["train.epochs=3", "run.root=/data/x", "extensions.allow=[mine]"]) == (
        ["train.epochs=3", "extensions.allow=[mine]"],
        "/data/x",
    )
    assert check_own_words(recipe_of(), []) == ([], "outputs")


def test_the_users_words_cannot_change_what_arms_vary(recipe_of):
    with pytest.raises(ConfigError, match=r"'precision=fp32': \w+ varies precision"):
        check_own_words(recipe_of(), ["precision=fp32", "train.epochs=1"])


def test_the_users_words_cannot_change_what_the_recipe_decides(recipe_of):
    with pytest.raises(ConfigError) as caught:
        check_own_words(recipe_of(), ["seed=1", "run.name=x", "train.epochs=1,2", "nothing"])
    whats = [problem.what for problem in caught.value.problems]
    assert whats == [
        "'seed=1' has no effect here: a recipe lists its seeds under seeds",
        "'run.name=x' has no effect here: mptrain chooses the run directories of a recipe",
        "train.epochs=1,2: several values for one key",
        "'nothing' is not of the form KEY=VALUE",
    ]


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
    for entry, target in recipe.arithmetic.items():
        target.check(f"arithmetic.{entry}")


def test_reading_recipes_imports_no_torch():
    code = (
        "import sys; from mptrain.recipe.catalogue import *; recipe_points(find_recipe('two_cliffs')); "
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
