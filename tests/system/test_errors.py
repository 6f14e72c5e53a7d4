"""Errors: the exit codes that scripts rely on, and messages made for people."""

from __future__ import annotations

import inspect
import pickle

import pytest

from mptrain.system import errors
from mptrain.system.errors import ConfigError, MptrainError, Preempted, Problem, StorageError, did_you_mean, near_names
from tests.loops import each

EXIT_CODES = {
    "MptrainError": 1,
    "UsageError": 2,
    "ConfigError": 2,
    "FirstBatchError": 2,
    "EnvironmentRefused": 3,
    "NumericsError": 4,
    "DataError": 6,
    "UnusableSample": 6,
    "StorageError": 6,
    "CheckpointError": 6,
    "OtherVersion": 6,
}


@each(("name", "code"), EXIT_CODES.items())
def test_each_error_class_has_its_documented_exit_code(name, code):
    assert getattr(errors, name).exit_code == code


def test_the_drawn_tree_names_every_class_with_its_base_and_code():
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MptrainError)]
    drawing = {line.strip("│├└─ ").split(" ")[0]: line for line in errors.__doc__.splitlines()}
    for kind in classes:
        name = kind.__name__
        assert name in drawing, f"draw {name} in the docstring of mptrain/system/errors.py"
        if kind is not Preempted:
            assert f"({kind.exit_code})" in drawing[name], (
                f"draw {name} with ({kind.exit_code}) in mptrain/system/errors.py"
            )
        if kind is not MptrainError:
            parent = kind.__base__.__name__
            inside = drawing[parent].index(parent) < drawing[name].index(name)
            assert inside, f"draw {name} below {parent} in the docstring of mptrain/system/errors.py"
    names = {kind.__name__ for kind in classes} - {"Preempted"}
    missing, gone = sorted(names - set(EXIT_CODES)), sorted(set(EXIT_CODES) - names)
    assert not missing, f"add {missing} to EXIT_CODES in tests/test_errors.py"
    assert not gone, f"mptrain/system/errors.py has no {gone}: take it out of EXIT_CODES in tests/test_errors.py"


def test_notes_are_the_hints_as_they_are_now_and_what_others_add():
    error = ConfigError([Problem("a", "write 2"), Problem("b"), Problem("c", "write 3"), Problem("d", "write 2")])
    assert error.__notes__ == ["hint: write 2", "hint: write 3"]
    error.hint = "write 2; the model is as it was"
    vars(error)["notes"].append("in epoch 3")  # as add_note does, from Python 3.11 on
    assert error.__notes__ == ["hint: write 3", "hint: write 2; the model is as it was", "in epoch 3"]
    again = pickle.loads(pickle.dumps(StorageError("x", "y")))
    assert (again.__notes__, StorageError("x").__notes__) == (["hint: y"], [])


def test_a_config_error_keeps_every_problem_in_order():
    error = ConfigError([Problem("a=1 is too small", "write 2"), Problem("b=x is no number")])
    assert [problem.what for problem in error.problems] == ["a=1 is too small", "b=x is no number"]
    assert str(error) == "a=1 is too small; b=x is no number"
    assert error.hint == "write 2"
    assert ConfigError("a is wrong", "mend it").problems == (Problem("a is wrong", "mend it"),)
    assert ConfigError(Problem("a is wrong", "mend it")).problems == (Problem("a is wrong", "mend it"),)
    assert (Preempted("SIGTERM at step 3", "", 130).exit_code, StorageError("x", "y").hint) == (130, "y")


@pytest.mark.parametrize(("word", "answer"), [("trian", "train"), ("amp_dynamc", "amp_dynamic"), ("zzz", ""), ("", "")])
def test_a_close_word_is_suggested_and_a_far_one_is_not(word, answer):
    assert did_you_mean(word, ["train", "resume", "amp_dynamic"]) == answer


MODES = ["amp_bf16", "amp_dynamic", "amp_static", "bf16", "bf16_pure", "fp16_dynamic", "fp16_static", "fp32", "tf32"]


@each(
    ("word", "names"),
    [
        ("fp16", ["fp16_dynamic", "fp16_static"]),  # not bf16, which is as near by spelling
        ("bf16_amp", ["amp_bf16"]),
        ("AMP-BF16", ["amp_bf16"]),
        ("fp16dynamic", ["fp16_dynamic"]),
        ("dynamic", ["amp_dynamic", "fp16_dynamic"]),
        ("amp_dynamc", ["amp_dynamic"]),
        ("t", []),
        ("--", []),
    ],
)
def test_near_names_are_of_the_family_before_they_are_of_the_spelling(word, names):
    assert near_names(word, MODES) == names
