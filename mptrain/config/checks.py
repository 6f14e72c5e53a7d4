"""Checks that need more than one field: of sections as a whole, of parts against each other; and warnings.

Imports no torch; what needs a target's own fields is in `mptrain.config.targets`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mptrain.config.ranges import UNRESOLVED, UnfitError, fit, hint_for, show
from mptrain.errors import ConfigError, Problem, did_you_mean
from mptrain.numerics.formats import FLOAT16, FLOAT32

if TYPE_CHECKING:
    from mptrain.config.targets import Target
    from mptrain.engine.options import TrainOptions
    from mptrain.precision.policy import Policy

#: What a file whose keys have landed one level too deep, or too high, is missing.
HEADER = (
    "a file of {group}/ either begins with the line '# @package _global_' and has its keys below '{group}:', "
    "or it has neither"
)

#: The smallest positive FP16 number, 2^-24.
FP16_TINY = 2.0**-24

#: Arguments of a scaler that multiply or divide the loss scale.
SCALES = ("scale", "init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")


#: Those of them that follow from a rule, not from a network.
FACTORS = ("growth_factor", "backoff_factor")


def check_section(name: str, node: Any, schema: type, problems: list[Problem]) -> Any:
    """A section of the configuration as its dataclass.

    Args:
        name: The section's key; empty for the keys at the top.
        node: What the configuration holds there.
        schema: The dataclass.
        problems: Takes what is wrong.

    Returns:
        The dataclass, or None where something is wrong.
    """
    prefix = f"{name}." if name else ""
    if node is UNRESOLVED:
        return None
    if not isinstance(node, Mapping):
        keys = ", ".join(prefix + field.name for field in fields_of(schema))
        problems.append(Problem(f"{name}={show(node)}: must be a mapping", f"its keys are {keys}"))
        return None
    hints = typing.get_type_hints(schema, include_extras=True)
    before = len(problems)
    values: dict[str, Any] = {}
    for key, value in node.items():
        if key not in hints:
            guess = "" if key == name else did_you_mean(str(key), hints)
            hint = f"did you mean {prefix}{guess}={show(value)}?" if guess else f"there is {', '.join(hints)}"
            hint = HEADER.format(group=name) if key == name else hint
            problems.append(Problem(f"unknown key '{prefix}{key}'", hint))
            continue
        try:
            values[key] = fit(value, hints[key])
        except UnfitError as unfit:
            name_of = f"{prefix}{key}"
            problems.append(Problem(f"{name_of}={show(value)}: {unfit}", hint_for(name_of, value, hints[key]), name_of))
    for field in fields_of(schema):
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if missing and field.name not in node:
            problems.append(Problem(f"{prefix}{field.name} is required"))
    if len(problems) > before or UNRESOLVED in values.values():
        return None
    try:
        return schema(**values)
    except ConfigError as error:
        problems.extend(error.problems)
    return None


def check_together(policy: Policy, optimizer: Target) -> list[Problem]:
    """Problems between parts: an eps that FP16 optimizer state cannot hold."""
    if policy.optimizer_state != "parameters" or policy.parameters != "float16":
        return []
    eps = optimizer.arguments.get("eps", getattr(optimizer.resolve(), "eps", None))  # a dataclass's default
    if isinstance(eps, (int, float)) and eps < FP16_TINY:
        return [
            Problem(
                f"optimizer.eps={eps:g} with precision.optimizer_state=parameters in float16: "
                f"below {FP16_TINY:.3g} (2^-24) FP16 rounds it to zero, and the update divides by zero",
                "write optimizer.eps=1e-4, or precision.optimizer_state=float32",
            )
        ]
    return []


def check_train(train: TrainOptions) -> list[Problem]:
    """Problems between the fields of ``train``: more micro-batches than samples."""
    if train.accumulate <= train.batch_size:
        return []
    return [
        Problem(
            f"train.accumulate={train.accumulate} with train.batch_size={train.batch_size}: "
            "there is at most one micro-batch a sample",
            f"write train.accumulate={train.batch_size} or less, or a larger train.batch_size",
        )
    ]


def warnings_about(scaler: Target, written: Collection[str]) -> list[str]:
    """Warnings about values that are allowed but probably not meant: scales that are not powers of two.

    Args:
        scaler: The scaler.
        written: The keys of the command line. A factor that stands in a preset's file is the framework's own.
    """
    sentences = []
    for name in SCALES:
        value = scaler.arguments.get(name)
        if not isinstance(value, (int, float)) or value <= 0 or math.frexp(value)[0] == 0.5:
            continue
        if name == "max_scale" and value in (FLOAT16.max, FLOAT32.max):  # a format's end, or no ceiling at all
            continue
        if name in FACTORS and f"scaler.{name}" not in written:
            continue
        nearest = round(math.log2(value))
        if name in FACTORS:  # not 1, which would be refused
            nearest = max(nearest, 1) if value > 1 else min(nearest, -1)
        sentences.append(
            f"scaler.{name}={show(value)} is not a power of two, so scaling rounds the gradients; "
            f"nearest {_power_of_two(nearest)}"
        )
    return sentences


def _power_of_two(exponent: int) -> str:
    """As a number while it is a short one: 1024, 0.125, 2^100."""
    return f"{2.0**exponent:.15g}" if -10 <= exponent <= 32 else f"2^{exponent}"


def fields_of(schema: type) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a dataclass."""
    return dataclasses.fields(schema)
