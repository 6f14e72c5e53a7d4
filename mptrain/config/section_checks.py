"""Checks of a configuration that need several fields: whole sections, learners, combinations of parts; and warnings.

Imports no torch. `mptrain.config.targets` has the checks of a target's own fields.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mptrain.config.schema import LEARNER_GROUPS, LearnerChoices
from mptrain.config.targets import Target
from mptrain.config.value_checks import check_field, fields_of, section_of, show
from mptrain.engine.options import TrainOptions
from mptrain.numerics.formats import FLOAT16, FLOAT32
from mptrain.precision.policy import Policy
from mptrain.system.errors import ConfigError, Problem, did_you_mean

_HINT = "write for example learners.discriminator.optimizer.lr=4e-4"

#: The smallest positive FP16 number, 2^-24.
FP16_TINY = 2.0**-24

#: Arguments of a scaler that multiply or divide the loss scale.
SCALES = ("scale", "init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")


#: Arguments in `SCALES` that are factors of the rule, not scales that depend on the network.
FACTORS = ("growth_factor", "backoff_factor")


def check_compatible(policy: Policy, optimizer: Target, engine: str = "eager") -> list[Problem]:
    """Return the problems of an optimizer in a precision mode and step engine.

    An eps underflows in FP16 optimizer state. An optimizer with torch's interface has no FP16 state and no CUDA graphs.

    Args:
        policy: The precision policy.
        optimizer: The checked optimizer.
        engine: Value of ``train.engine``.
    """
    if optimizer.instance is not None:
        from mptrain.optimizer.torch_rule import TorchRule  # imports torch, as making the optimizer has done

        if isinstance(optimizer.instance, TorchRule):
            return _check_torch_rule(policy, optimizer.instance.name, engine)
    if policy.optimizer_state != "parameters" or policy.parameters != "float16":
        return []
    eps = optimizer.arguments.get("eps", getattr(optimizer.resolve(), "eps", None))  # the dataclass default
    if isinstance(eps, (int, float)) and eps < FP16_TINY:
        what = (
            f"optimizer.eps={eps:g} with precision.optimizer_state=parameters in float16: "
            f"below {FP16_TINY:.3g} (2^-24) FP16 rounds it to zero, and the update divides by zero"
        )
        return [Problem(what, "set optimizer.eps=1e-4, or precision.optimizer_state=float32")]
    return []


def _check_torch_rule(policy: Policy, name: str, engine: str) -> list[Problem]:
    ours, problems = "choose one of sgd, adam, adamw and adagrad", []
    if policy.optimizer_state == "parameters" and policy.parameters == "float16":
        what = (
            f"precision.optimizer_state=parameters in float16 with {name}: it takes unscaled gradients in the dtype of "
            "its weights, and they underflow in float16"
        )
        problems.append(Problem(what, f"set precision.optimizer_state=float32, or {ours}"))
    if engine == "graph":
        what = f"train.engine=graph with {name}: its updates depend on numbers on the host, which a graph would repeat"
        problems.append(Problem(what, f"set train.engine=eager, or {ours}"))
    return problems


def check_emulation(policy: Policy, train: TrainOptions) -> list[Problem]:
    """Return the problems of emulated formats with what does not run a step operator by operator on the host."""
    what = f"with precision.emulate={policy.emulate}: the host decides for each operator which operands are rounded"
    compiled = Problem(f"train.compile=true {what}", "set train.compile=false")
    captured = Problem(f"train.engine=graph {what}", "set train.engine=eager")
    asked = ((compiled, train.compile), (captured, train.engine == "graph"))
    return [problem for problem, wanted in asked if wanted and policy.emulate is not None]


def check_train(train: TrainOptions) -> list[Problem]:
    """Return the problems between fields of section ``train``: more micro-batches per update than samples."""
    if train.accumulate <= train.batch_size:
        return []
    both = f"train.accumulate={train.accumulate} with train.batch_size={train.batch_size}"
    hint = f"set train.accumulate={train.batch_size} or less, or a larger train.batch_size"
    return [Problem(f"{both}: a micro-batch needs at least one sample", hint)]


def warnings_about(scaler: Target, written: Collection[str]) -> list[str]:
    """Return warnings about valid but probably unintended values of a loss scaler: scales that are not powers of two.

    Args:
        scaler: The loss scaler.
        written: Keys on the command line. Growth and backoff factors from a preset's file get no warning.
    """
    sentences = []
    for name in SCALES:
        value = scaler.arguments.get(name)
        if not isinstance(value, (int, float)) or value <= 0 or math.frexp(value)[0] == 0.5:
            continue
        if name == "max_scale" and value in (FLOAT16.max, FLOAT32.max):  # the largest FP16 value, or no limit
            continue
        if name in FACTORS and f"scaler.{name}" not in written:
            continue
        nearest = round(math.log2(value))
        if name in FACTORS:  # a factor of 1 is invalid
            nearest = max(nearest, 1) if value > 1 else min(nearest, -1)
        power = f"{2.0**nearest:.15g}" if -10 <= nearest <= 32 else f"2^{nearest}"
        sentences.append(
            f"scaler.{name}={show(value)} is not a power of two, so scaling rounds the gradients; nearest: {power}"
        )
    return sentences


def read_learners(
    node: Any, shared: Mapping[str, Target], train: TrainOptions, problems: list[Problem]
) -> dict[str, LearnerChoices]:
    """Check section ``learners``: settings of single learners (a model with its optimizer; a GAN has two).

    Args:
        node: The ``learners`` section. Maps name to ``optimizer``, ``schedule``, ``scaler`` (the keys that differ, or
            all keys if it has a ``_target_`` of its own) and ``clip_norm``.
        shared: The checked targets of `LEARNER_GROUPS`, which complete the settings.
        train: Options with the shared ``clip_norm``.
        problems: List to which problems are added.

    Returns:
        Complete settings of the learners in the section, by name.
    """
    if not isinstance(node, Mapping):
        problems.append(Problem(f"learners={show(node)}: must be a mapping from learner names to settings", _HINT))
        return {}
    known = (*LEARNER_GROUPS, "clip_norm")
    chosen, hints = {}, typing.get_type_hints(TrainOptions, include_extras=True)
    for name, own in node.items():
        if not isinstance(own, Mapping):
            problems.append(Problem(f"learners.{name}={show(own)}: must be a mapping", _HINT))
            continue
        problems += [_unknown(f"learners.{name}", key, known) for key in own if key not in known]
        parts = {
            group: _merge(f"learners.{name}.{group}", own.get(group), shared[group], problems)
            for group in LEARNER_GROUPS
        }
        clip = own.get("clip_norm", train.clip_norm)
        clip = check_field(f"learners.{name}.clip_norm", clip, hints["clip_norm"], problems)
        chosen[str(name)] = LearnerChoices(**parts, clip_norm=clip)
    return chosen


def _merge(target_key: str, own: Any, shared: Target, problems: list[Problem]) -> Target:
    if own is None:
        return shared
    if not isinstance(own, Mapping):
        problems.append(Problem(f"{target_key}={show(own)}: must be a mapping of the keys that differ", _HINT))
        return shared
    named = {"_target_": shared.path, **own}
    path = str(named["_target_"])
    arguments = {str(key): value for key, value in named.items() if key != "_target_"}
    if path == shared.path:
        arguments = {**shared.arguments, **shared.options, **arguments}
    try:
        return check_target(Target(path, arguments, shared.allow), target_key)
    except ConfigError as error:
        problems.extend(error.problems)
        return shared


def check_target(target: Target, target_key: str, *, other_facts: bool = False) -> Target:
    """Check the keys of a target, and return it with converted arguments; see `Target.check`.

    Args:
        target: The target as configured.
        target_key: Its key in the configuration: a group, or ``learners.NAME.GROUP``.
        other_facts: Whether the data set may supply unknown facts.

    Raises:
        ConfigError: With all problems found.
    """
    group = target_key.rpartition(".")[2]
    if group == "optimizer":
        from mptrain.config.learner_checks import check_optimizer  # imports torch, as optimizers do

        return check_optimizer(target, target_key)
    if group == "schedule":
        from mptrain.config.learner_checks import check_schedule  # imports torch, as schedulers do

        return check_schedule(target, target_key)
    return target.check(target_key, other_facts=other_facts)


def _unknown(prefix: str, key: Any, known: Sequence[str]) -> Problem:
    guess = did_you_mean(str(key), known)
    hint = f"did you mean {prefix}.{guess}?" if guess else f"the keys are {', '.join(known)}"
    return Problem(f"unknown key '{prefix}.{key}'", hint)


def keys_of(name: str, schema: type) -> Iterator[str]:
    """Yield the dotted keys of a section of the configuration, and those of sections inside it.

    Args:
        name: Key of the section.
        schema: Its dataclass.
    """
    hints = typing.get_type_hints(schema, include_extras=True)
    for field in fields_of(schema):
        yield f"{name}.{field.name}"
        if (inner := section_of(hints[field.name])) is not None:
            yield from keys_of(f"{name}.{field.name}", inner)
