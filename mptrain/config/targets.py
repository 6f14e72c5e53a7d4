"""Classes and functions that YAML names with ``_target_``: imports them, checks their arguments and calls them.

A target is a public class or function, defined in a package that its group allows (`mptrain.config.allowed_targets`).
Nothing is called before everything has been checked.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mptrain.config.allowed_targets import is_allowed, resolve
from mptrain.config.catalogue import SHARED
from mptrain.config.synonyms import translate
from mptrain.config.torchvision_networks import (
    PASSED_ON,
    hint_by_name,
    is_of_torchvision,
    may_be_name_of_weights,
    without_pretrained,
)
from mptrain.config.value_checks import UNRESOLVED, check_field, first_line, show
from mptrain.system.errors import (
    ConfigError,
    MptrainError,
    Problem,
    did_you_mean,
    out_of_memory,
)

#: Facts that data sets provide (`mptrain.workloads.base.dataset.Dataset.facts`).
DATA_FACTS = (
    *("num_classes", "class_names", "in_channels", "image_size", "upscale", "boxes"),
    *("input_shape", "num_outputs", "output_names", "target_mean", "target_std", "label_counts"),
    *(
        "vocabulary_size",
        "tokenizer_padding",
        "sequence_length",
        "lanes",
        "source_vocabulary_size",
        "target_vocabulary_size",
    ),
    *(
        "shared_vocabulary",
        "feature_size",
        "sample_rate",
        "levels",
        "speakers",
        "speaker_names",
        "decode",
        "decode_source",
    ),
)


def facts_in(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in the content of a run's ``data.json`` by name, with tuples for lists.

    Older versions did not write ``input_shape`` of images and ``num_outputs`` of classes, which follow from others.
    """
    known = {name: card[name] for name in DATA_FACTS if name in card}
    facts = {name: tuple(fact) if isinstance(fact, list) else fact for name, fact in known.items()}
    if {"in_channels", "image_size"} <= facts.keys():
        facts.setdefault("input_shape", (facts["in_channels"], facts["image_size"], facts["image_size"]))
    return {"num_outputs": facts["num_classes"], **facts} if "num_classes" in facts else facts


#: Parameters that a target may require and that mptrain, not the configuration, supplies.
FACTS: dict[str, tuple[str, ...]] = {
    "model": DATA_FACTS,
    "optimizer": ("params",),
    "schedule": ("optimizer", "max_lr", "steps_per_epoch", "T_max", "total_iters", "total_steps", "t_initial"),
    "dataset": ("seed", "batch_size", "labels", "fitted"),
    "task": DATA_FACTS,
}


@dataclass(frozen=True)
class Parameter:
    """A keyword argument that a class or function accepts.

    Attributes:
        annotation: Its type annotation; None if unknown.
        required: Whether it has no default.
    """

    annotation: Any
    required: bool


