"""Which operators of a step ran in which dtypes, and how often tensors were cast: a table out of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mptrain.report.page import Block, Cell, Fold, Table, Text, table
from mptrain.report.wording import counted

#: How a pass is called in a table.
_PASSES = ("forward", "backward")


def operator_blocks(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Block]:
    """A sentence, and the tables on demand.

    Args:
        found: ``operators`` and ``casts``, as in the event ``operators``; empty where a run has none.
    """
    operators, casts = found.get("operators") or [], found.get("casts") or []
    if not operators:
        return []
    text = Text(summary(found))
    return [
        text,
        Fold("Every operator", (_operators(operators),)),
        *([Fold("Every cast", (_casts(casts),))] if casts else []),
    ]


def summary(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """How many operators gave what, and how many casts there were, in one sentence."""
    by_dtype: dict[str, int] = {}
    for one in found.get("operators") or []:
        by_dtype[str(one["outputs"])] = by_dtype.get(str(one["outputs"]), 0) + int(one["calls"])
    casts = sum(int(one["calls"]) for one in found.get("casts") or [])
    shares = ", ".join(f"{calls:,} gave {name}" for name, calls in sorted(by_dtype.items(), key=lambda item: -item[1]))
    calls = sum(by_dtype.values())
    return f"Of {counted(calls, 'operator')} in one step, {shares}; {counted(casts, 'cast')} between dtypes."


def by_operator(operators: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """Rows of pass, operator, inputs, outputs and calls, with the passes in their order."""
    return [
        (one["phase"], one["operator"], one["inputs"], one["outputs"], f"{one['calls']:,}")
        for phase in _PASSES
        for one in operators
        if one["phase"] == phase
    ]


def by_cast(casts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Rows of pass, from, to and calls."""
    return [
        (one["phase"], one["from"], one["to"], f"{one['calls']:,}")
        for phase in _PASSES
        for one in casts
        if one["phase"] == phase
    ]


def _operators(operators: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[Cell | str]] = [list(row) for row in by_operator(operators)]
    note = "Views and reservations of memory are left out; casts are counted apart."
    return table(("pass", "operator", "dtypes in", "dtypes out", "calls"), rows, numeric=(4,), note=note)


def _casts(casts: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[Cell | str]] = [list(row) for row in by_cast(casts)]
    return table(("pass", "from", "to", "calls"), rows, numeric=(3,))
