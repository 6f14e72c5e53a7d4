"""Format of ``recipe.yaml``, with a reader that reports all problems of a file at once.

A recipe is a published claim with the runs and the expected results that test it. The reader does not compose the
overrides, must not import torch and calls nothing that a recipe names. A recipe is an untrusted file: its overrides
cannot choose which code may be called or where files are written, and its arithmetic may only call functions of
`mptrain.numerics.demonstrations`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import MinLen

from mptrain.config.overrides import parse
from mptrain.config.targets import PACKAGES, Target, is_allowed
from mptrain.config.value_checks import InvalidValueError, check_value, show
from mptrain.config.yaml_files import find_unreadable, read_yaml
from mptrain.errors import ConfigError, Problem, did_you_mean
from mptrain.fields import NonNegativeInt, PositiveFloat
from mptrain.recipe.statements import NAME, Names, Statement, StatementError, in_groups, read_statement

Text = Annotated[str, MinLen(1)]


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
    """Expected result of a recipe: a statement about its arms, for one group.

    Attributes:
        text: The statement as written, with its group if it applies to every group.
        statement: The parsed statement with full names of arms.
    """

    text: str
    statement: Statement


@dataclass(frozen=True)
class Recipe:
    """A recipe: a published claim, with the runs and the expected results that test it; read from ``recipe.yaml``.

    An arm is a configuration that is trained with each seed.

    Attributes:
        name: The name of its folder.
        path: The path of its file.
        title: A title of one line.
        claim: The claim that it tests.
        source: Paper and section of the claim.
        base: Overrides of every run.
        groups: Name of each group to its overrides. Every arm is repeated in each group. Empty if there are none.
        arms: Name of each arm, without the group, to its overrides.
        reference: Name of the arm that the others are compared with in each group; empty if there are no arms.
        seeds: The seeds of the runs of each arm.
        margin: The equivalence margin, in the unit of the metric.
        metric: Name of the metric to compare; None for the task's metric.
        expectations: The expected statements; empty if only the numbers are of interest.
        arithmetic: Name of each entry to the function that computes its numbers without training.
        needs: The resources that it needs.
        smoke: Overrides that shorten any of its runs, to check that everything works.
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
        """Full name of each arm (configuration), such as ``sgd/fp32``, to the overrides of its group and its own."""
        if not self.groups:
            return dict(self.arms)
        return {
            f"{group}/{arm}": (*first, *then) for group, first in self.groups.items() for arm, then in self.arms.items()
        }


Words = list[str]

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


