"""What the README shows is what a user sees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_runs import run_command

from mptrain.config.compose import compose
from mptrain.errors import ConfigError

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
SHOWN = next(block for block in BLOCKS if block.count("\n") > 10)


def shape(text):
    """Lines without what differs from run to run and from machine to machine: numbers, names, the device."""
    lines = []
    for line in text.splitlines():
        if line.startswith("step="):
            continue  # one every few seconds: how many there are depends on the machine
        timeless = re.sub(r"^(  device +\S+).*", r"\1", re.sub(r"outputs/\S+", "RUN", line))
        lines.append(re.sub(r"[\d.,:]+( [kMG]B)?", "#", timeless).rstrip())
    return lines


def test_the_run_that_is_shown_looks_like_a_run(tmp_path):
    first, _, output = SHOWN.partition("\n")
    words = first.removeprefix("$ mptrain ").split()
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shape(done.stdout) == shape(output)


COMMANDS = [
    line.split("#")[0].split()[2:] for block in BLOCKS for line in block.splitlines() if line.startswith("$ mptrain")
]


@pytest.mark.parametrize("words", [words for words in COMMANDS if words and "=" in words[0]], ids=" ".join)
def test_the_commands_that_are_shown_are_valid(words):
    assert compose(words).precision.name in README


def test_every_precision_mode_is_in_the_table():
    from mptrain.config import location

    modes = {path.stem for path in (location.configs() / "precision").glob("*.yaml")}
    assert modes <= set(re.findall(r"`(\w+)`", README))


def test_an_invalid_command_would_be_noticed():
    with pytest.raises(ConfigError):
        compose(["precision=amp_dynamc"])