@dataclass(frozen=True)
class Given:
    """Class or function that a Python program gives in place of one that YAML names.

    Attributes:
        path: Its dotted name on record, in angle brackets if nobody can import it.
        call: What is called as a target is: with the keys of its group and with facts.
        module: Module of the program that gets the trained weights; None for none.
    """

    path: str
    call: Callable[..., Any]
    module: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Target:
    """A class or function named in YAML (``_target_``) together with its keyword arguments.

    Attributes:
        path: Dotted path of the class or function.
        arguments: Keyword arguments; `check` converts them to the annotated types.
        allow: Patterns of the allowed packages: `PACKAGES` of its group, and those that the user allows.
        fetch: Arguments that are allowed to cause a download.
        facts: Maps further keywords to the facts of the data set to pass for them (``model.facts``); None if the
            configuration says nothing about them.
        instance: Instance that `check` has built, if the callable is a frozen dataclass; else None. For an optimizer
            with torch's interface, its `mptrain.optimizer.torch_rule.TorchRule`.
        options: Keys of the node that are no arguments of the callable, with checked values.
        given: The class or function itself, if a Python program has given it; None to import it.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    facts: Mapping[str, str] | None = None
    instance: Any = field(default=None, compare=False, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def resolve(self) -> Callable[..., Any]:
        """Return the class or function: the given one, which needs no permission, or else import it.

        Raises:
            ConfigError: It is not allowed, not importable, or not a class or function of that package.
        """
        return resolve(self.path, self.allow) if self.given is None else self.given

    def build(self, **facts: Any) -> Any:
        """Call the class or function with its arguments, and return the result.

        The instance that `check` has built is returned if no fact is added, because it is frozen.

        A callable with ``**kwargs`` may pass them on to one that rejects unknown keywords, so it gets only the facts
        that it has parameters for and those in ``facts``, and of torchvision `PASSED_ON`.

        Only arguments in ``fetch`` may download: otherwise a data set gets ``download=False``, torchvision's networks
        get random weights, and models with a parameter ``pretrained`` get ``download=False``.

        Args:
            facts: Values that mptrain supplies, such as ``num_classes`` of the data set. Those are passed that the
                callable has a parameter for, or that `Target.facts` names, and that the configuration does not set.

        Raises:
            ConfigError: The class or function cannot be imported, or rejects its arguments.
        """
        if self.instance is not None and not facts:
            return self.instance
        target = self.resolve()
        accepted, open_ended = parameters(target)
        wanted = {name: name for name in accepted} | dict(self.facts or {})
        if open_ended and is_of_torchvision(self.path):
            wanted = PASSED_ON | wanted
        extra = {name: facts[fact] for name, fact in wanted.items() if fact in facts and name not in self.arguments}
        if self.instance is not None and not extra:
            return self.instance
        try:
            with without_pretrained(self.path, self.arguments, accepted, self.fetch) as fresh:
                typed = {"download", "pretrained"} & {*self.fetch}
                withheld = {"download": False} if "download" in accepted and not typed else {}
                return target(**fresh, **{**self.arguments, **withheld}, **extra)
        except MptrainError:
            raise
        except ValueError as error:
            raise ConfigError(f"{self.path} rejects its arguments: {error}") from error
        except Exception as error:  # constructors of users and torchvision may raise anything; mptrain's are re-raised
            if refused := out_of_memory(error, f"building {self.path}"):
                raise refused from error
            if is_allowed(self.path, ("mptrain",)):
                raise
            hint = hint_by_name(self.path) or (_how_to_tell(error, extra) if open_ended else "")
            raise self._cannot_be_built(error, hint) from error

    def _cannot_be_built(self, error: Exception, hint: str = "") -> ConfigError:
        given = ", ".join(f"{name}={show(value)}" for name, value in self.arguments.items())
        return ConfigError(
            f"{self.path} cannot be built with {given or 'its defaults'}: {type(error).__name__}: {first_line(error)}",
            hint or "--traceback shows where it failed",
        )

    def check(self, group: str, *, other_facts: bool = False) -> Target:
        """Check the arguments against the callable's signature and return the target with converted ones.

        A dataclass is also built, to run its own checks, unless it is a model or a data set.

        Args:
            group: Key of the target in the configuration, such as ``optimizer``.
            other_facts: Whether the data set may supply unknown facts, so that only `build` checks for missing
                arguments.

        Raises:
            ConfigError: With all problems found.
        """
        target = self.resolve()
        accepted, open_ended = parameters(target)
        problems: list[Problem] = []
        converted: dict[str, Any] = {}
        facts = FACTS.get(group.rpartition(".")[2], ())
        takes = f"it takes {', '.join(name for name in accepted if name not in facts) or 'nothing'}"
        for name, value in self.arguments.items():
            if name not in accepted:
                if not open_ended:
                    guess = did_you_mean(name, [known for known in accepted if known not in facts])
                    meant = _shared(group, name, value) or (f"{group}.{guess}={show(value)}" if guess else "")
                    hint = f"did you mean {meant}?" if meant else takes
                    what = f"unknown key '{group}.{name}': {self.path} has no such argument"
                    problems.append(Problem(what, hint, f"{group}.{name}"))
                converted[name] = value
                continue
            annotation = accepted[name].annotation
            if may_be_name_of_weights(self.path, name, value):
                annotation = None
            converted[name] = (
                value if annotation is None else check_field(f"{group}.{name}", value, annotation, problems)
            )
        for name in () if open_ended else {*(self.facts or ())} - {*accepted}:
            problems.append(Problem(f"{group}.facts names {name}, but {self.path} has no such argument", takes))
        missing = [name for name, known in accepted.items() if known.required and name not in {*self.arguments, *facts}]
        missing = [name for name in missing if name not in (self.facts or ())]
        for name in () if other_facts else missing:
            passed = f"; the data set passes {', '.join(facts)} by name" if group in ("model", "task") else ""
            sign = "+" * (group in ("model", "task", "dataset") and self.given is None)
            hint = f"set {sign}{group}.{name}=VALUE{passed}"
            if self.given is not None:
                own = self.path.rpartition(".")[2]
                hint = f"set {group}.{name}=VALUE, give it a default, or give functools.partial({own}, {name}=VALUE)"
                hint += "; facts of the data, such as num_classes, num_outputs and input_shape, are passed by name"
            problems.append(Problem(f"{group}.{name} is required by {self.path}", hint))
        if problems:
            raise ConfigError(problems)
        complete = all(name in converted for name, known in accepted.items() if known.required)
        complete = complete and UNRESOLVED not in converted.values()
        instance = None
        # Building a model or a data set may take seconds and read files.
        if complete and dataclasses.is_dataclass(target) and group not in ("model", "dataset"):
            try:
                instance = target(**converted)
            except MptrainError:
                raise
            except ValueError as error:
                raise ConfigError(f"{group}: {error}") from error
            except Exception as error:  # as in `build`: a class of a user, or one with a method missing
                if is_allowed(self.path, ("mptrain",)):
                    raise
                raise self._cannot_be_built(error) from error
        frozen = instance is not None and typing.cast("Any", target).__dataclass_params__.frozen
        return dataclasses.replace(self, arguments=converted, instance=instance if frozen else None)


def _shared(group: str, name: str, value: Any) -> str:
    """Return the override that another framework's name of a key of every option of the group means; or empty text."""
    words = translate(name, show(value))
    return words if words.startswith(tuple(entry.key for entry in SHARED.get(group, ()))) else ""


