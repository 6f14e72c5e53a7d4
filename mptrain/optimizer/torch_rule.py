"""Optimizers with torch's interface in place of an update rule, by name or any other, and their state in a checkpoint.

Such an optimizer is a `torch.optim.Optimizer`: it is made of its parameters, and ``step()`` reads their ``grad``.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mptrain.numerics.tensors import as_part_of, part_for
from mptrain.system.device import capabilities
from mptrain.system.errors import ConfigError, did_you_mean, instance
from mptrain.system.machine import load_extra
from mptrain.system.torch_private import has_kernel, skips_on_device

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
            matrices, others = ([pair for pair in pairs if (pair[0].ndim == 2) is wanted] for wanted in (True, False))
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
        message = str(error).strip().partition("\n")[0]
        return ConfigError(
            f"{self.name} {what}: {type(error).__name__}: {message}",
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
    kind = getattr(torch.optim, name, None)
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
        return kind, {}
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


def torch_optim_state(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Return a state dict for a `torch.optim` optimizer, to continue a run of mptrain in a program of your own.

    State tensors have torch's names and meaning (`mptrain.optimizer.rules`), and each parameter the number of its own
    updates. Learning rate and other constants are those of
    ``optimizer``. State of an optimizer with torch's interface is returned as it is. For torch.optim.Muon, whose other
    parameters torch.optim.AdamW has updated, call this once for each of the two.

    Args:
        saved: Optimizer state in a checkpoint: ``state["learners"][LEARNER]["optimizer"]``.
        optimizer: Optimizer of the same kind, over the same parameters in FP32. It is not changed; give the result to
            its ``load_state_dict``.
        named: ``dict(model.named_parameters())``.

    Raises:
        ValueError: The state belongs to another kind of optimizer or another network; the message names the parameter.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    if "kind" in saved:
        return _adapted_state(saved, optimizer, names)
    expected = _keys_of(optimizer)
    own = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(order):
        name = names.get(id(parameter), "")
        tensors = saved["state"].get(name)
        if tensors is None:
            raise ValueError(f"the checkpoint has no state of {name or 'a parameter that is not in named'}")
        if expected is not None and tensors.keys() != expected:
            raise ValueError(
                f"the checkpoint has {_words(tensors)} of {name}, but {type(optimizer).__name__}"
                f" needs {_words(expected)}"
            )
        for key, value in tensors.items():
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{key} of {name} has shape {tuple(value.shape)}, but the parameter has {tuple(parameter.shape)}"
                )
        count = saved["step"] - saved.get("missed", {}).get(name, 0)
        step = {} if tensors.keys() <= {"momentum_buffer"} else {"step": count.squeeze().cpu()}
        state[index] = {**step, **{name: value.clone() for name, value in tensors.items()}}
    return {"state": state, "param_groups": own["param_groups"]}


def _adapted_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    kind = public_name(type(optimizer))
    if kind not in saved["others"]:
        raise ValueError(f"the checkpoint has the state of {' and '.join(saved['others'])}, not of {kind}")
    kept = {name: group["values"] for group in saved["groups"] for name in group["names"]}
    own, state = optimizer.state_dict(), {}
    for group, numbered in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            name = names.get(id(parameter), "")
            if name not in kept:
                raise ValueError(f"the checkpoint has no state of {name or 'a parameter that is not in named'}")
            state[number] = copy.deepcopy(saved["state"].get(name, {}))
            numbered.update(copy.deepcopy(kept[name]))
    return {**own, "state": state, **copy.deepcopy(saved["others"][kind])}


def _keys_of(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Return the names of the state tensors of a checkpoint for an optimizer; None for an unknown kind."""
    kind, defaults = type(optimizer).__name__, optimizer.defaults
    known = {"Adam": {"exp_avg", "exp_avg_sq"}, "AdamW": {"exp_avg", "exp_avg_sq"}, "Adagrad": {"sum"}}
    if kind == "SGD":
        return {"momentum_buffer"} if defaults["momentum"] else set()
    return known.get(kind)


def _words(keys: Iterable[str]) -> str:
    return " and ".join(sorted(keys)) or "no state"


#: Entries of every optimizer's state dict.
_USUAL = ("state", "param_groups")


