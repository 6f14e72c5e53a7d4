"""Format of ``recipe.yaml``, with a reader that reports all problems of a file at once.

A recipe is a published claim with the runs and the expected results that test it. The reader does not compose the
overrides and must not import torch. A recipe is an untrusted file: its overrides cannot choose which code may be called
or where files are written.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from annotated_types import Le, MinLen

from mptrain.config.overrides import parse
from mptrain.config.value_checks import Check, EntryError, RangeDescription, read_mapping, show
from mptrain.config.yaml_files import find_unreadable, read_yaml
from mptrain.study.comparison.results import BEST
from mptrain.system.errors import ConfigError, Problem, suggest
from mptrain.system.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat

#: Keys that a recipe must not set, with the reason.
RESERVED = {
    "run": "mptrain chooses the run directories of a recipe",
    "log": "the amount of output is the user's choice",
    "logger": "the experiment tracker is the user's choice",
    "extensions": "only the user may allow further code to be called",
    "hydra": "mptrain creates the run directories",
    "seed": "a recipe lists its seeds under seeds",
}

#: Maximum size of a recipe in bytes.
_LARGEST = 1_000_000


def _in_one_line(text: str) -> str:
    if not (text := " ".join(text.split())).isprintable():
        raise EntryError("there are control characters", "remove them")
    return text


def _checked(word: str) -> str:
    override, problem = parse(word)
    key = re.split(r"[.=@/]", word.lstrip("+~"), maxsplit=1)[0]
    if problem is not None:
        raise EntryError(problem.what, problem.hint)
    if not word.isprintable():
        raise EntryError(f"'{show(word)}' has control characters", "remove them")
    if key in RESERVED:
        raise EntryError(f"'{show(word)}' is not allowed in a recipe: {RESERVED[key]}", "remove it")
    if override is not None and override.is_sweep_override():
        raise EntryError(f"{show(word)}: several values for one key", "make an arm for each value")
    return word


_NAME = "a name of letters, digits, _, - and ^"


def _named(text: str) -> str:
    if not re.fullmatch(r"[\w^-]+", text, re.ASCII):
        raise EntryError(f"{show(text)} must be {_NAME}")
    return text


def _named_in_group(text: str) -> str:
    group, _, arm = text.rpartition("/")
    return f"{_named(group)}/{_named(arm)}" if group else _named(text)


Text = Annotated[str, MinLen(1), Check(_in_one_line)]
Words = tuple[Annotated[str, Check(_checked)], ...]
Name = Annotated[str, Check(_named)]
ArmName = Annotated[str, Check(_named_in_group), RangeDescription("the name of an arm")]

Relation = Literal["equals", "below", "above"]
RELATIONS: Final[tuple[Relation, ...]] = ("equals", "below", "above")


@dataclass(frozen=True)
class Needs:
    """Resources that a recipe needs, as it declares them.

    Attributes:
        gpu: ``required`` if it cannot run without a CUDA device, else ``optional``.
        minutes: Wall time in minutes on 2 CPU cores, or on the GPU that it requires.
        data: The data that it needs beyond those that come with mptrain, or ``none``.
    """

    gpu: Literal["optional", "required"] = "optional"
    minutes: PositiveFloat = 1.0
    data: Text = "none"


@dataclass(frozen=True)
class Expectation:
    """Expected result of a recipe: the relation of a measure of an arm to that of another arm, or to a number.

    An arm is a configuration that is trained with each seed. Exactly one of ``equals``, ``below`` and ``above`` is set.

    Attributes:
        arm: Name of the arm. Without its group, the expectation applies in each group.
        measure: Name of a metric, or of another measure of a run (`mptrain.study.recipe.expectations.MEASURES`).
        equals: The arm or number that it equals,
        below: or below which it is,
        above: or above which it is.
        within: With ``equals``, the largest difference that counts as equal; None if all seeds have to be equal.
        by: With ``below`` and ``above``, the difference that has to be exceeded.
        times: Factor of the right side: ``above: fp32, times: 1.5`` is more than one and a half times that of fp32.
    """

    arm: ArmName
    measure: Name
    equals: ArmName | float | None = None
    below: ArmName | float | None = None
    above: ArmName | float | None = None
    within: PositiveFloat | None = None
    by: NonNegativeFloat | None = None
    times: Annotated[PositiveFloat, Le(1e100)] = 1.0

    def __post_init__(self) -> None:
        """Reject zero or several relations, and an amount that does not belong to the relation."""
        if [self.equals, self.below, self.above].count(None) != 2:
            raise EntryError("an expectation has one of the keys equals, below and above", "make one for each relation")
        if self.equals is not None and self.by is not None:
            raise EntryError("'by' belongs to below and above", f"write within: {self.by:g}")
        if self.equals is None and self.within is not None:
            raise EntryError("'within' belongs to equals", f"write by: {self.within:g}")
        if self.other == self.arm and self.times == 1:
            raise EntryError(f"{self.relation}: an arm is compared with itself", "name another arm")

    @property
    def relation(self) -> Relation:
        """Name of the relation that is set."""
        return next(relation for relation in RELATIONS if getattr(self, relation) is not None)

    @property
    def other(self) -> str | float:
        """The right side: the name of an arm, or a number."""
        side: str | float = getattr(self, self.relation)
        return side

    @property
    def text(self) -> str:
        """The expectation in the words of its file: ``s2^0 top1 below fp32 by 0.5``."""
        side = self.other if isinstance(self.other, str) else f"{self.other:.15g}"
        factor = f"{self.times:g} times " if self.times != 1 else ""
        amounts = [f" {name} {value:g}" for name in ("within", "by") if (value := getattr(self, name)) is not None]
        return f"{self.arm} {self.measure} {self.relation} {factor}{side}{''.join(amounts)}"

    def in_groups(self, groups: Mapping[str, Any]) -> list[Expectation]:
        """Return one expectation for each group of a recipe, with full names of arms such as ``sgd/fp32``."""
        if not groups or "/" in self.arm:
            return [self]
        names = {key: side for key in ("arm", self.relation) if isinstance(side := getattr(self, key), str)}
        full: list[dict[str, Any]] = [{key: f"{group}/{name}" for key, name in names.items()} for group in groups]
        return [replace(self, **sides) for sides in full]


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """Content of a ``recipe.yaml``; its fields are the keys of the file.

    Attributes:
        title: A title of one line.
        claim: The claim that it tests.
        source: Paper and section of the claim.
        base: Overrides of every run.
        start: Overrides, after those of every run, of one more run with the first of the seeds: every run of an arm
            starts from its weights. Empty if the arms start anew.
        groups: Name of each group to its overrides. Every arm is repeated in each group. Empty if there are none. An
            expectation also knows the group ``best``, in which each arm stands with the group that is best for it.
        arms: Name of each arm (configuration that is trained with each seed), without the group, to its overrides.
        reference: Name of the arm that the others are compared with in each group.
        seeds: The seeds of the runs of each arm.
        margin: The equivalence margin, in the unit of the metric.
        metric: Name of the metric to compare; None for the task's metric.
        expect: The expected results; empty if only the numbers are of interest.
        needs: The resources that it needs.
        smoke: Overrides that shorten any of its runs, to check that everything works.
    """

    title: Text
    claim: Text
    source: Text
    base: Words = ()
    start: Words = ()
    groups: dict[Name, Words] = field(default_factory=dict)
    arms: dict[Name, Words] = field(metadata={"add": "add arms: {fp32: [precision=fp32], ...}"})
    reference: str = field(metadata={"add": "name the arm that the others are compared with"})
    seeds: Annotated[tuple[NonNegativeInt, ...], MinLen(1)] = field(
        metadata={"add": "add for example seeds: [0, 1, 2]"}
    )
    margin: PositiveFloat = field(
        metadata={"add": "set it to the largest difference in the metric that counts as equivalent"}
    )
    metric: str | None = None
    expect: tuple[Expectation, ...] = ()
    needs: Needs = Needs()
    smoke: Annotated[Words, MinLen(1)] = field(metadata={"add": "add for example smoke: [train.max_steps=20]"})


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeFile):
    """A recipe: a published claim, with the runs and the expected results that test it.

    Attributes:
        name: The name of its folder.
        path: The path of its file.
    """

    name: str
    path: Path

    @property
    def full_arms(self) -> dict[str, tuple[str, ...]]:
        """Full name of each arm (configuration), such as ``sgd/fp32``, to the overrides of its group and its own."""
        if not self.groups:
            return dict(self.arms)
        return {
            f"{group}/{arm}": (*first, *then) for group, first in self.groups.items() for arm, then in self.arms.items()
        }

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """The expected results of every group, with full names of arms."""
        return tuple(grouped for expectation in self.expect for grouped in expectation.in_groups(self.groups))

    @property
    def compares_best(self) -> bool:
        """True if an expectation is about arms in the groups that are best for them."""
        return any(str(side).startswith(f"{BEST}/") for each in self.expect for side in (each.arm, each.other))


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from its YAML file, and check it without composing its overrides.

    Args:
        path: The file. If it is ``recipe.yaml``, its folder names the recipe, else the file does.

    Raises:
        ConfigError: If the recipe is invalid. The error lists all problems.
    """
    tree = {key: value for key, value in _tree(path).items() if value is not None}
    problems = list(_problems_between_keys(tree))
    for key in ("arms", "groups"):  # those without overrides of their own
        if isinstance(named := tree.get(key), dict):
            tree[key] = {name: [] if words is None else words for name, words in named.items()}
    try:
        file = read_mapping(tree, RecipeFile)
    except ConfigError as error:
        problems = [*error.problems, *problems]
    if problems:
        raise ConfigError([Problem(f"{path}: {problem.what}", problem.hint) for problem in problems])
    return Recipe(name=path.parent.name if path.name == "recipe.yaml" else path.stem, path=path, **vars(file))


