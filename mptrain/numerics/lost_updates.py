"""Lost updates of half-precision weights under an optimizer of torch: whether it keeps a master copy, and what is lost.

transformers loads checkpoints in the dtype in which they were saved, mostly BF16, so many loops train BF16 weights
without a master copy, whatever their options say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mptrain.numerics.rounding import decay_is_lost, exact_update, stuck
from mptrain.numerics.tensors import is_countable, part

#: Parts of the names of state in which optimizers keep what rounding takes: master weights of Apex, Transformer Engine
#: and DeepSpeed, and buffers of compensated sums (optimi, pytorch-optimizer, mptrain).
_KEPT = ("master", "kahan", "compensation", "comp_buffer", "residual")

#: Options of optimizers, by their attributes or in their groups, with which nothing is lost on average, or at all.
_OPTIONS = (
    "bf16_stochastic_round",
    "stochastic_rounding",
    "stochastic_round",
    "kahan_sum",
    "use_kahan",
    "master_weights",
    "rounds_bf16",  # mptrain.optimizer.stochastic and compensated
)

#: Least share of the weights that no update can move of which it is said at the start.
_FEW = 0.01

#: State of torch's optimizers that decays, and the constants of a group that say how much of it an update keeps: the
#: first that there is.
_DECAYS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "exp_avg": lambda group: group.get("betas", (None, None))[0],
    "exp_avg_sq": lambda group: group.get("betas", (None, None))[1],
    "momentum_buffer": lambda group: group.get("momentum"),
    "square_avg": lambda group: group.get("alpha", group.get("rho")),
}


class RoundedUpdates:
    """Updates of an optimizer with the groups that it has now, and what rounding to half precision takes from them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: Mapping[int, Mapping[str, Any]] = {
            id(parameter): group for group in optimizer.param_groups for parameter in group["params"]
        }

    def rate_of(self, parameter: Tensor) -> float | Tensor:
        """Return the present rate of a parameter, as its group has it; 1 for an optimizer without one."""
        rate: float | Tensor = self._groups.get(id(parameter), {}).get("lr", 1.0)
        return rate

    def are_lost(self, parameter: Tensor) -> bool:
        """Return whether a weight is in half precision, and nothing keeps what rounding takes from its updates."""
        if not parameter.is_floating_point() or parameter.dtype.itemsize != 2:
            return False
        group = self._groups.get(id(parameter), {})
        if any(getattr(self._optimizer, option, False) or group.get(option) for option in _OPTIONS):
            return False
        state = self._optimizer.state.get(parameter, {})
        return not any(_is_kept(key, value, parameter) for key, value in state.items() if isinstance(value, Tensor))

    def exact(self, parameter: Tensor, before: Tensor, same: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return the update that Adam, AdamW or SGD of torch has made of elements of a weight, before it was rounded.

        ``same`` takes the elements from tensors of the shape of this rank's shard. None of another optimizer.
        """
        if type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            return None
        shape = part(parameter.detach()).shape
        tensors = {
            key: part(value) if isinstance(value, Tensor) else value
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        state = {
            key: same(value) if isinstance(value, Tensor) and value.shape == shape and key != "step" else value
            for key, value in tensors.items()
        }
        gradient = None
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            gradient = same(part(parameter.grad.detach()))
        return exact_update(type(self._optimizer).__name__, self._groups[id(parameter)], state, before, gradient)


def _is_kept(key: Any, value: Tensor, parameter: Tensor) -> bool:
    if value.shape != parameter.shape:
        return False
    if any(word in str(key).lower() for word in _KEPT):
        return True
    own, weight = part(value), part(parameter.detach())  # a master copy by another name
    return own.dtype == torch.float32 and bool(weight.any()) and torch.equal(own.to(weight.dtype), weight)


def lost_at_start(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return what is known before the first update of half-precision weights without a master copy, None if nothing is.

    For Adam and AdamW of torch, whose updates are about as large as the rate: the share of weights that an update of
    that size does not change at the largest rate that the groups name. It is no bound: where gradients are rare, an
    update may be three times as large. Other optimizers may keep a copy, which they have not made yet.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    updates, weights = RoundedUpdates(optimizer), list[tuple[Tensor, float]]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = part(parameter.detach())
            seen = parameter.requires_grad and is_countable(own) and not own.is_meta
            if seen and updates.are_lost(parameter):
                weights.append((own, peak_rate(group)))
    return stuck_at(weights)


def stuck_at(weights: Iterable[tuple[Tensor, float]]) -> dict[str, Any] | None:
    """Return of half-precision weights, each with its largest rate, how many elements no such update changes.

    The result has ``dtype``, ``elements``, ``stuck`` and ``lr``, the largest rate, and ``several_rates`` if there are
    several. None without weights, with a rate of 0, and if it is less than 1 %.
    """
    elements, stays, rates, dtypes = 0, 0, set[float](), set[str]()
    for own, rate in weights:
        rates.add(rate)
        if rate:
            elements, stays = elements + own.numel(), stays + int(stuck(own, rate))
            dtypes.add(str(own.dtype).removeprefix("torch."))
    if not elements or stays < _FEW * elements:
        return None
    fields = {"dtype": ", ".join(sorted(dtypes)), "elements": elements, "stuck": stays, "lr": max(rates)}
    return {**fields, "several_rates": True} if len(rates) > 1 else fields


def peak_rate(group: Mapping[str, Any]) -> float:
    """Return the largest rate that a parameter group names: that of now, before a warm-up, or of one cycle."""
    return max(float(group.get(name) or 0.0) for name in ("lr", "initial_lr", "max_lr"))


def lost_decays(states: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return which state in half precision cannot fall, because its decay is rounded away: name, dtype and decay.

    ``states`` has the state of each parameter by torch's names, and the constants of its group.
    """
    lost: dict[tuple[str, str, float], dict[str, Any]] = {}
    for state, group in states:
        for key, value in state.items():
            if key not in _DECAYS or not isinstance(value, Tensor) or value.dtype.itemsize != 2:
                continue
            keep, dtype = _DECAYS[key](group), str(value.dtype).removeprefix("torch.")
            if keep is None:
                continue
            keep = float(keep)
            if (key, dtype, keep) not in lost and decay_is_lost(value.dtype, keep):
                lost[key, dtype, keep] = {"state": key, "dtype": dtype, "keeps": keep}
    return [*lost.values()]


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the state of each parameter of an optimizer, and its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield optimizer.state.get(parameter, {}), group
