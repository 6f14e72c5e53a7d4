"""YAML that would never end, or take minutes, is refused within seconds wherever a stranger's file is read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mptrain.cli.main import main
from mptrain.config.yaml_files import find_endless, find_unreadable, read_yaml
from mptrain.system.errors import ConfigError
from tests.small_runs import TINY

_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
HOSTILE = {
    "aliases of lists": _BOMB,
    "aliases of mappings": "a0: &a0 {k: v}\n"
    + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 40)),
    "merge keys": "a0: &a0 {k0: v}\n"
    + "".join(f"a{n}: &a{n}\n  k{n}: *a{n - 1}\n  <<: *a{n - 1}\n" for n in range(1, 40)),
    "an alias inside itself": "a: &a [*a]\n",
    "a merge of itself": "a: &a\n  <<: *a\n",
    "open brackets": "a: " + "[" * 50_000,
    "open braces": "a: " + "{b: " * 20_000,
    "closed brackets": "a: " + "[" * 40_000 + "]" * 40_000,
    "nested dashes": "a:\n" + "- " * 40_000 + "x",
    "nested lines": "".join(" " * n + f"k{n}:\n" for n in range(400)),
    "question marks": "? " * 40_000 + "x",
    "an integer": f"seed: {'7' * 5_000}\n",
    "a hexadecimal integer": f"seed: 0x{'f' * 20_000}\n",
    "a sexagesimal integer": f"seed: 1{':10' * 5_000}\n",
    "an octal integer": f"seed: 0{'7' * 5_000}\n",
    "an integer with underscores": f"seed: {'1_' * 5_000}0\n",
    "a long list": f"a: [{'x,' * 5_000_000}]\n",
    "long text": f"a: {'x' * 50_000_000}\n",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_yaml_is_refused_by_every_reader_within_seconds(tmp_path, kind):
    path = tmp_path / "group/option.yaml"
    path.parent.mkdir()
    path.write_text(HOSTILE[kind])
    began = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        read_yaml(HOSTILE[kind])
    assert "bug" not in str(caught.value)
    assert find_unreadable([path]) is not None
    assert find_endless([tmp_path]) is not None
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("kind", ["aliases of lists", "open brackets", "an integer", "nested dashes", "a long list"])
def test_commands_refuse_hostile_files_with_a_line_and_a_code(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own/model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(HOSTILE[kind])
    recipe = Path("strange/recipe.yaml")
    recipe.parent.mkdir()
    recipe.write_text(HOSTILE[kind])
    for words in ([*TINY, "--config-dir", "own"], ["reproduce", "strange"]):
        began = time.perf_counter()
        assert main(list(words)) in (2, 6), words
        assert time.perf_counter() - began < 5
        shown = capsys.readouterr().err
        assert "error: " in shown
        assert "bug in mptrain" not in shown


def test_commands_refuse_a_run_with_a_hostile_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "train.max_steps=1", "run.name=a"]) == 0
    config = Path("outputs/a/config.yaml").read_text()
    for kind in ("aliases of lists", "open brackets", "an integer", "nested lines"):
        Path("outputs/a/config.yaml").write_text(
            f"{HOSTILE[kind]}\n" if kind != "an integer" else config.replace("seed: 0", HOSTILE[kind])
        )
        for command in ("report", "eval", "resume", "replay", "export", "diagnose"):
            began = time.perf_counter()
            code = main([command, "outputs/a"])
            assert time.perf_counter() - began < 5, (kind, command)
            shown = capsys.readouterr()
            assert code in (0, 2, 6), (kind, command, shown)
            assert code != 0 or command == "report", (kind, command)
            assert "bug in mptrain" not in shown.err


@pytest.mark.parametrize(
    "text", ["a: &x [1, 2]\nb: *x\n", f"a: {'[' * 90}{']' * 90}", "digest: " + "ab12" * 16, "a: '[[[[' "]
)
def test_ordinary_yaml_is_read(text):
    assert read_yaml(text) is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: &y 1\nb: *x\n", "undefined alias"), ('a: "x\\ud800"\n', r"\\ud800 is half of a character|invalid Unicode")],
)
def test_an_alias_without_an_anchor_and_half_of_a_character_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        read_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[1, 2]", "a: 1e-3", "a: 1E5\nb: +1.e5\nc: -1_0e2\nd: 1e\ne: 12e-08", "a: 2024-01-02", "1.5: 3"),
        *("a: {1: 2}", "a: 1_000.5\nb: .5\nc: 1.", "a: +.inf\nb: .nan", "a: 0x1F\nb: 017\nc: yes\nd: ~", "a: ???"),
    ],
)
def test_yaml_has_the_values_that_omegaconf_reads(text):
    assert repr(read_yaml(text)) == repr(OmegaConf.to_container(OmegaConf.create(text), resolve=False))


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(ConfigError, match="line 2: found duplicate key a"):
        read_yaml("x:\n  a: 1\n  a: 2\n")
