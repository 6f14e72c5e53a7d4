"""Short names of the checks run the commands of .ci/run."""

from __future__ import annotations

import re
import shlex

import yaml

from tests.docs.pages import ROOT

CHECKS = (ROOT / ".ci/run").read_text().splitlines()
TARGETS = {
    name: lines.strip().split("\n\t")
    for name, lines in re.findall(r"^(\w+):\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
}


def test_make_runs_the_commands_of_the_checks():
    assert TARGETS["check"] == CHECKS[CHECKS.index("ruff check .") : CHECKS.index("lint-imports") + 1]
    assert TARGETS["test"] == ["pytest"]
    assert "pytest" in CHECKS


def test_the_tests_of_times_are_where_the_checks_look_for_them():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"\bmark\.timing\b", path.read_text())]
    (command,) = (line.partition("#")[0].split() for line in CHECKS if line.startswith("pytest -m timing"))
    assert marked
    assert all(path.is_relative_to(ROOT / command[-1]) for path in marked)


def test_make_builds_the_site_that_its_own_file_describes():
    (command,) = TARGETS["docs"]
    assert command in (ROOT / "docs/site/mkdocs.yml").read_text()


def test_a_commit_is_judged_by_the_linters_of_the_checks():
    (source,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    programs = [shlex.split(hook["entry"])[:2] for hook in source["hooks"]]
    assert programs == [line.split()[:2] for line in CHECKS if line.startswith("ruff ")]
