"""Functions that take any keywords: what a data set knows is passed to them where ``model.facts`` says so."""

from __future__ import annotations

import pytest
import torch

from mptrain.config.compose import compose, reload
from mptrain.run.build.parts import build
from mptrain.system.errors import ConfigError

MODULE = """
from torch import nn

def picky(**kwargs):
    if kwargs:
        raise TypeError(f"unexpected keywords {sorted(kwargs)}")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def strict(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def wide(width, num_classes):
    return strict(num_classes)

def renamed(n_classes, **kwargs):
    return nn.Sequential(nn.Flatten(), nn.Linear(kwargs["chans"] * 64, n_classes))

def needy(**kwargs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, kwargs["num_classes"]))
"""


@pytest.fixture(autouse=True)
def _package(tmp_path, monkeypatch):
    (tmp_path / "keyword_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def words(name, *more):
    return ["~model.widths", f"model._target_=keyword_models.{name}", "extensions.allow=[keyword_models]", *more]


def test_a_function_that_rejects_keywords_builds_and_the_run_says_how_to_pass_some():
    parts, _ = build(compose(words("picky")))
    assert (
        "add model.facts=[...] with the ones that it needs among num_classes, num_outputs, in_channels"
        in parts.warnings[0]
    )
    assert not any("model.facts" in warning for warning in build(compose(words("picky", "model.facts=[]")))[0].warnings)


def test_facts_are_passed_under_the_names_that_the_function_has_and_a_saved_run_knows_them():
    config = compose(words("renamed", "model.facts={n_classes: num_classes, chans: in_channels}"))
    again = reload(config.yaml, allow=["keyword_models"])
    assert again.model.facts == {"n_classes": "num_classes", "chans": "in_channels"}
    for one in (config, again):
        parts, _ = build(one)
        assert parts.model[1].weight.shape == (10, 64)
        assert not any("model.facts" in warning for warning in parts.warnings)


def test_a_function_that_misses_a_fact_is_answered_with_the_words_that_pass_it():
    with pytest.raises(ConfigError, match="KeyError: 'num_classes'") as caught:
        build(compose(words("needy")))
    assert caught.value.hint == "model.facts=[num_classes] passes it what the data set knows"
    parts, _ = build(compose(words("needy", "model.facts=[num_classes]")))
    assert parts.model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_facts_that_the_data_set_lacks_and_values_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="needs vocabulary_size, which dataset=digits does not have"):
        build(compose(words("needy", "model.facts=[vocabulary_size]")))
    for wrong in ("3", "[1]", "{n_classes: 3}"):
        with pytest.raises(ConfigError, match=r"model.facts=.*: must be a list of facts"):
            compose(words("needy", f"model.facts={wrong}"))


def test_a_key_of_another_model_is_passed_to_a_function_that_takes_any_keywords(tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "any.yaml").write_text("_target_: keyword_models.picky\n")
    own = ["model=any", "extensions.allow=[keyword_models]"]
    with pytest.raises(ConfigError) as caught:
        compose([*own, "model.depth=3"], config_dirs=[tmp_path / "mine"])
    assert caught.value.hint == "set +model.depth=3 to pass it to keyword_models.picky"
    config = compose([*own, "+model.depth=3"], config_dirs=[tmp_path / "mine"])
    assert config.model.arguments == {"depth": 3}
    with pytest.raises(ConfigError, match=r"unknown key 'model\.depth'") as caught:
        compose(["model.depth=3", *words("picky")])
    assert caught.value.hint == "set +model.depth=3 to pass it to keyword_models.picky"


def test_a_function_typed_as_the_target_is_answered_once_for_all_keys_of_the_model_it_replaces():
    with pytest.raises(ConfigError) as caught:
        compose(words("strict")[1:])
    [problem] = caught.value.problems
    assert problem.what == "model._target_=keyword_models.strict does not take model.widths of the chosen model"
    assert "save DIR/model/NAME.yaml with '_target_: keyword_models.strict'" in problem.hint
    assert problem.hint.endswith("; or add ~model.widths")
    assert compose(words("strict")).model.path == "keyword_models.strict"
    with pytest.raises(ConfigError) as caught:
        compose(words("wide"))
    assert caught.value.hint.startswith("set +model.width=VALUE; the data set passes num_classes")


def test_keys_below_an_empty_mapping_of_a_model_are_open_and_others_are_not():
    config = compose(["model=timm", "model.arguments.drop_rate=0.1"])
    assert config.model.arguments["arguments"] == {"drop_rate": 0.1}
    with pytest.raises(ConfigError, match=r"unknown key 'model.argument.drop_rate'"):
        compose(["model=timm", "model.argument.drop_rate=0.1"])
