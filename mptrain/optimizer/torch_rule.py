"""Optimizers with torch's interface in place of an update rule: those of torch.optim and timm by name, and any other.

Such an optimizer is a `torch.optim.Optimizer`: it is made of its parameters, and ``step()`` reads their ``grad``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mptrain.system.device import capabilities
from mptrain.system.errors import ConfigError, did_you_mean, instance
from mptrain.system.extras import load_extra
from mptrain.system.torch_private import has_kernel

if TYPE_CHECKING:
    from mptrain.optimizer.rules import ParameterOptions

#: Makes an optimizer of groups of parameters, as torch.optim's classes do.
OptimizerClass = Callable[..., torch.optim.Optimizer]

#: Optimizers that update each element from that element's own gradients alone, and so equally well in shards. Of timm,
#: those that are not torch.optim's too.
ELEMENTWISE = frozenset(
    {
        *(f"torch.optim.{name}" for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam")),
        *(f"torch.optim.{name}" for name in ("RAdam", "RMSprop", "Rprop", "SGD")),
        *(f"timm.optim.{name}" for name in ("AdaBelief", "AdamWLegacy", "Adan", "Adopt", "LaProp", "Lion", "MADGRAD")),
        *(f"timm.optim.{name}" for name in ("NAdamLegacy", "NAdamW", "RAdamLegacy", "RMSpropTF", "SGDW")),
    }
)

#: Options with which optimizers of timm read a whole tensor for each element.
_OF_WHOLE_TENSORS = ("caution", "clipping_threshold")


@dataclass(frozen=True)
class TorchRule:
    """Optimizer with torch's interface and its constants, before its parameters are known.

    Attributes:
        kind: Class or function that makes the optimizer.
        name: Name of the optimizer's class, for messages: ``torch.optim.RAdam``.
        decays: The optimizer has a weight decay.
        elementwise: Each element is updated from its own gradients alone, so that shards can be updated.
        draws: An update draws random numbers, which differ between ranks.
    """

    kind: OptimizerClass
    name: str
    arguments: Mapping[str, Any]
    lr: float
    weight_decay: float
    decay_norms_and_biases: bool
    decays: bool
    elementwise: bool
    draws: bool

    def make(
        self, leaves: Sequence[nn.Parameter], options: Sequence[ParameterOptions]
    ) -> tuple[list[torch.optim.Optimizer], list[float]]:
        """Return the optimizers of P parameters, and the learning rate factor of each of their groups in order.

        torch.optim.Muon takes only matrices. The other parameters get torch.optim.AdamW with the same learning rate and
        weight decay. Raises ConfigError if the optimizer cannot be made of these parameters.
        """
        pairs = list(zip(leaves, options, strict=True))
        kinds = [(self.kind, self.arguments, pairs)]
        if self.name == "torch.optim.Muon":
            matrices, others = ([one for one in pairs if (one[0].ndim == 2) is wanted] for wanted in (True, False))
            if not matrices:
                raise ConfigError(
                    f"{self.name} updates parameters with two dimensions, and there are none", "choose adamw"
                )
            kinds = [(self.kind, self.arguments, matrices), (torch.optim.AdamW, {"lr": self.lr}, others)]
        optimizers, factors = [], []
        for kind, arguments, members in kinds:
            alike: dict[ParameterOptions, list[nn.Parameter]] = {}
            for leaf, own in members:
                alike.setdefault(own, []).append(leaf)
            groups: list[dict[str, Any]] = [
                {"params": alike[own], "lr": self.lr * own.lr_factor}
                | ({"weight_decay": own.weight_decay} if self.decays else {})
                for own in alike
            ]
            if groups:
                try:
                    made = kind(groups, **prefer_fused(kind, arguments, leaves[0].device))
                except Exception as error:  # constructors of third parties may raise anything
                    raise self.failed("cannot be made of the model's parameters", error) from error
                optimizers.append(made)
                # As the optimizer keeps them: it may sort or split groups, or choose a rate of its own for some.
                given = {self.lr * own.lr_factor: own.lr_factor for own in alike}
                for lr in (float(group.get("lr", self.lr)) for group in made.param_groups):
                    factors.append(given[lr] if lr in given else lr / self.lr if self.lr else 1.0)
        return optimizers, factors

    def failed(self, what: str, error: Exception) -> ConfigError:
        """Return an error about an exception that the optimizer has raised."""
        said = str(error).strip().partition("\n")[0]
        return ConfigError(
            f"{self.name} {what}: {type(error).__name__}: {said}",
            "choose another optimizer, or other arguments; --traceback shows where it failed",
        )

    def refused(self, what: str) -> ConfigError:
        """Return an error about an optimizer that does not update the parameters that it was given."""
        return ConfigError(
            f"{self.name} {what}",
            "let step() change the parameters that the optimizer was given, or choose another optimizer or rate",
        )

    def unsaved(self, what: str) -> ConfigError:
        """Return an error about state of the optimizer that cannot be saved."""
        return ConfigError(
            f"{self.name} keeps {what}, which a checkpoint cannot hold",
            "choose another optimizer: a run must be able to resume",
        )


def adapt(kind: OptimizerClass, arguments: Mapping[str, Any], *, decay_norms_and_biases: bool = False) -> TorchRule:
    """Return the rule of an optimizer with torch's interface, whose arguments are given without ``params``.

    The optimizer is made once of a parameter of four zeros, to check its arguments and to learn its default learning
    rate. Raises ConfigError if it rejects its arguments, is no optimizer of this interface, or needs what a training
    step does not have, such as a second evaluation of the loss.
    """
    if inspect.isclass(kind) and (why := _obstacle(kind)):
        raise ConfigError(f"{public_name(kind)} {why}", _OTHER)
    try:
        trial = kind([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception as error:  # constructors of third parties may raise anything
        raise ConfigError(
            f"{public_name(kind)} rejects its arguments: {type(error).__name__}: {error}", _arguments_of(kind)
        ) from error
    if not isinstance(trial, torch.optim.Optimizer):
        raise ConfigError(
            f"{public_name(kind)} returned {instance(trial)}, not a torch.optim.Optimizer",
            "name a class or function that returns one",
        )
    name, defaults = public_name(type(trial)), trial.defaults
    if why := _obstacle(type(trial)):
        raise ConfigError(f"{name} {why}", _OTHER)
    lr = defaults.get("lr")
    if not isinstance(lr, int | float):
        raise ConfigError(f"{name} sets its own learning rate: its lr is {lr}", "set optimizer.lr=0.001")
    whole = any(defaults.get(option) for option in _OF_WHOLE_TENSORS)
    return TorchRule(
        kind=kind,
        name=name,
        arguments=dict(arguments),
        lr=float(lr),
        weight_decay=float(defaults.get("weight_decay") or 0.0),
        decay_norms_and_biases=decay_norms_and_biases,
        decays="weight_decay" in defaults,
        elementwise=name in ELEMENTWISE and not whole,
        draws=name == "timm.optim.kron.Kron" and not getattr(trial, "deterministic", False),
    )


_OTHER = "choose another optimizer; mptrain list optimizer shows some"


def _obstacle(kind: type[Any]) -> str:
    """Return why a training step cannot drive an optimizer, to follow its name; empty if nothing is known."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    if closure is not None and closure.default is closure.empty:
        return "evaluates the loss several times in an update, and a training step has one forward and backward pass"
    if issubclass(kind, torch.optim.SparseAdam):
        return "takes sparse gradients only, and gradients are dense here"
    if public_name(kind) == "timm.optim.Adahessian":
        return "needs second derivatives, and a training step keeps no graph for them"
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        return "keeps other weights for evaluation (it has train() and eval()), which evaluations would not use"
    return ""


