"""What differs from learner to learner, for tasks that train several networks against each other."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mptrain.config.ranges import UnfitError, fit, hint_for, show
from mptrain.config.targets import Target
from mptrain.engine.options import TrainOptions
from mptrain.errors import ConfigError, Problem, did_you_mean

#: Groups of which a learner may have another choice.
GROUPS = ("optimizer", "schedule", "scaler")


@dataclass(frozen=True)
class LearnerChoices:
    """The parts of one learner.

    Attributes:
        optimizer: What moves its weights.
        schedule: Its learning rate as a function of its applied updates.
        scaler: How its gradients stay in range.
        clip_norm: Largest global L2 norm of its unscaled gradients; None does not clip.
    """

    optimizer: Target
    schedule: Target
    scaler: Target
    clip_norm: float | None


def read_learners(
    node: Any, shared: Mapping[str, Target], train: TrainOptions, problems: list[Problem]
) -> dict[str, LearnerChoices]:
    """The choices of the learners that ``learners.NAME`` changes, everything else taken from what they share.

    Args:
        node: The ``learners`` section: name to ``optimizer``, ``schedule``, ``scaler`` (keys that differ, or with a
            ``_target_`` of its own all keys) and ``clip_norm``.
        shared: The checked targets of `GROUPS`.
        train: Holds the shared ``clip_norm``.
        problems: Takes what is wrong.
    """
    if not isinstance(node, Mapping):
        problems.append(Problem(f"learners={show(node)}: must be a mapping of learners' names", _HINT))
        return {}
    chosen = {}
    for name, own in node.items():
        if not isinstance(own, Mapping):
            problems.append(Problem(f"learners.{name}={show(own)}: must be a mapping", _HINT))
            continue
        problems += [_unknown(f"learners.{name}", key) for key in own if key not in (*GROUPS, "clip_norm")]
        parts = {group: _merge(f"learners.{name}.{group}", own.get(group), shared[group], problems) for group in GROUPS}
        clip = _clip_norm(f"learners.{name}.clip_norm", own, train, problems)
        chosen[str(name)] = LearnerChoices(**parts, clip_norm=clip)
    return chosen


def known_keys(tree: Mapping[str, Any], key: str) -> Iterator[str]:
    """The keys that may stand below ``learners.NAME``, for the learner of a key ``learners.NAME...``."""
    name = key.split(".")[1] if key.count(".") else "NAME"
    yield f"learners.{name}.clip_norm"
    for group in GROUPS:
        yield f"learners.{name}.{group}"
        for argument in tree.get(group) or {}:
            yield f"learners.{name}.{group}.{argument}"


_HINT = "write for example learners.discriminator.optimizer.lr=4e-4"


def _merge(place: str, own: Any, shared: Target, problems: list[Problem]) -> Target:
    if own is None:
        return shared
    if not isinstance(own, Mapping):
        problems.append(Problem(f"{place}={show(own)}: must be a mapping of the keys that differ", _HINT))
        return shared
    arguments = {str(key): value for key, value in own.items() if key != "_target_"}
    path = own.get("_target_", shared.path)
    if path == shared.path:
        arguments = {**shared.arguments, **arguments}
    try:
        return Target(path, arguments, shared.allow).check(place)
    except ConfigError as error:
        problems.extend(error.problems)
        return shared


def _clip_norm(place: str, own: Mapping[str, Any], train: TrainOptions, problems: list[Problem]) -> float | None:
    if "clip_norm" not in own:
        return train.clip_norm
    value, annotation = own["clip_norm"], typing.get_type_hints(TrainOptions, include_extras=True)["clip_norm"]
    try:
        return typing.cast("float | None", fit(value, annotation))
    except UnfitError as unfit:
        problems.append(Problem(f"{place}={show(value)}: {unfit}", hint_for(place, value, annotation)))
        return None


def _unknown(place: str, key: Any) -> Problem:
    guess = did_you_mean(str(key), (*GROUPS, "clip_norm"))
    there_is = f"there is {', '.join((*GROUPS, 'clip_norm'))}"
    return Problem(f"unknown key '{place}.{key}'", f"did you mean {place}.{guess}?" if guess else there_is)