@dataclass
class _File:
    """The keys of a recipe and their types. Keys without a default are required."""

    title: Text
    claim: Text
    source: Text
    base: Words = field(default_factory=list)
    groups: dict[str, Any] = field(default_factory=dict)
    arms: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    seeds: list[NonNegativeInt] = field(default_factory=list)
    margin: PositiveFloat | None = None
    metric: str | None = None
    arithmetic: dict[str, Any] = field(default_factory=dict)
    needs: dict[str, Any] = field(default_factory=dict)
    expect: list[str] = field(default_factory=list)
    smoke: Words = field(default_factory=list)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from its YAML file, and check it without composing its overrides or calling its functions.

    Args:
        path: The file. If it is ``recipe.yaml``, its folder names the recipe, else the file does.

    Raises:
        ConfigError: If the recipe is invalid. The error lists all problems.
    """
    name = path.parent.name if path.name == "recipe.yaml" else path.stem
    tree = _tree(path)
    problems: list[Problem] = []
    file = _fields(tree, _File, "", problems)
    needs = _fields(_mapping(tree, "needs"), Needs, "needs.", problems) or Needs()
    groups = _named_words(_mapping(tree, "groups"), "groups", problems)
    arms = _named_words(_mapping(tree, "arms"), "arms", problems)
    arithmetic = _arithmetic(_mapping(tree, "arithmetic"), problems)
    names = Names(tuple(groups), tuple(arms), tuple(arithmetic))
    for clash in sorted(set(arithmetic) & set(names.full)):
        problems.append(Problem(f"arithmetic.{clash}: an arm has the same name", "choose another name"))
    if file is None:
        raise _wrong(path, problems)
    texts = {key: " ".join(getattr(file, key).split()) for key in ("title", "claim", "source")}
    for key, text in texts.items():
        if not text.isprintable():
            problems.append(Problem(f"{key} has control characters", "remove them"))
    for key in ("base", "smoke"):
        _check_words(getattr(file, key), key, problems)
    _check_plan(file, arms, arithmetic, problems)
    expectations = _expectations(file, names, problems)
    if problems:
        raise _wrong(path, problems)
    return Recipe(
        name=name,
        path=path,
        **texts,
        base=tuple(file.base),
        groups=groups,
        arms=arms,
        reference=file.reference or "",
        seeds=tuple(file.seeds),
        margin=file.margin or 1.0,
        metric=file.metric,
        expectations=expectations,
        arithmetic=arithmetic,
        needs=needs,
        smoke=tuple(file.smoke),
    )


def _tree(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):  # reported by find_unreadable below
        if (size := path.stat().st_size) > _LARGEST:
            raise ConfigError(f"{path} is not a recipe: it has {size:,} bytes", "see mptrain list recipes")
    if problem := find_unreadable([path]):
        raise ConfigError(problem)
    text = path.read_text(encoding="utf-8")
    try:
        tree = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from error
    return typing.cast("dict[str, Any]", tree)


def _wrong(path: Path, problems: list[Problem]) -> ConfigError:
    return ConfigError([Problem(f"{path}: {problem.what}", problem.hint) for problem in problems])


def _mapping(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _fields(node: Mapping[str, Any], schema: type, prefix: str, problems: list[Problem]) -> Any:
    """Convert a mapping to a dataclass; None if it has problems."""
    hints, before = get_type_hints(schema, include_extras=True), len(problems)
    values: dict[str, Any] = {}
    for key, value in node.items():
        if key not in hints:
            guess = did_you_mean(str(key), hints)
            problems.append(
                Problem(
                    f"unknown key '{prefix}{show(key)}'",
                    f"did you mean {prefix}{guess}?" if guess else f"known keys: {', '.join(hints)}",
                )
            )
            continue
        if value is None and schema is _File and key not in ("reference", "margin", "metric"):
            continue  # an empty key counts as missing
        try:
            values[key] = check_value(value, hints[key])
        except InvalidValueError as unfit:
            problems.append(Problem(f"{prefix}{key}: {show(value)} {unfit}", _brackets(key, value, hints[key])))
    for known in dataclasses.fields(schema):
        required = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if required and known.name not in values and node.get(known.name) is None:
            problems.append(Problem(f"{prefix}{known.name} is missing", f"add {known.name}:"))
    return None if len(problems) > before else schema(**values)


def _brackets(key: str, value: Any, annotation: Any) -> str:
    """Return a hint to write a list if a single value is given instead of one."""
    if isinstance(value, (str, int)) and annotation in (Words, list[NonNegativeInt]):
        return f"write {key}: [{show(value)}]"
    return ""


def _named_words(node: Mapping[str, Any], key: str, problems: list[Problem]) -> dict[str, tuple[str, ...]]:
    """Return the overrides of arms or groups by name."""
    found = {}
    for name, value in node.items():
        place = f"{key}.{show(name)}"
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            problems.append(
                Problem(f"{place}: a name may only have letters, digits, _ - and ^", "put it in quotes, or rename it")
            )
            continue
        try:
            words = check_value([] if value is None else value, Words)
        except InvalidValueError as unfit:
            problems.append(Problem(f"{place}: {show(value)} {unfit}", _brackets(place, value, Words)))
            words = []
        _check_words(words, place, problems)
        found[name] = tuple(words)
    return found


def _check_words(words: Words, place: str, problems: list[Problem]) -> None:
    for word in words:
        override, problem = parse(word)
        key = re.split(r"[.=@/]", word.lstrip("+~"), maxsplit=1)[0]
        if problem is not None:
            problems.append(Problem(f"{place}: {problem.what}", problem.hint))
        elif not word.isprintable():
            problems.append(Problem(f"{place}: '{show(word)}' has control characters", "remove them"))
        elif key in RESERVED:
            what = f"{place}: '{show(word)}' is not allowed in a recipe: {RESERVED[key]}"
            problems.append(Problem(what, "remove it"))
        elif override is not None and override.is_sweep_override():
            problems.append(Problem(f"{place}: {show(word)}: several values for one key", "make an arm for each value"))


def _arithmetic(node: Mapping[str, Any], problems: list[Problem]) -> dict[str, Target]:
    found = {}
    for name, value in node.items():
        place = f"arithmetic.{show(name)}"
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            problems.append(Problem(f"{place}: a name may only have letters, digits, _ - and ^", "rename it"))
            continue
        path = value.get("_target_") if isinstance(value, dict) else None
        found[name] = Target(str(path), {}, PACKAGES["arithmetic"])
        if not isinstance(value, dict) or not isinstance(path, str):
            hint = "write {_target_: mptrain.numerics.demonstrations.FUNCTION, KEY: VALUE}"
            problems.append(Problem(f"{place} names no function", hint))
            continue
        if not is_allowed(path, PACKAGES["arithmetic"]):
            what = f"{place}: _target_ '{show(path)}' is not in {' or '.join(PACKAGES['arithmetic'])}"
            problems.append(Problem(what, "choose a function from there; other code can only run in the arms"))
        arguments = {str(key): item for key, item in value.items() if key != "_target_"}
        found[name] = Target(path, arguments, PACKAGES["arithmetic"])
    return found


def _check_plan(file: _File, arms: Mapping[str, Any], arithmetic: Mapping[str, Any], problems: list[Problem]) -> None:
    """Check that there is something to run, and that all keys that arms need are set."""
    if not arms and not arithmetic:
        problems.append(
            Problem("there is nothing to run: no arms and no arithmetic", "add arms: {fp32: [precision=fp32], ...}")
        )
    if not arms:
        return
    if len(file.arms) == 1:
        problems.append(Problem("there is only one arm", "add the arms to compare it with"))
    if file.reference is None:
        problems.append(Problem("reference is missing", f"name one of the arms: {', '.join(arms)}"))
    elif file.reference not in arms:
        guess = did_you_mean(file.reference, arms)
        hint = f"did you mean {guess}?" if guess else f"known arms: {', '.join(arms)}"
        problems.append(Problem(f"reference: there is no arm '{show(file.reference)}'", hint))
    if not file.seeds:
        problems.append(Problem("seeds are missing", "add for example seeds: [0, 1, 2]"))
    elif len(set(file.seeds)) < len(file.seeds):
        problems.append(Problem(f"seeds: {show(file.seeds)} has a duplicate", "list each seed once"))
    if file.margin is None:
        hint = "set it to the largest difference in the metric that counts as equivalent"
        problems.append(Problem("margin is missing", hint))
    if not file.smoke:
        problems.append(Problem("smoke is missing", "add for example smoke: [train.max_steps=20]"))


def _expectations(file: _File, names: Names, problems: list[Problem]) -> tuple[Expectation, ...]:
    found: list[Expectation] = []
    for text in file.expect:
        try:
            statement = read_statement(text)
            for group, resolved in in_groups(statement, names):
                found.append(Expectation(f"{group}: {statement.text}" if group else statement.text, resolved))
        except StatementError as error:
            problems.append(Problem(f"expect: '{show(text)}': {error}", error.hint))
            continue
        if statement.relation == "=" and statement.amount is None:
            problems.append(Problem(f"expect: '{show(text)}': '=' needs a tolerance", "add: within AMOUNT"))
    return tuple(found)