def prefer_fused(kind: OptimizerClass, arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments of an optimizer, with ``fused=True`` if torch has a fused kernel of it for the device.

    The user's own choice of ``fused`` or ``foreach`` is kept. Classes that derive from torch's may have steps of their
    own, so only torch's own are changed.
    """
    chosen = any(arguments.get(option) is not None for option in ("fused", "foreach"))
    own = inspect.isclass(kind) and getattr(torch.optim, kind.__name__, None) is kind
    odd = arguments.get("differentiable") or arguments.get("dampening")  # for which see begin_late_momentum
    if chosen or odd or not own or not capabilities(device).fused:
        return dict(arguments)
    there = has_kernel(f"aten::_fused_{kind.__name__.lower()}_", device.type.upper())
    return {**arguments, "fused": True} if there else dict(arguments)


def _arguments_of(kind: OptimizerClass) -> str:
    known = [name for name in inspect.signature(kind).parameters if name not in ("params", "kwargs")]
    return f"it takes {', '.join(known)}" if known else ""


def public_name(kind: Callable[..., Any]) -> str:
    """Return the dotted name of a class or function, the shorter one if its package has it: ``torch.optim.RAdam``."""
    module, name = kind.__module__, getattr(kind, "__qualname__", type(kind).__qualname__)
    short = ".".join(module.split(".")[:2])
    return f"{short if getattr(sys.modules.get(short), name, None) is kind else module}.{name}"


def torch_optimizer(name: str) -> tuple[OptimizerClass, dict[str, Any]]:
    """Return an optimizer of torch.optim by its name, such as ``RAdam``, without arguments, or raise ConfigError."""
    found = getattr(torch.optim, name, None)
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found, {}
    kinds = {other: kind for other, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    base = torch.optim.Optimizer
    names = [other for other, kind in kinds.items() if issubclass(kind, base) and kind is not base]
    raise _unknown("torch.optim", name, names)


def timm_optimizer(name: str) -> tuple[OptimizerClass, dict[str, Any]]:
    """Return an optimizer of timm by its name, such as ``lion``, and the arguments that timm's name implies.

    ``clion`` is ``timm.optim.Lion`` with ``caution=True``. As in timm, an optimizer with a momentum has 0.9. Raises
    EnvironmentRefused if timm is not installed, ConfigError if it has no such optimizer or one of a further package.
    """
    library = load_extra("timm.optim", "timm", "optimizer=timm")
    try:
        info = library.get_optimizer_info(name)
    except ValueError:
        raise _unknown("timm", name, library.list_optimizers()) from None
    if isinstance(info.opt_class, str):
        raise ConfigError(
            f"timm's {name} is {info.opt_class}, a class of another package",
            f"name it in a file of yours, with _target_: {info.opt_class}, and add"
            f" 'extensions.allow=[{info.opt_class.split('.')[0]}]'",
        )
    momentum = {"momentum": 0.9} if info.has_momentum else {}
    return cast("OptimizerClass", info.opt_class), {**momentum, **(info.defaults or {})}


def _unknown(where: str, name: str, names: list[str]) -> ConfigError:
    guess = did_you_mean(name, names)
    hint = f"did you mean optimizer.name={guess}?" if guess else f"its optimizers are {', '.join(sorted(names))}"
    return ConfigError(f"{where} has no optimizer {name}", hint)
