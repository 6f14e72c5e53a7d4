"""A sample of the fault campaign (`tests.faults`): whatever breaks a run, nothing is lost or wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_runs import environment

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


def campaign(*words, timeout, program="tests.faults"):
    """In a process of its own, because attempts are forked from it, and this one has run operators of torch."""
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        check=False, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("count", "seed"), [(8, 0), *(pytest.param(100, seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_no_fault_loses_or_spoils_anything(tmp_path, count, seed):
    output = campaign("--n", str(count), "--seed", str(seed), "--jobs", "2", "--keep", str(tmp_path), timeout=2900)
    assert output.startswith("| fault | cases |")
    assert f"| all | {count} |" in output


@pytest.mark.slow
@pytest.mark.timeout(7300)
def test_two_to_four_ranks_that_are_killed_or_stopped_go_on_in_every_bit():
    output = campaign("--times", "20", timeout=7200, program="tests.faults.ranks")
    assert output.count("identical after kill 20 of 20, sigterm 20 of 20") == 6


def test_a_case_depends_on_the_seed_and_its_number_alone():
    from tests.faults.drawing import KINDS, draw

    cases = [draw(5, number) for number in range(300)]
    assert draw(5, 17) == cases[17]
    assert draw(6, 17) != cases[17]
    assert {case.kind for case in cases} == KINDS.keys()
