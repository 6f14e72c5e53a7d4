"""Check of the first updates by an optimizer with torch's interface, which may come from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mptrain.optimizer.torch_rule import TorchRule
from mptrain.optimizer.torch_state import same
from mptrain.system.torch_private import tree_leaves

if TYPE_CHECKING:
    from mptrain.optimizer.masters import MasterWeights

#: Number of updates in which an optimizer may move no weight.
MOST_STILL = 10


class FirstUpdates:
    """Check of updates until one has moved a weight: no half-precision parameter and no attribute may change."""

    def __init__(
        self,
        rule: TorchRule,
        optimizers: Sequence[torch.optim.Optimizer],
        masters: MasterWeights,
        leaves: Sequence[Tensor],
    ) -> None:
        self._rule, self._optimizers, self._masters, self._leaves = rule, optimizers, masters, leaves
        self._still: int | None = 0  # updates that moved no weight; None once one has

    @contextmanager
    def checked(self, rate: float | Tensor, norm: Tensor) -> Iterator[None]:
        """Check one update, made inside at a learning rate and with a norm of the gradients, shape (1,).

        Raises ConfigError for an optimizer that moves no weight or keeps state where it is not saved.
        """
        if self._still is None:
            yield
            return
        weights, halves, own = self._copies()
        yield
        now, halves_now, own_now = self._copies()
        for index, pair in enumerate(zip(halves_now, halves, strict=True)):
            if not torch.equal(*pair):
                raise self._masters.lost_change(index, "in an update or by a hook of the optimizer")
        for key, values in own_now.items():
            before = own.get(key, [])
            if len(values) != len(before) or not all(map(same, values, before)):
                raise self._rule.unsaved(f"state in its attribute {key} instead of in state[parameter]")
        if not all(map(torch.equal, now, weights)) or self._masters.in_place_half():
            self._still = None
        elif rate > 0 and norm > 0:
            self._still += 1
            if self._still == MOST_STILL:
                still = f"moved no weight in {MOST_STILL} updates with nonzero gradients and a rate of {rate:.2g}"
                raise self._rule.refused(still)

    def _copies(self) -> tuple[list[Tensor], list[Tensor], dict[str, list[Any]]]:
        """Return copies of the weights, of their half-precision parameters, and of the optimizers' own attributes."""
        halves = [half.clone() for half in self._masters.rounded_into() if half is not None]
        own = {
            key: [x.clone() if isinstance(x, Tensor) else x for x in self._values(value)]
            for one in self._optimizers
            if type(one).state_dict is torch.optim.Optimizer.state_dict  # others save more
            for key, value in vars(one).items()
            if key not in ("state", "param_groups", "defaults")
        }
        return [leaf.detach().clone() for leaf in self._leaves], halves, own

    def _values(self, value: Any) -> list[Any]:
        own = set(map(id, self._leaves))
        return [x for x in tree_leaves(value) if type(x) in (Tensor, int, float) and id(x) not in own]
