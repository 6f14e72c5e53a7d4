"""The list of planted faults fits the present tree, and the script tells faults that are found from faults that are not."""

from __future__ import annotations

import ast

import pytest

from tests.planted_faults.__main__ import ANSWERS, Answer, compare, misplaced, read, write
from tests.planted_faults.faults import FAULTS, Fault
from tests.planted_faults.mapping import BESIDES, ROOT, stages_of


def test_the_text_of_every_fault_occurs_once_in_its_file():
    assert not misplaced(FAULTS)


def test_a_fault_whose_text_has_gone_or_occurs_twice_is_named(tmp_path):
    (tmp_path / "mptrain").mkdir()
    (tmp_path / "mptrain" / "one.py").write_text("a = 1\na = 1\n")
    faults = [
        Fault(1, "one.py", "a = 1", "a = 2", "x"),
        Fault(2, "one.py", "b", "c", "y"),
        Fault(3, "no.py", "a", "b", "z"),
    ]
    twice, gone, missing = misplaced(faults, tmp_path)
    assert twice == "fault 1 (x), mptrain/one.py: its text occurs 2 times, not once: a = 1"
    assert gone == "fault 2 (y), mptrain/one.py: its text occurs 0 times, not once: b"
    assert missing == "fault 3 (z), mptrain/no.py: there is no such file"


def test_every_faulty_file_compiles_and_is_another_program():
    for fault in FAULTS:
        text = (ROOT / "mptrain" / fault.file).read_text(encoding="utf-8")
        changed = ast.parse(text.replace(fault.old, fault.new))
        assert ast.dump(changed) != ast.dump(ast.parse(text)), fault.number


def test_there_are_enough_faults_in_all_packages():
    assert len(FAULTS) >= 60
    assert len({fault.number for fault in FAULTS}) == len(FAULTS)
    packages = {path.parent.name for path in (ROOT / "mptrain").glob("*/__init__.py")}
    assert packages <= {fault.file.partition("/")[0] for fault in FAULTS}


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
    assert besides[0] == f"tests/{BESIDES['optimizer'][0]}"


@pytest.mark.parametrize("after", ANSWERS)
def test_comparing_names_what_was_found_before_and_is_not_after(tmp_path, capsys, after):
    write(tmp_path / "a.json", [Answer(1, "default", "tests/t.py::x"), Answer(2, "beyond the default")])
    write(tmp_path / "b.json", [Answer(1, after), Answer(2, "default")])
    worse = compare(read(tmp_path / "a.json"), read(tmp_path / "b.json"))
    said = capsys.readouterr().out
    assert worse == (after != "default")
    assert ("1: found by default before (tests/t.py::x)" in said) == (after != "default")
    assert "2:" not in said