class TorchState:
    """State of the optimizers with torch's interface that update P parameters, in the format of checkpoints.

    The optimizers update ``leaves``, one for each parameter in ``named``, those with the names ``in_half`` in half
    precision.
    """

    def __init__(
        self,
        rule: TorchRule,
        optimizers: Sequence[torch.optim.Optimizer],
        named: Mapping[str, nn.Parameter],
        leaves: Sequence[nn.Parameter],
        in_half: Sequence[str],
    ) -> None:
        self._rule, self._optimizers, self._named, self._in_half = rule, optimizers, named, in_half
        self._names = {id(leaf): name for name, leaf in zip(named, leaves, strict=True)}
        self._initial = [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]

    def save(self) -> dict[str, object]:
        """Return the state dict of a `TorchUpdater` without the number of updates, or raise ConfigError."""
        state, on_host = {}, set()
        for leaf, entries in itertools.chain.from_iterable(optimizer.state.items() for optimizer in self._optimizers):
            name = self._names.get(id(leaf))
            if name is None:
                raise self._rule.unsaved("state that belongs to no parameter")
            state[name] = {
                key: _like_part(self._plain(key, value), leaf, self._named[name]) for key, value in entries.items()
            }
            on_host |= {key for key, value in entries.items() if _is_on_host(value) and not _is_on_host(leaf)}
        groups = [
            {
                "names": [self._names[id(leaf)] for leaf in group["params"]],
                "values": {
                    key: self._plain(key, value)
                    for key, value in _settings(group).items()
                    if key != "lr" and not (key in initial and same(initial[key], value))
                },
            }
            for group, initial in zip(groups_of(self._optimizers), itertools.chain(*self._initial), strict=True)
        ]
        others = {
            public_name(type(optimizer)): {
                key: self._plain(key, value) for key, value in optimizer.state_dict().items() if key not in _USUAL
            }
            for optimizer in self._optimizers
        }
        return {
            "state": state,
            "kind": self._rule.name,
            "groups": groups,
            "others": others,
            "on_host": sorted(on_host),
            "in_half": list(self._in_half),
        }

    def load(self, saved: Mapping[str, Any]) -> list[str]:
        """Load a state; return sentences for the user as `Updater.load_state_dict`."""
        if saved.get("kind") != self._rule.name:
            before = saved.get("kind") or "another optimizer"
            return [f"optimizer state reset: the checkpoint has the state of {before}, not of {self._rule.name}"]
        kept = {name: group["values"] for group in saved["groups"] for name in group["names"]}
        recast = set(self._in_half) ^ set(saved["in_half"])  # to another working dtype than when saved
        states = {
            name: {key: _part(value, self._named[name]) for key, value in saved["state"][name].items()}
            for name in self._named
            if name in saved["state"]
        }
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            others = saved["others"].get(public_name(type(optimizer)), {})
            self._load(optimizer, initial, states, kept, others)
            for leaf, state in optimizer.state.items():  # torch has cast it to the dtype of the parameter
                name = self._names[id(leaf)]
                for key, value in states[name].items() if name not in recast else ():
                    to_host = key in saved["on_host"] and not skips_on_device(optimizer)  # fused kernels read counts
                    state[key] = _placed(value, state.get(key), torch.device("cpu") if to_host else None)
        return []

    def _load(
        self,
        optimizer: torch.optim.Optimizer,
        initial: Sequence[Mapping[str, Any]],
        states: Mapping[str, Any],
        kept: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> None:
        """Load a state into one optimizer, whose groups keep their constants as configured (``initial``)."""
        fresh, state = optimizer.state_dict(), dict[int, dict[str, Any]]()
        groups = []
        for own, values, numbered in zip(optimizer.param_groups, initial, fresh["param_groups"], strict=True):
            names = [self._names[id(leaf)] for leaf in own["params"]]
            groups.append({**values, **kept.get(names[0], {}), "params": numbered["params"]})
            state |= {
                number: states[name] for name, number in zip(names, numbered["params"], strict=True) if name in states
            }
        optimizer.load_state_dict({**fresh, **copy.deepcopy(dict(others)), "state": state, "param_groups": groups})

    def _plain(self, key: str, value: Any) -> Any:
        """Return a value of the optimizer in plain containers, numbers, text and tensors, or raise ConfigError."""
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, Mapping):
            return {name: self._plain(key, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._plain(key, item) for item in value])
        if type(value) in (str, int, float, bool, type(None)):
            return value
        raise self._rule.unsaved(f"{instance(value)} in '{key}'")


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the parameter groups of optimizers in order."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def same(first: Any, other: Any) -> bool:
    """Return whether two values of an optimizer are equal and of the same type."""
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return torch.equal(first, other)
    return type(first) is type(other) and bool(first == other)


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _placed(value: Any, loaded: Any, device: torch.device | None) -> Any:
    """Return a copy of a saved value on a device, or where torch has loaded it; dtypes are kept."""
    if isinstance(value, Tensor):
        target = device or (loaded.device if isinstance(loaded, Tensor) else value.device)
        return value.detach().to(target, copy=True)
    if isinstance(value, Mapping):
        there = loaded if isinstance(loaded, Mapping) else {}
        return {name: _placed(item, there.get(name), device) for name, item in value.items()}
    if isinstance(value, list | tuple):
        near = loaded if isinstance(loaded, list | tuple) and len(loaded) == len(value) else [None] * len(value)
        return type(value)([_placed(item, counterpart, device) for item, counterpart in zip(value, near, strict=True)])
    return value


def _like_part(value: Any, leaf: Tensor, parameter: Tensor) -> Any:
    """Return state as part of a whole tensor, if its parameter is sharded and it has the shape of the shard."""
    return as_part_of(value, parameter) if isinstance(value, Tensor) and value.shape == leaf.shape else value


def _part(value: Any, parameter: Tensor) -> Any:
    return part_for(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
