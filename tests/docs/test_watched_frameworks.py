"""The programs of docs/watch-frameworks.md run with the libraries that they name, and print what the page shows."""

from __future__ import annotations

import ast
import math
import re
import shlex
import subprocess
import sys

import pytest

from tests.docs.pages import PAGES, blocks
from tests.small_runs import environment

NAME = "docs/watch-frameworks.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGES[NAME], flags=re.DOTALL))
SHOWN = {re.search(r"(\w+)\.py", block)[1]: block for block in blocks(NAME)}
LIBRARIES = {"with_accelerate": "accelerate", "with_trainer": "transformers"} | dict.fromkeys(
    ("with_lightning", "with_fabric"), "lightning"
)
PROGRAMS = [pytest.param(name, marks=pytest.mark.process) for name in ("plain", "with_accelerate", "with_trainer")] + [
    pytest.param(name, marks=pytest.mark.workload)
    for name in ("with_lightning", "with_fabric", "with_ddp", "with_fsdp2")
]

#: A number with a fraction; its last digits depend on the CPU.
FRACTION = r"\d+\.\d+(?:e-\d+)?"


def output_of(shown, folder):
    """Return what a command that is shown prints."""
    program, *words = shlex.split(shown)
    module = ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []
    command = [sys.executable, *module, *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_is_shown(name, tmp_path):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    for file, code in FILES.items():
        (tmp_path / file).write_text(code)
    for command, text in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", SHOWN[name], re.MULTILINE):
        said, expected = output_of(command, tmp_path), text.splitlines()
        if expected[:1] == ["..."]:  # what the framework itself prints
            expected = expected[1:]
            said = said[-len(expected) :]
        assert re.split(FRACTION, "\n".join(said)) == re.split(FRACTION, "\n".join(expected))
        numbers = [[float(one) for one in re.findall(FRACTION, "\n".join(lines))] for lines in (said, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02)


def test_the_record_of_the_trainer_shows_no_skip_and_a_rate_that_moved_and_ours_says_so():
    text = SHOWN["with_trainer"]
    logged = ast.literal_eval(re.search(r"steps: (.*)", text)[1])
    assert all(math.isfinite(value) for value in logged.values())
    assert not re.search("skip|overflow", str(logged))
    moves = [ast.literal_eval(found) for found in re.findall(r"schedule_moved (.*)", text)]
    assert logged["learning_rate"] < moves[-1]["to_lr"] < moves[0]["from_lr"]
    assert text.count("overflow {'skipped': True") == len(moves) == 2
    assert "['last.weight', 'inf']" in text


def test_each_program_is_shown_with_at_most_six_lines_of_ours():
    programs = FILES.keys() - {"parts.py", "show.py"}
    assert programs == {f"{name}.py" for name in SHOWN}
    assert all(1 <= FILES[name].count("# ours") <= 6 for name in programs)