def _tree(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):  # reported by find_unreadable below
        if (size := path.stat().st_size) > _LARGEST:
            raise ConfigError(f"{path} is not a recipe: it has {size:,} bytes", "see mptrain list recipes")
    if problem := find_unreadable([path]):
        raise ConfigError(problem)
    try:
        tree: dict[str, Any] = read_yaml(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from error
    expected = tree.get("expect")
    if isinstance(expected, list) and (sentence := next((text for text in expected if isinstance(text, str)), None)):
        raise ConfigError(
            f"{path}: expect: '{show(sentence)}' is a sentence, as in version 0.1, not a mapping",
            "write for example {arm: fp16, measure: top1, equals: fp32, within: 0.03}",
        )
    return tree


def _problems_between_keys(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of names of arms that there are not, of a single arm and of repeated seeds."""
    arms, groups = ([*map(str, tree[key])] if isinstance(tree.get(key), dict) else [] for key in ("arms", "groups"))
    if len(arms) == 1:
        yield Problem("there is only one arm", "add the arms to compare it with")
    seeds = tree.get("seeds")
    if isinstance(seeds, list) and len({*map(str, seeds)}) < len(seeds):
        yield Problem(f"seeds: {show(seeds)} has a duplicate", "list each seed once")
    if not arms:
        return
    if "reference" in tree:
        yield from _unknown_arm("reference", tree["reference"], arms)
    if BEST in groups:
        yield Problem(f"groups: {BEST} is the group in which each arm has the group that is best for it", "rename it")
    full = [f"{group}/{arm}" for group in [*groups, BEST] if groups for arm in arms]
    entries = tree.get("expect")
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        sides = {key: entry[key] for key in ("arm", *RELATIONS) if key in entry} if isinstance(entry, dict) else {}
        names = {key: name for key, name in sides.items() if isinstance(name, str)}
        for key, name in names.items():
            yield from _unknown_arm(f"expect.{index}.{key}", name, [*full, *arms])
        if len({"/" in name for name in names.values()}) > 1:
            yield Problem(f"expect.{index}: only one of the two arms has its group", "name both as GROUP/ARM")


def _unknown_arm(key: str, name: Any, known: list[str]) -> Iterator[Problem]:
    if isinstance(name, str) and name not in known:
        hint = suggest(name, known, f"known arms: {', '.join(known)}")
        yield Problem(f"{key}: there is no arm '{show(name)}'", hint)
