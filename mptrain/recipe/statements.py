"""Statements about arms, as recipes write them: ``s2^0.top1 < fp32.top1 by 0.5``.

Reads them only; whether one holds is the business of `mptrain.recipe.expectations`.

    STATEMENT := SIDE ("<" | ">") SIDE ["by" AMOUNT]      wholly below, or above, by more than that
               | SIDE "=" SIDE ["within" AMOUNT]          the same, but for that much
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

#: What the name of an arm, a group or an arithmetic entry may be made of; ``/`` stands between group and arm.
NAME = r"[A-Za-z0-9_^-]+"

_NUMBER = r"[-+]?(?:\d+\^[-+]?\d+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf)"
_QUANTITY = re.compile(rf"(?P<arm>{NAME}(?:/{NAME})?)\.(?P<measure>[A-Za-z_]\w*)")
_STATEMENT = re.compile(
    r"(?P<left>[^<>=]+)(?P<relation>[<>=])(?P<right>[^<>=]+?)(?:\s(?P<word>by|within)\s(?P<amount>[^<>=]+))?"
)
_SHAPE = "write it like: ARM.top1 < ARM.top1 by 0.5, ARM.top1 = ARM.top1 within 0.03, or ARM.skip_rate > 0.95"


class StatementError(ValueError):
    """Something is no statement; the text says what is wrong with it, ``hint`` what to write."""

    def __init__(self, message: str, hint: str = _SHAPE) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Quantity:
    """A measure of an arm, of each of its runs: ``fp32.top1``; or a number of an arithmetic entry."""

    arm: str
    measure: str

    def __str__(self) -> str:
        return f"{self.arm}.{self.measure}"


@dataclass(frozen=True)
class Statement:
    """A claim about one or two measures.

    Attributes:
        text: As it was written.
        left: What it is about.
        relation: ``<``, ``>`` or ``=``.
        right: What that is compared with.
        amount: How far beyond (``<``, ``>``) or apart (``=``) at most; None where it is not said. Not negative; of a
            ratio at least 1.
        is_ratio: The amount is a factor, and ratios are compared instead of differences.
    """

    text: str
    left: Quantity
    relation: Relation
    right: Quantity | float
    amount: float | None
    is_ratio: bool = False

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The measures that it names."""
        return (self.left, self.right) if isinstance(self.right, Quantity) else (self.left,)


@dataclass(frozen=True)
class Names:
    """The arms, groups and entries that statements may be about."""

    groups: tuple[str, ...]
    arms: tuple[str, ...]
    arithmetic: tuple[str, ...]

    @property
    def full(self) -> tuple[str, ...]:
        """Arms as they are called in results."""
        return tuple(f"{group}/{arm}" for group in self.groups for arm in self.arms) if self.groups else self.arms


def read_statement(text: str) -> Statement:
    """The statement that a line makes; a number that stands on the left changes sides.

    Raises:
        StatementError: It is none.
    """
    text = " ".join(text.split())
    match = _STATEMENT.fullmatch(text)
    if match is None:
        raise StatementError("it has no single <, > or = between two sides")
    left, right = _side(match["left"]), _side(match["right"])
    relation = cast("Relation", match["relation"])
    if not isinstance(left, Quantity):
        left, right, relation = right, left, cast("Relation", {"<": ">", ">": "<", "=": "="}[relation])
    if not isinstance(left, Quantity):
        raise StatementError("it compares a number with a number", "name an arm: ARM.MEASURE")
    if left == right:
        raise StatementError("it compares something with itself", "name two different arms")
    amount, is_ratio = _amount(match["word"], match["amount"], relation)
    if isinstance(right, float) and math.isinf(right) and is_ratio:
        raise StatementError("nothing has a ratio to inf", "leave the x out")
    return Statement(text, left, relation, right, amount, is_ratio)


def in_groups(statement: Statement, names: Names) -> list[tuple[str, Statement]]:
    """The statement once for each group that it holds in, about arms by their full names.

    Returns:
        Group and statement; an empty group for a statement that names its arms in full, or none.

    Raises:
        StatementError: It is about something that there is not.
    """
    kinds = {_kind(quantity, names) for quantity in statement.quantities} - {"arithmetic"}
    if isinstance(statement.right, float) and math.isinf(statement.right) and kinds:
        raise StatementError(
            "runs are compared with finite numbers", "write ARM.failed = 0 within 0 for runs that must not fail"
        )
    if kinds != {"short"}:
        if "short" in kinds:
            raise StatementError("one arm is named with its group, the other without", "name both as GROUP/ARM")
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
        f"there is no arm '{quantity.arm}'", f"did you mean {guess}?" if guess else f"there is {', '.join(known)}"
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
        raise StatementError(f"'{text}': an amount stands at the end, behind by or within")
    raise StatementError(f"'{text}' is neither ARM.MEASURE nor a number")


def _amount(word: str | None, text: str | None, relation: Relation) -> tuple[float | None, bool]:
    if word is None or text is None:
        return None, False
    wanted = "within" if relation == "=" else "by"
    if word != wanted:
        raise StatementError(f"'{relation}' goes with '{wanted}', not with '{word}'", f"write {wanted} {text.strip()}")
    match = re.fullmatch(rf"(?P<number>{_NUMBER})(?P<x>x?)", text.strip())
    if match is None:
        raise StatementError(f"'{text.strip()}' is no amount", "write a number such as 0.03 or 2^10, or a factor: 1.5x")
    amount, is_ratio = _number(match["number"]), bool(match["x"])
    if not math.isfinite(amount) or amount < (1 if is_ratio else 0):
        least = "a factor is 1 or more" if is_ratio else "an amount is 0 or more"
        raise StatementError(f"'{text.strip()}' is no amount", f"{least}, and finite")
    return amount, is_ratio


def _number(text: str) -> float:
    base, power, exponent = text.partition("^")
    try:
        value = math.copysign(1.0, float(base)) * float(abs(int(base))) ** int(exponent) if power else float(text)
    except (OverflowError, ZeroDivisionError, ValueError):
        raise StatementError(f"'{text}' is no number that can be computed with") from None
    return value
