"""Groups of parameters with their own learning rate and weight decay, rates that fall by layer, and freezing.

The learning rate of a parameter is the schedule's rate times its factor. Factors and weight decays are fixed numbers,
so the schedule and its records stay those of the whole optimizer.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, Le
from torch import nn

from mptrain.optimizer.rules import ParameterOptions, Rule
from mptrain.system.errors import ConfigError, Problem, did_you_mean
from mptrain.system.fields import NonNegativeFloat
from mptrain.system.machine import load_extra
from mptrain.system.torch_private import BatchNorm

if TYPE_CHECKING:
    from mptrain.optimizer.torch_rule import TorchRule


#: Factor of the learning rate from one layer to the one before it.
LayerDecay = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate or a weight decay of their own; an entry of ``optimizer.groups``.

    ``match`` has patterns of parameter names, in which ``*`` matches any text: ``layer1.*``. ``weight_decay`` applies
    to all parameters of the group, also to those with one dimension; None means that of the optimizer.
    """

    match: tuple[str, ...] | str
    lr_factor: NonNegativeFloat = 1.0
    weight_decay: NonNegativeFloat | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of parameter names."""
        return (self.match,) if isinstance(self.match, str) else self.match


def parameter_options(
    named: Mapping[str, nn.Parameter],
    rule: Rule | TorchRule,
    groups: Sequence[ParameterGroup] = (),
    layer_factors: Mapping[str, float] | None = None,
) -> dict[str, ParameterOptions]:
    """Return learning rate factor and weight decay of each parameter, by name.

    The weight decay of the rule applies to parameters with two dimensions or more unless it asks for all. The first
    group that matches a parameter counts. ``layer_factors`` are further factors of the learning rate.
    """
    options = {}
    for name, parameter in named.items():
        decays = parameter.ndim > 1 or rule.decay_norms_and_biases
        factor, decay = (layer_factors or {}).get(name, 1.0), rule.weight_decay if decays else 0.0
        group = next((group for group in groups if matches(name, group.patterns)), None)
        if group is not None:
            factor *= group.lr_factor
            decay = decay if group.weight_decay is None else group.weight_decay
        options[name] = ParameterOptions(factor, decay)
    return options


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches a name; upper and lower case differ."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def require_matches(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest names as hints, if patterns under a configuration key match no name."""
    known = list(names)
    modules = dict.fromkeys(f"{name.rpartition('.')[0]}.*" for name in known if "." in name)
    problems = []
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in known):
            inside = [name for name in known if name.startswith(f"{pattern}.")]
            guess = f"{pattern}.*" if inside else did_you_mean(pattern, [*known, *modules])
            hint = f"did you mean {guess}?" if guess else f"its first names are {', '.join(known[:4])}"
            problems.append(Problem(f"{key}: '{pattern}' matches no parameter of the model", hint))
    if problems:
        raise ConfigError(problems)


def layer_factors(model: nn.Module, names: Sequence[str], decay: float) -> dict[str, float]:
    """Return factors of the learning rate that fall from the last layer of a model to its first, by parameter name.

    The factor is ``decay ** depth``; the depth of the last layer is 0. A model of timm says which parameters form a
    layer (``group_matcher``). For any other model the layers are blocks of parameters (`block_of`) in the order of the
    parameters. What follows the entries of a list in the same block, such as a final norm, is a layer of its own.
    ``names`` are in order and include those of frozen layers.
    """
    layers = _layers_of_timm(model, names)
    if layers is None:
        order: dict[str, int] = {}
        layers = {}
        for name in names:
            block = block_of(model, name)
            if any(other.startswith(f"{block}.") for other in order):
                block += "."  # behind its entries
            layers[name] = order.setdefault(block, len(order))
    last = max(layers.values(), default=0)
    return {name: decay ** (last - layer) for name, layer in layers.items()}


def block_of(model: nn.Module, name: str) -> str:
    """Return the block of a parameter: the entry of the outermost list of modules that it is in, or its first part.

    A list is an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`. ``layers.3.linear.weight`` belongs to
    ``layers.3``, ``features.2.bias`` to ``features.2``, ``head.weight`` to ``head``.
    """
    parts, module = name.split("."), model
    for index, part in enumerate(parts[:-1]):
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return ".".join(parts[: index + 1])
        module = getattr(module, part)
    return parts[0]


def _layers_of_timm(model: nn.Module, names: Sequence[str]) -> dict[str, int] | None:
    for path, module in model.named_modules():
        prefix, matcher = f"{path}." if path else "", getattr(module, "group_matcher", None)
        if callable(matcher) and all(name.startswith(prefix) for name in names):
            models = load_extra("timm.models", "timm", "optimizer.layer_decay with a model of timm")
            numbers: dict[str, int] = models.group_parameters(module, matcher(coarse=False), reverse=True)
            last = max(numbers.values())
            return {name: numbers.get(name.removeprefix(prefix), last) for name in names}
    return None


def describe_options(options: Iterable[ParameterOptions]) -> str:
    """Describe in one line the learning rates and weight decays of all trained parameters, for the user."""
    known = list(options)
    factors, decays = (sorted({option[index] for option in known}) for index in (0, 1))
    rates = f"{len(factors)} learning rates, x{factors[0]:.3g} to x{factors[-1]:.3g} of the schedule's"
    if len(factors) == 1:
        rates = f"learning rate x{factors[0]:.3g}"
    shown = ", ".join(f"{decay:.3g}" for decay in decays)
    return f"{rates}; weight decay{'s' if decays[1:] else ''} {shown}"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters of a model whose names match a pattern such as ``layer1.*``, in place.

    They require no gradient. A BatchNorm whose running mean matches stays in evaluation mode: it normalises with its
    running statistics and does not change them, so that the frozen part of a network remains the function that it was.
    Its copies do the same. Raises ConfigError if a pattern matches neither a parameter nor a buffer.
    """
    if not patterns:
        return
    names = [name for name, _ in model.named_parameters()]
    require_matches("model.freeze", patterns, [*names, *(name for name, _ in model.named_buffers())])
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm) and matches(f"{path}.running_mean".lstrip("."), patterns):
            module.__class__ = _evaluating_subclass(type(module))  # type: ignore[arg-type]
            module.train(False)


@functools.cache
def _evaluating_subclass(cls: type[nn.Module]) -> Any:
    def train(self: Any, mode: bool = True) -> Any:
        return cls.train(self, False)

    return type(cls.__name__, (cls,), {"train": train, "__module__": cls.__module__})
