"""The values that each option accepts, and what they become: a table that a change of the checks must not change.

``accepted_values.json`` has a row for each type of an option or an argument, with the accepted ones of `VALUES`. A value
that is converted has the result after an arrow. ``python tests/config/test_accepted_values.py`` writes the file anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import pytest
from annotated_types import MinLen
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.config.launcher import Launcher
from mptrain.config.schema import SECTIONS, GeneralOptions
from mptrain.config.value_checks import InvalidValueError, check_section, check_value, section_of
from mptrain.engine.options import EarlyStopping
from mptrain.optimizer.parameter_groups import ParameterGroup
from mptrain.study.sweep.comparisons import ComparisonOptions
from mptrain.system import fields as ranges

TABLE = Path(__file__).with_name("accepted_values.json")

NUMBERS = [0, 1, 2, -1, 8, 100_000, 2**53, 2**63 - 1, 2**63, 2**64, 10**20]
FRACTIONS = [0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -1.0, 1e3, 1e-8, 2.0**53, 1e300, math.nan, math.inf, -math.inf]
TEXTS = ["", " ", "1", "1.0", "1e3", "0x10", "true", "no", "null", "inf", "-inf", "nan", "auto", "cuda:1", "x/y"]
TEXTS += ["eager", "min", "slurm", "float16", "parameters", "never", "a b", "a\nb", "mypkg.*", "\udce9", "x" * 201]
LISTS = [[], [1], [1.0, 2], [0.5, 0.5], [0.5, 1.5], [True], [None], ["a"], ["a", 16], ["a", "b"], ["1", 2.0]]
LISTS += [[[1]], [math.nan], [{}], [1, 2, 3], ["norms", 1.5], [2**64]]
MAPPINGS = [{}, {"a": 1}, {"a": None}, {1: 2}, {"patience": 3}, {"a": ["b"]}]
VALUES = [None, True, False, *NUMBERS, *FRACTIONS, *TEXTS, *LISTS, *MAPPINGS]

SCHEMAS = {
    **SECTIONS,
    "general": GeneralOptions,
    "launcher": Launcher,
    "comparison": ComparisonOptions,
    "groups": ParameterGroup,
    "early_stopping": EarlyStopping,
}
FIELDS = {
    f"{name}.{key}": annotation
    for name, schema in SCHEMAS.items()
    for key, annotation in get_type_hints(schema, include_extras=True).items()
    if not section_of(annotation)
}
#: Types of arguments of models, data sets, optimizers and other parts.
ARGUMENTS = {
    **{name: kind for name, kind in vars(ranges).items() if name.endswith(("Int", "Float", "Fraction", "One", "Zero"))},
    "int": int,
    "float": float,
    "str": str,
    "path": Path,
    "path, or null": Path | None,
    "path, or text": str | Path,
    "path, or paths": Path | tuple[Path, ...],
    "int, or float": int | float,
    "float, or int": float | int,
    "float, or text": float | str,
    "text, or int": str | int,
    "channels": Literal[1, 3] | None,
    "augment": bool | Literal["randaugment", "trivial_augment"],
    "texts": Sequence[str],
    "texts, or null": Sequence[str] | None,
    "columns": tuple[str, str],
    "numbers": tuple[ranges.PositiveInt, ranges.PositiveInt],
    "betas": tuple[ranges.BelowOneOrZero, ranges.BelowOneOrZero],
    "floats": tuple[float, ...],
    "widths": Annotated[tuple[ranges.PositiveInt, ...], MinLen(1)],
    "any tuple": tuple,
    "list of ints": list[int],
    "lists": list[tuple[int, ...]],
    "any list": list,
    "mapping": dict[str, int],
    "any mapping": dict[str, Any] | None,
    "class": pytest.Item,
    "class, or float": pytest.Item | float,
    "class, or text": pytest.Item | str | None,
    "anything": Any,
}
KINDS = {**FIELDS, **ARGUMENTS}
#: Fields that are not read by themselves, or whose own checks need more than their type.
APART = {"launcher.word", "run.name", "run.root"}


def _accepts(annotation: Any, value: Any) -> tuple[bool, Any]:
    try:
        return True, check_value(value, annotation)
    except InvalidValueError:
        return False, None


def row(annotation: Any) -> list[str]:
    """The accepted values of a type, each with what it becomes unless it stays the same."""
    found = []
    for value in VALUES:
        accepted, converted = _accepts(annotation, value)
        if accepted:
            found.append(repr(value) + (f" -> {converted!r}" if repr(converted) != repr(value) else ""))
    return found


def table() -> dict[str, list[str]]:
    return {name: row(annotation) for name, annotation in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
def test_every_type_accepts_the_values_of_the_table(name):
    assert row(KINDS[name]) == json.loads(TABLE.read_text()).get(name)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(VALUES) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(FIELDS.keys() - APART)), anything)
def test_a_section_accepts_the_values_that_its_fields_accept(name, value):
    section, _, key = name.partition(".")
    schema = SCHEMAS[section]
    problems: list[Any] = []
    found = check_section(section, {key: value}, schema, problems)
    accepted, converted = _accepts(FIELDS[name], value)
    assert accepted == all(not problem.what.startswith(f"{name}=") for problem in problems)
    if found is not None:
        assert repr(getattr(found, key)) == repr(converted)
        others = [
            one for one in dataclasses.fields(schema) if one.name != key and one.default is not one.default_factory
        ]
        assert all(getattr(found, one.name) == one.default for one in others if one.default is not dataclasses.MISSING)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(KINDS)), anything)
def test_a_converted_value_is_accepted_again_unchanged(name, value):
    accepted, converted = _accepts(KINDS[name], value)
    if accepted:
        assert _accepts(KINDS[name], converted) == (True, converted) or converted != converted


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in table().items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
