"""Options and recipes are copied to be edited: they work when chosen, and nothing is replaced."""

from __future__ import annotations

import shlex

import pytest
import yaml

from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import Composer
from mptrain.study.recipe.catalogue import find_recipe, recipe_names, recipe_points
from mptrain.system.errors import ConfigError

GROUPS = Catalogue([configs_folder()]).groups


def test_a_copied_option_is_edited_and_trained(terminal, tmp_path):
    assert terminal("copy", "model/mlp") == 0
    assert terminal.out.splitlines() == [
        "copied my_configs/model/my_mlp.yaml",
        "edit it, then: mptrain --config-dir my_configs model=my_mlp",
    ]
    path = tmp_path / "my_configs" / "model" / "my_mlp.yaml"
    text = path.read_text()
    assert text == (configs_folder() / "model" / "mlp.yaml").read_text()
    assert "hidden: [128, 128, 128]" in text
    path.write_text(text.replace("hidden: [128, 128, 128]", "hidden: [24]"))
    assert terminal(*shlex.split(terminal.out.splitlines()[1].partition("mptrain ")[2])) == 0
    (config,) = terminal.trained
    assert (config.chosen["model"], config.model.arguments["hidden"]) == ("my_mlp", (24,))


def test_a_copy_can_have_another_name_and_folder_and_states_its_name_in_records(terminal, tmp_path):
    assert terminal("copy", "precision/fp16_static=half", "conf dir") == 0
    assert terminal.out.endswith("edit it, then: mptrain --config-dir 'conf dir' precision=half\n")
    assert terminal("--config-dir", "conf dir", "precision=half") == 0
    assert terminal.trained[0].precision.name == "half"
    assert terminal.trained[0].chosen["scaler"] == "static"
    assert terminal("copy", "model/resnet18") == 0  # whose name is that of torchvision's function
    assert "  name: resnet18\n" in (tmp_path / "my_configs/model/my_resnet18.yaml").read_text()


@pytest.mark.long
def test_a_copied_option_of_each_group_means_the_same(terminal, tmp_path):
    require_the_same([(group, list(options)[-1]) for group, options in GROUPS.items()], terminal, tmp_path)


@pytest.mark.workload
def test_every_copied_option_means_the_same(terminal, tmp_path):
    require_the_same([(group, option) for group in GROUPS for option in GROUPS[group]], terminal, tmp_path)


def require_the_same(chosen, terminal, tmp_path):
    for group, option in chosen:
        assert terminal("copy", f"{group}/{option}", "conf") == 0, (group, option)
    ours, both = Composer(), Composer([tmp_path / "conf"])
    compared = set()
    for group, option in chosen:
        try:
            expected = yaml.safe_load(ours.compose([f"{group}={option}"]).yaml)
        except ConfigError:  # such an option needs more words
            with pytest.raises(ConfigError):
                both.compose([f"{group}=my_{option}"])
            continue
        copied = yaml.safe_load(both.compose([f"{group}=my_{option}"]).yaml)
        assert copied["chosen"].pop(group) == f"my_{option}"
        expected["chosen"].pop(group)
        if group in ("precision", "dataset") and expected[group].get("name") == option:
            expected[group]["name"] = f"my_{option}"
        assert copied == expected, (group, option)
        compared.add(group)
    assert compared == set(GROUPS)


def test_every_copied_recipe_has_the_same_runs(terminal, tmp_path):
    for name in recipe_names():
        assert terminal("copy", name) == 0
        assert terminal.out.endswith(f"edit it, then: mptrain reproduce my_recipes/my_{name}\n")
        copied = find_recipe(str(tmp_path / "my_recipes" / f"my_{name}"))
        assert recipe_points(copied) == recipe_points(find_recipe(name)), name
    assert terminal("reproduce", "my_recipes/my_two_cliffs", "--dry-run") == 0
    assert terminal.out.startswith("my_two_cliffs: ")


def test_nothing_is_replaced(terminal, tmp_path):
    assert terminal("copy", "model/mlp") == terminal("copy", "two_cliffs=mine", ".") == 0
    path = tmp_path / "my_configs" / "model" / "my_mlp.yaml"
    path.write_text("mine")
    (tmp_path / "mine" / "recipe.yaml").write_text("mine")
    for words, exists in ((("model/mlp",), "my_configs/model/my_mlp.yaml"), (("two_cliffs=mine", "."), "mine")):
        assert terminal("copy", *words) == 2
        assert terminal.err.startswith(f"error: {exists} exists, and copy replaces nothing\nhint: choose another name")
    assert path.read_text() == (tmp_path / "mine" / "recipe.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=mlp", "write mptrain copy model/OPTION"),
        ("modl/mlp", "did you mean model/mlp?"),
        ("model/mlp=../x", "'../x' cannot be the name of a copy"),
        ("model/mlp=", "'' cannot be the name of a copy"),
        ("../model/mlp", "there is no option ../model/mlp"),
    ],
)
def test_wrong_words_end_with_2_and_leave_nothing(terminal, tmp_path, word, said):
    assert terminal("copy", word) == 2
    assert said in terminal.err
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_ends_with_6(terminal, tmp_path):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model").write_text("no folder")
    for folder in ("file", "conf"):
        assert terminal("copy", "model/mlp", folder) == 6
        assert "choose another folder" in terminal.err
