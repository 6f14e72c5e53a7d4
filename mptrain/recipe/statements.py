"""Parser of a recipe's expected statements about its arms, such as ``s2^0.top1 < fp32.top1 by 0.5``.

An arm is a configuration that is trained with several seeds. This module only parses. `mptrain.recipe.expectations`
decides whether a statement holds.

    STATEMENT := SIDE ("<" | ">") SIDE ["by" AMOUNT]      below or above by more than the amount
               | SIDE "=" SIDE ["within" AMOUNT]          equal up to the amount
    SIDE      := ARM "." MEASURE | NUMBER
    AMOUNT    := NUMBER ["x"]                             1.5x: a ratio, not a difference
    NUMBER    := 0.5 | 1e-3 | 2^24 | inf
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, cast

from mptrain.errors import did_you_mean

Relation = Literal["<", ">", "="]

#: Pattern of the names of arms, groups and arithmetic entries. ``/`` separates group and arm.
NAME = r"[A-Za-z0-9_^-]+"

_NUMBER = r"[-+]?(?:\d+\^[-+]?\d+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf)"
_QUANTITY = re.compile(rf"(?P<arm>{NAME}(?:/{NAME})?)\.(?P<measure>[A-Za-z_]\w*)")
_STATEMENT = re.compile(
    r"(?P<left>[^<>=]+)(?P<relation>[<>=])(?P<right>[^<>=]+?)(?:\s(?P<word>by|within)\s(?P<amount>[^<>=]+))?"
)
_SHAPE = "write it like: ARM.top1 < ARM.top1 by 0.5, ARM.top1 = ARM.top1 within 0.03, or ARM.skip_rate > 0.95"


class StatementError(ValueError):
    """Raised for an invalid statement in a recipe. The message says what is wrong; ``hint`` says what to write."""

    def __init__(self, message: str, hint: str = _SHAPE) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Quantity:
    """One side of a statement that is not a number: ``ARM.MEASURE``, such as ``fp32.top1``.

    Attributes:
        arm: Name of an arm (all runs of one configuration), with its group as ``GROUP/ARM``, or of an arithmetic entry.
        measure: Name of a metric or another measure of the runs, or of a number of the arithmetic entry.
    """

    arm: str
    measure: str

    def __str__(self) -> str:
        return f"{self.arm}.{self.measure}"


@dataclass(frozen=True)
class Statement:
    """An expected relation between a measure of a recipe's runs and another measure or a number.

    Attributes:
        text: The statement as written.
        left: The left side; a number there was moved to the right.
        relation: ``<``, ``>`` or ``=``.
        right: The right side.
        amount: The minimum difference (``<``, ``>``) or the tolerance (``=``); None if not given. Not negative, and 1
            or more for a ratio.
        is_ratio: Whether the amount is a factor and ratios are compared instead of differences.
    """

    text: str
    left: Quantity
    relation: Relation
    right: Quantity | float
    amount: float | None
    is_ratio: bool = False

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The measures that the statement names, left side first."""
        return (self.left, self.right) if isinstance(self.right, Quantity) else (self.left,)


@dataclass(frozen=True)
class Names:
    """Names in a recipe that its statements may use.

    Attributes:
        groups: Names of the groups, in each of which all arms are repeated; empty if there are none.
        arms: Names of the arms (configurations), without groups.
        arithmetic: Names of the arithmetic entries (numbers computed without training).
    """

    groups: tuple[str, ...]
    arms: tuple[str, ...]
    arithmetic: tuple[str, ...]

    @property
    def full(self) -> tuple[str, ...]:
        """Full names of the arms as in results: ``GROUP/ARM`` for each group, or ``ARM`` without groups."""
        return tuple(f"{group}/{arm}" for group in self.groups for arm in self.arms) if self.groups else self.arms


