"""What the parts of a command line become; what is wrong with one stands in messages.txt."""

import pytest

from mptrain.cli.command_line import command_first, parse
from mptrain.cli.commands import COMMANDS
from mptrain.system.errors import ConfigError
from tests.docs.pages import PAGES, commands
from tests.loops import each


def parsed(*words):
    first, *rest = command_first(list(words))
    return parse(COMMANDS[first], rest) if first in COMMANDS else parse(COMMANDS["train"], [first, *rest])


def test_options_are_told_apart_in_any_order_and_the_last_counts():
    found = parsed("a=1", "-m", "--config-dir", "x", "+b.c=2", "-cd=y", "~model", "x=-3", "--config-name=z")
    assert found.overrides == ["a=1", "+b.c=2", "~model", "x=-3"]
    assert (found.multirun, found.config_dir, found.config_name) == (True, ["x", "y"], "z")
    assert not found.words
    found = parsed("-m", "--jobs", "2", "--jobs=3", "-cn", "a", "-cn=b")
    assert (found.jobs, found.config_name) == (3, "b")
    assert parsed("-m").jobs is None
    assert not parsed("-m", "-r").multirun
    assert parsed("-r", "-m").multirun


@each(
    ("words", "info", "overrides"),
    [
        (("--info", "defaults", "a=1"), "defaults", ["a=1"]),
        (("--info", "a=1"), "all", ["a=1"]),
        (("-i", "--resolve"), "all", []),
        (("--info=plugins",), "plugins", []),
    ],
)
def test_an_option_may_go_without_its_value(words, info, overrides):
    found = parsed(*words)
    assert (found.info, found.overrides) == (info, overrides)


@each(
    ("words", "values"),
    [
        (("diagnose", "run", "--step", "7", "a=1"), {"words": ["run"], "overrides": ["a=1"], "step": 7}),
        (("diagnose", "a=1"), {"words": [], "overrides": ["a=1"], "step": None, "all": False}),
        (("eval", "a=1", "--best", "run", "b=2"), {"words": ["run"], "overrides": ["a=1", "b=2"], "best": True}),
        (("compare", "x", "y", "--margin=0.5"), {"words": ["x", "y"], "margin": 0.5}),
        (("--jobs", "2", "compare", "a=1,2"), {"overrides": ["a=1,2"], "jobs": 2}),
        (("help", "precision=fp32"), {"words": ["precision=fp32"]}),
        (("--config-dir", "list", "list", "model"), {"words": ["model"], "config_dir": ["list"]}),
    ],
)
def test_a_command_has_its_own_words_and_options(words, values):
    found = vars(parsed(*words))
    assert {name: found[name] for name in values} == values


def test_a_folder_of_a_run_may_be_named_after_overrides(tmp_path, monkeypatch):
    (tmp_path / "0_seed=1").mkdir()
    monkeypatch.chdir(tmp_path)
    found = parsed("resume", "0_seed=1", "train.epochs=3")
    assert (found.words, found.overrides) == (["0_seed=1"], ["train.epochs=3"])
    (tmp_path / "0_seed=1.log").touch()  # SWEEP/0* matches it too; compare leaves it out
    assert parsed("compare", "0_seed=1", "0_seed=1.log").words == ["0_seed=1", "0_seed=1.log"]


@pytest.mark.parametrize("word", ["--job", "--config", "--multi", "-cdmine", "-mr"])
def test_no_option_is_abbreviated_or_joined(word):
    with pytest.raises(ConfigError, match="unknown option"):
        parsed(word, "2")


@each("name", sorted(PAGES))
def test_every_command_of_the_documentation_can_be_parsed(name):
    for program, *words in commands(name):
        if program == "mptrain" and "--help" not in words:
            parsed(*(words or ["train"]))
