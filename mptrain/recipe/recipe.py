"""A checked recipe: frozen values. How its file is read is in `mptrain.recipe.format`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import MinLen

from mptrain.config.targets import Target
from mptrain.fields import PositiveFloat
from mptrain.recipe.statements import Statement

Text = Annotated[str, MinLen(1)]


@dataclass(frozen=True)
class Needs:
    """What running a recipe takes.

    Attributes:
        gpu: ``required`` where it cannot be run without a CUDA device.
        minutes: Wall time on 2 CPU cores, or on the GPU that it requires.
        data: Which data, where they do not come with mptrain; else ``none``.
    """

    gpu: Literal["optional", "required"] = "optional"
    minutes: PositiveFloat = 1.0
    data: Text = "none"


@dataclass(frozen=True)
class Expectation:
    """A statement in one group.

    Attributes:
        text: The statement as it was written, with its group where it holds in each.
        statement: What it says, about arms by their full names.
    """

    text: str
    statement: Statement


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Attributes:
        name: Of its folder.
        path: Its file.
        title: One line.
        claim: What is to be shown.
        source: Paper and section.
        base: Words of every run.
        groups: Name to words; every arm is repeated in each. Empty where there are none.
        arms: Name, without the group, to words.
        reference: The arm that others are compared with, in each group; empty where there are no arms.
        seeds: Of the runs of each arm.
        margin: Of equivalence, in the metric's unit.
        metric: What arms are compared by; None for the task's own.
        expectations: What has to hold; empty where only the numbers are wanted.
        arithmetic: Name to the function that computes numbers without training.
        needs: What it takes.
        smoke: Words that make any of its runs a short one.
    """

    name: str
    path: Path
    title: str
    claim: str
    source: str
    base: tuple[str, ...] = ()
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reference: str = ""
    seeds: tuple[int, ...] = ()
    margin: float = 1.0
    metric: str | None = None
    expectations: tuple[Expectation, ...] = ()
    arithmetic: dict[str, Target] = field(default_factory=dict)
    needs: Needs = Needs()
    smoke: tuple[str, ...] = ()

    @property
    def full_arms(self) -> dict[str, tuple[str, ...]]:
        """Name with the group, ``sgd/fp32``, to the words of group and arm."""
        if not self.groups:
            return dict(self.arms)
        return {
            f"{group}/{arm}": (*first, *then) for group, first in self.groups.items() for arm, then in self.arms.items()
        }
