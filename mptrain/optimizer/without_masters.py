"""Wrappers of an optimizer with torch's interface that lose no updates of BF16 weights, without FP32 master copies.

`stochastic` rounds the updated weights at random without bias, and `compensated` keeps what rounding took
(`mptrain.numerics.rounding`). The optimizer computes in FP32 and has FP32 state: it gets FP32 copies of a
few weights at a time, and of their gradients, which are freed before the next ones are made.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.numerics.rounding import round_compensated, round_stochastically, rounding_key, with_compensation
from mptrain.numerics.tensors import first_element, part
from mptrain.optimizer.torch_rule import public_name
from mptrain.system.errors import ConfigError

#: Bytes of FP32 weights that are copied together. Fewer calls of the optimizer are faster; larger copies take memory.
_TOGETHER = 64 << 20

#: Number of updates so far, in every parameter group, where the optimizer's own state dict saves it.
_COUNT = "rounded_updates"
_COMPENSATION = "compensation"


def stochastic(optimizer: torch.optim.Optimizer, *, seed: int = 0, at_once: bool = False) -> torch.optim.Optimizer:
    """Wrap an optimizer so that BF16 weights are rounded at random, without bias: nothing is lost on average.

    The random bits of an element are a function of the seed, the number of the update, the parameter and the element:
    equal on all replicas, with any number of shards (FSDP2), and after a state dict has been loaded. The optimizer has
    FP32 state. Beside it, one step takes 8 bytes for each of the weights that are updated together, at most 64 MB of
    FP32 weights or the largest of them.

    Args:
        optimizer: The optimizer of the loop. Use the wrapper in its place: for steps, schedules and state dicts.
        seed: Chooses the random bits. Parameters of equal number of several optimizers need different seeds.
        at_once: Update all weights in one call, for an optimizer that needs them together: 8 bytes for every weight.

    Raises:
        ConfigError: It has FP16 weights or no BF16 weights, or it needs a closure.
    """
    return StochasticRounding(optimizer, seed, at_once)


def compensated(optimizer: torch.optim.Optimizer, *, at_once: bool = False) -> torch.optim.Optimizer:
    """Wrap an optimizer so that what rounding takes from BF16 weights is added to their next update (Kahan summation).

    It takes 2 bytes for each BF16 weight, in the optimizer's state, and the weights are those that FP32 master weights
    give, rounded. For everything else see `stochastic`.
    """
    return CompensatedRounding(optimizer, 0, at_once)


class _Rounding(torch.optim.Optimizer):
    """Optimizer that steps another one on FP32 copies of BF16 weights, and rounds these; it shares groups and state."""

    rounds_bf16 = True  # for those who look at what becomes of updates
    _compensate: bool

    def __init__(self, inner: torch.optim.Optimizer, seed: int, at_once: bool) -> None:
        name = public_name(type(inner))
        if getattr(inner, "rounds_bf16", False):
            raise ConfigError(f"{name} rounds BF16 weights already", "wrap the optimizer inside of it, once")
        dtypes = {parameter.dtype for group in inner.param_groups for parameter in group["params"]}
        if torch.float16 in dtypes:
            raise _fp16(name)
        if torch.bfloat16 not in dtypes:
            raise ConfigError(
                f"{name} has no BF16 weights, and this rounds BF16 weights",
                "make the model of BF16 weights first, or use the optimizer as it is",
            )
        if any(p.default is p.empty for p in inspect.signature(inner.step).parameters.values() if p.name == "closure"):
            raise ConfigError(
                f"{name} steps with a closure, in which it changes the weights many times",
                "use an optimizer that makes one update a step, such as torch.optim.AdamW",
            )
        if not self._compensate:
            for parameter in itertools.chain(*(group["params"] for group in inner.param_groups)):
                try:
                    first_element(parameter)
                except ValueError as error:
                    raise ConfigError(str(error), "shard along the first dimension, or use compensated()") from error
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        self.inner = inner
        inner.rounded_by = type(self).__name__  # type: ignore[attr-defined]  # for those who are given it by mistake
        self._seed, self._at_once = seed, at_once
        self._share()
        for group in self.param_groups:
            group.setdefault(_COUNT, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if "hooks" not in key and key != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "inner" not in vars(self):  # while it is made
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(param_group)
        if any(parameter.dtype == torch.float16 for parameter in self.inner.param_groups[-1]["params"]):
            self.inner.param_groups.pop()
            raise _fp16(public_name(type(self.inner)))
        self.inner.param_groups[-1].setdefault(_COUNT, self.param_groups[0][_COUNT])

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this wrapper, or of the optimizer alone; FP32 state stays FP32."""
        self.inner.load_state_dict(dict(state_dict))
        self._share()
        saved = state_dict["state"]
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for parameter, number in zip(self._parameters(), numbers, strict=True):
            for key, value in saved.get(number, {}).items():
                self.state[parameter][key] = _as_saved(self.state[parameter].get(key), value)
        for group in self.param_groups:
            group.setdefault(_COUNT, 0)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        with torch.no_grad():
            for bunch in self._bunches():
                self._update(bunch, numbers)
        for group in self.param_groups:
            group[_COUNT] = group.get(_COUNT, 0) + 1
        return loss

    def _bunches(self) -> Iterator[set[int]]:
        """Yield the ids of the parameters with gradients that are updated together."""
        bunch, size = set[int](), 0
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            wide = parameter.numel() * 4 if _is_rounded(parameter) else 0  # of the whole: equal on all ranks
            if bunch and size + wide > _TOGETHER and not self._at_once:
                yield bunch
                bunch, size = set(), 0
            bunch.add(id(parameter))
            size += wide
        if bunch:
            yield bunch

    def _update(self, bunch: set[int], numbers: Mapping[int, int]) -> None:
        """Step the inner optimizer with FP32 copies of some parameters in the place of all, and round the copies."""
        own = [group["params"] for group in self.param_groups]
        live = [[parameter for parameter in params if id(parameter) in bunch] for params in own]
        rounded = [parameter for parameter in itertools.chain(*live) if _is_rounded(parameter)]
        # Optimizers take a state with any entry for one that they have begun.
        taken = {parameter: self.state[parameter].pop(_COMPENSATION, None) for parameter in rounded}
        wide = {parameter: self._wide(parameter, kept) for parameter, kept in taken.items()}
        before = self._numbers()
        try:
            for group, params in zip(self.param_groups, live, strict=True):
                group["params"] = [wide.get(parameter, parameter) for parameter in params]
            self.inner.param_groups = [group for group in self.param_groups if group["params"]]
            for parameter, copy in wide.items():
                self.state[copy] = self.state.pop(parameter)
            self.inner.step()
        finally:
            self.inner.param_groups = self.param_groups
            for group, params in zip(self.param_groups, own, strict=True):
                group["params"] = params
            for parameter, copy in wide.items():
                self.state[parameter] = self.state.pop(copy)
                if self._compensate and (compensation := taken[parameter]) is not None:
                    self.state[parameter][_COMPENSATION] = compensation
        some = len(bunch) < sum(parameter.grad is not None for parameter in self._parameters())
        if some and self._numbers() != before:
            raise ConfigError(
                f"{public_name(type(self.inner))} counts its steps for all weights together, so it cannot update a few "
                "of them at a time",
                "add at_once=True, which takes 8 bytes more for every weight during a step",
            )
        for parameter, copy in wide.items():
            self._round(parameter, copy, taken[parameter], numbers[id(parameter)])

    def _wide(self, parameter: nn.Parameter, compensation: Tensor | None) -> nn.Parameter:
        """Return an FP32 copy of a weight with its gradient; its state, if there is any, becomes FP32 too."""
        state = self.state[parameter]
        for key, entry in state.items():
            if isinstance(entry, Tensor) and entry.dtype == torch.bfloat16:
                state[key] = entry.float()  # of steps before it was wrapped
        copy = nn.Parameter(parameter.detach().float())
        if compensation is not None:
            part(copy).copy_(with_compensation(part(parameter), part(compensation)))
        assert parameter.grad is not None
        copy.grad = parameter.grad.detach().float()
        return copy

    def _round(self, parameter: nn.Parameter, copy: nn.Parameter, compensation: Tensor | None, number: int) -> None:
        own, wide = part(parameter), part(copy)
        if self._compensate:
            kept = torch.zeros_like(parameter, dtype=torch.int16) if compensation is None else compensation
            round_compensated(wide, own, part(kept))
            self.state[parameter][_COMPENSATION] = kept
            return
        count = self.param_groups[0].get(_COUNT, 0)
        updates = torch.full((1,), count, dtype=torch.float32, device=own.device)
        round_stochastically(wide, own, rounding_key(self._seed, updates, number), first_element(parameter))

    def _numbers(self) -> list[dict[str, Any]]:
        """Return the numbers that the optimizer keeps for groups of weights, or for all of them."""
        return [
            {key: value for key, value in each.items() if type(value) in (int, float) and not key.startswith("_")}
            for each in (*self.param_groups, vars(self.inner))
        ]


class StochasticRounding(_Rounding):
    """Optimizer whose updates of BF16 weights are rounded at random (`stochastic`)."""

    _compensate = False


class CompensatedRounding(_Rounding):
    """Optimizer that keeps what rounding takes from BF16 weights (`compensated`)."""

    _compensate = True


def _fp16(name: str) -> ConfigError:
    return ConfigError(
        f"{name} has FP16 weights, and this rounds BF16 weights", "keep FP32 weights and use torch.autocast"
    )


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return loaded state with the dtypes in which it was saved; torch casts it to that of the weights."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        return {key: _as_saved(loaded.get(key), value) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(saved)([_as_saved(now, value) for now, value in zip(loaded, saved, strict=True)])
    return loaded


def _is_rounded(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16