def read_statement(text: str) -> Statement:
    """Parse a recipe's statement such as ``fp16.top1 = fp32.top1 within 0.5``. A number on the left moves to the right.

    Raises:
        StatementError: If the text is not a valid statement.
    """
    text = " ".join(text.split())
    match = _STATEMENT.fullmatch(text)
    if match is None:
        raise StatementError(
            f"'{text}' does not compare two sides with exactly one <, > or =", "write for example fp16.top1 > 0.9"
        )
    left, right = _side(match["left"]), _side(match["right"])
    relation = cast("Relation", match["relation"])
    if not isinstance(left, Quantity):
        left, right, relation = right, left, cast("Relation", {"<": ">", ">": "<", "=": "="}[relation])
    if not isinstance(left, Quantity):
        raise StatementError("both sides of the comparison are numbers", "use ARM.MEASURE on one side")
    if left == right:
        raise StatementError(
            "both sides of the comparison are the same measure of the same arm", "name two different arms"
        )
    amount, is_ratio = _amount(match["word"], match["amount"], relation)
    if isinstance(right, float) and math.isinf(right) and is_ratio:
        raise StatementError("a ratio to inf is not defined", "remove the x")
    return Statement(text, left, relation, right, amount, is_ratio)


def in_groups(statement: Statement, names: Names) -> list[tuple[str, Statement]]:
    """Expand a statement that holds for every group of a recipe to one statement for each, with full names of arms.

    Args:
        statement: The parsed statement.
        names: The names in the recipe.

    Returns:
        Pairs of group and statement. The group is empty if the statement uses full names or names no arm.

    Raises:
        StatementError: If the statement uses an unknown name.
    """
    kinds = {_kind(quantity, names) for quantity in statement.quantities} - {"arithmetic"}
    if isinstance(statement.right, float) and math.isinf(statement.right) and kinds:
        raise StatementError(
            "a measure of a run cannot be compared with inf", "if no run may fail, write ARM.failed = 0 within 0"
        )
    if kinds != {"short"}:
        if "short" in kinds:
            raise StatementError("only one of the two arms is named with its group", "name both as GROUP/ARM")
        return [("", statement)]
    return [
        (
            group,
            replace(
                statement,
                left=_within(group, statement.left, names),
                right=_within(group, statement.right, names)
                if isinstance(statement.right, Quantity)
                else statement.right,
            ),
        )
        for group in names.groups
    ]


def _kind(quantity: Quantity, names: Names) -> str:
    if quantity.arm in names.arithmetic:
        return "arithmetic"
    if quantity.arm in names.full:
        return "full"
    if names.groups and quantity.arm in names.arms:
        return "short"
    known = [*names.full, *(names.arms if names.groups else ()), *names.arithmetic]
    guess = did_you_mean(quantity.arm, known)
    raise StatementError(
        f"there is no arm '{quantity.arm}'", f"did you mean {guess}?" if guess else f"known arms: {', '.join(known)}"
    )


def _within(group: str, quantity: Quantity, names: Names) -> Quantity:
    return Quantity(f"{group}/{quantity.arm}", quantity.measure) if quantity.arm in names.arms else quantity


def _side(text: str) -> Quantity | float:
    text = text.strip()
    if re.fullmatch(_NUMBER, text):
        return _number(text)
    if match := _QUANTITY.fullmatch(text):
        return Quantity(match["arm"], match["measure"])
    if re.search(r"\s(?:by|within)(?:\s|$)", text):
        raise StatementError(f"'{text}': an amount must follow by or within at the end of the statement")
    raise StatementError(f"'{text}' is neither ARM.MEASURE nor a number")


def _amount(word: str | None, text: str | None, relation: Relation) -> tuple[float | None, bool]:
    if word is None or text is None:
        return None, False
    wanted = "within" if relation == "=" else "by"
    if word != wanted:
        what = f"'{relation}' must be used with '{wanted}', not with '{word}'"
        raise StatementError(what, f"write {wanted} {text.strip()}")
    match = re.fullmatch(rf"(?P<number>{_NUMBER})(?P<x>x?)", text.strip())
    if match is None:
        hint = "write a number such as 0.03 or 2^10, or a factor such as 1.5x"
        raise StatementError(f"'{text.strip()}' is not an amount", hint)
    amount, is_ratio = _number(match["number"]), bool(match["x"])
    if not math.isfinite(amount) or amount < (1 if is_ratio else 0):
        least = "a factor must be 1 or more" if is_ratio else "an amount must be 0 or more"
        raise StatementError(f"'{text.strip()}' is not an amount", f"{least}, and finite")
    return amount, is_ratio


def _number(text: str) -> float:
    base, power, exponent = text.partition("^")
    try:
        value = math.copysign(1.0, float(base)) * float(abs(int(base))) ** int(exponent) if power else float(text)
    except (OverflowError, ZeroDivisionError, ValueError):
        raise StatementError(f"'{text}' cannot be represented as a float") from None
    return value
