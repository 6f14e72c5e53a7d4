"""The list of planted faults fits the present tree, and the script tells faults that are found from faults that are not."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import subprocess
import sys
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from tests.planted_faults import __main__ as script
from tests.planted_faults.__main__ import ANSWERS, BEYOND, DEFAULT, NOTHING, Answer, compare, misplaced, read, write
from tests.planted_faults.faults import FAULTS, Fault
from tests.planted_faults.mapping import BESIDES, ROOT, stages_of


def test_the_text_of_every_fault_occurs_once_in_its_file():
    assert not misplaced(FAULTS)


def test_a_fault_whose_text_has_gone_or_occurs_twice_is_named(tmp_path):
    (tmp_path / "mptrain").mkdir()
    (tmp_path / "mptrain" / "one.py").write_text("a = 1\na = 1\n")
    wrong = [
        Fault(1, "one.py", "x", "a = 1", "a = 2"),
        Fault(2, "one.py", "y", "b", "c"),
        Fault(3, "no.py", "z", "a", "b"),
    ]
    for said, words in zip(
        misplaced(wrong, tmp_path), ("occurs 2 times", "occurs 0 times", "no such file"), strict=True
    ):
        assert words in said
    assert not misplaced([Fault(4, "one.py", "x", "1\na", "2")], tmp_path)


def test_every_faulty_file_compiles_and_is_another_program():
    for fault in FAULTS:
        text = (ROOT / "mptrain" / fault.file).read_text(encoding="utf-8")
        changed = ast.parse(text.replace(fault.old, fault.new))
        assert ast.dump(changed) != ast.dump(ast.parse(text)), fault.number


def test_there_are_enough_faults_in_all_packages():
    assert len(FAULTS) >= 60
    assert len({fault.number for fault in FAULTS}) == len(FAULTS)
    packages = {path.parent.name for path in (ROOT / "mptrain").glob("*/__init__.py")}
    missing = sorted(packages - {fault.file.partition("/")[0] for fault in FAULTS})
    assert not missing, f"add a fault to faults.FAULTS and a row to mapping.BESIDES for {missing}"
    missing = sorted({PurePosixPath(fault.file).parts[0].removesuffix(".py") for fault in FAULTS} - BESIDES.keys())
    assert not missing, f"add a row to mapping.BESIDES for {missing}"


def test_the_tests_that_look_at_a_fault_exist():
    for fault in FAULTS:
        stages = stages_of(fault)
        assert any(stages), fault.number
        missing = [path for stage in stages for path in stage if not (ROOT / path).is_file()]
        assert not missing, f"fault {fault.number}: name other tests in mapping.BESIDES or in the fault, for {missing}"
        assert sum(map(len, stages)) == len({path for stage in stages for path in stage})


def test_the_file_that_is_named_after_a_module_comes_first():
    fault = Fault(1, "optimizer/weights.py", "", "", "")
    named, folder, besides = stages_of(fault)
    assert named == ["tests/optimizer/test_weights.py"]
    assert "tests/optimizer/test_rules.py" in folder
    assert besides[0] == "tests/engine/test_step.py"


@pytest.mark.parametrize("after", [*ANSWERS, None])
def test_comparing_names_faults_that_are_found_less_well(tmp_path, capsys, after):
    write(tmp_path / "a.json", [Answer(1, "default", "tests/t.py::x"), Answer(2, "beyond the default")])
    write(tmp_path / "b.json", [Answer(2, "default"), *([Answer(1, after)] if after else [])])
    assert compare(read(tmp_path / "a.json"), read(tmp_path / "b.json")) == (after != "default")
    said = capsys.readouterr().out
    assert ("1: found by default before (tests/t.py::x)" in said) == (after != "default")
    assert "2:" not in said


def test_tests_beyond_the_default_are_not_the_slow_ones_and_have_their_own_time(monkeypatch):
    rounds, clock = [], itertools.count(0, 100)

    class Nothing:
        """A copy in which no test fails."""

        def planted(self, fault):
            return contextlib.nullcontext()

        def first_failure(self, *words, deadline):
            rounds.append((words, deadline))

    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert script._answer(FAULTS[0], Nothing(), "mapped", 240).found_by == NOTHING
    *default, (words, deadline) = rounds
    assert {at for _, at in default} == {240}
    assert deadline == 240 + 100 * len(default)
    expression = words[words.index("-m") + 1]
    taken = [(), ("process",), ("workload",), ("slow",), ("process", "slow")]
    assert [evaluated(expression, *markers) for markers in taken] == [False, True, True, False, False]
    assert [found_by for found_by, _ in script._rounds(FAULTS[0], "mapped")] == [DEFAULT] * len(default) + [BEYOND]


def evaluated(expression, *markers):
    """Whether pytest takes a test with some markers."""
    names = dict.fromkeys(re.findall(r"\w+", expression), False) | dict.fromkeys(markers, True)
    return eval(expression, names)


@pytest.mark.process
def test_the_script_finds_a_fault_in_a_copy_of_the_tree(tmp_path):
    command = [sys.executable, "-m", "tests.planted_faults", "--only", "69", "--json", tmp_path / "answers.json"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = read(tmp_path / "answers.json").values()
    assert (found.number, found.found_by, found.distrusted) == (69, DEFAULT, [])
    assert found.test.startswith("tests/study/comparison/test_ranking.py::")