def _how_to_tell(error: Exception, passed: Mapping[str, Any]) -> str:
    """Return the hint for a callable with ``**kwargs`` whose error names facts that were not passed to it."""
    named = [name for name in DATA_FACTS if name in str(error) and name not in passed]
    return f"model.facts=[{','.join(named)}] passes it what the data set knows" if named else ""


def parameters(target: Callable[..., Any]) -> tuple[dict[str, Parameter], bool]:
    """Return the keyword arguments that a class or function accepts.

    Returns:
        The arguments by name, and whether the callable accepts others too (``**kwargs``). A callable without a readable
        signature gives ``({}, True)``.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return {}, True
    accepted = {
        name: Parameter(_annotation(target, name), parameter.default is inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return accepted, open_ended


def _annotation(target: Callable[..., Any], name: str) -> Any:
    """Return the annotation of one parameter; None if it uses a name that does not exist at run time.

    Annotations are resolved one by one, so that one that fails (a type imported for type checkers only) does not
    leave the others unchecked.
    """
    sources: list[Any] = [inspect.unwrap(target)]
    if inspect.isclass(target):
        sources = [*target.__mro__, *(vars(base).get("__init__") for base in target.__mro__)]
    for source in sources:
        annotation = getattr(source, "__annotations__", {}).get(name)
        if annotation is None:
            continue
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        names = getattr(source, "__globals__", None) or vars(sys.modules[source.__module__])
        try:
            return typing.get_type_hints(holder, globalns=names, include_extras=True)[name]
        except Exception:  # annotations of third parties may contain anything
            return None
    return None
