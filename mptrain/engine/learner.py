"""What one objective trains and everything that moves with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mptrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from mptrain.dataset.batch import Batch
    from mptrain.engine.guard import BufferGuard
    from mptrain.numerics.verdict import Verdict
    from mptrain.optimizer.weights import Weights
    from mptrain.scaler.base import Scaler, ScalerState
    from mptrain.task.base import Objective


@dataclass(frozen=True)
class Plan:
    """What holds for every step of a run.

    Attributes:
        accumulate: Micro-batches of one update.
        products: Context of forward and backward: which kernels half-precision products run on.
        autocast: Context of a forward pass and its loss.
        guard: Restores buffers after a refused step.
    """

    accumulate: int
    products: Callable[[], AbstractContextManager[Any]]
    autocast: Callable[[], AbstractContextManager[Any]]
    guard: BufferGuard


class Learner:
    """An objective with its weights, scaler and schedule.

    Attributes:
        objective: The loss it minimises.
        weights: What it moves.
        scaler: The loss scaling rule.
        scale_state: The state of that rule, device tensors of shape (1,).
        rates: float32, shape (planned + 1,): learning rate by number of applied updates.
        updates: int64, shape (1,): updates applied so far.
    """

    def __init__(
        self, objective: Objective, weights: Weights, scaler: Scaler, rates: Tensor, device: torch.device
    ) -> None:
        self.objective = objective
        self.weights = weights
        self.scaler = scaler
        self.scale_state: ScalerState = scaler.initial(device)
        self.rates = rates
        self.updates = torch.zeros(1, dtype=torch.int64, device=device)
        self._refuse = torch.full((1,), float(scaler.on_overflow == "skip"), device=device)

    @property
    def name(self) -> str:
        """The learner's name in records."""
        return self.objective.learner

    @property
    def scale(self) -> Tensor:
        """The loss scale in force, float32 of shape (1,)."""
        return self.scale_state["scale"]

    def loss(self, model: nn.Module, micro: Batch) -> Tensor:
        """The mean loss over a micro-batch's terms, a float32 scalar.

        Raises:
            ConfigError: The task broke that contract. An FP16 loss times a scale of 2^16 is inf.
        """
        loss = self.objective.loss(model, micro)
        if loss.dtype != torch.float32 or loss.ndim:
            raise ConfigError(
                f"the loss of learner {self.name} is {loss.dtype} of shape {tuple(loss.shape)}, not a float32 scalar",
                "reduce it to its mean over the batch and compute it in float32: logits.float() before the loss",
            )
        return loss

    def rate(self) -> Tensor:
        """The learning rate of the next update, float32 of shape (1,): a lookup, no host read."""
        return self.rates.index_select(0, self.updates)

    def judge(self) -> Verdict:
        """Whether the gathered gradients may move the weights."""
        return self.weights.judge(self.scale, self._refuse)

    def advance(self, verdict: Verdict) -> None:
        """Count the update if it was applied, then move the scale; in this order after `Weights.update`."""
        self.updates = self.updates + (verdict.skip == 0)
        self.scale_state = self.scaler.after(self.scale_state, verdict)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights themselves: optimizer state, scaler state, number of updates."""
        return {
            "optimizer": self.weights.state_dict(),
            "scaler": dict(self.scale_state),
            "updates": self.updates,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore what `state_dict` gave.

        Returns:
            What could not be restored, as sentences: another optimizer's state, another scaler's.
        """
        notes = self.weights.load_state_dict(saved["optimizer"])
        device = self.updates.device
        self.scale_state, changed = self.scaler.resume(saved["scaler"], device)
        notes += changed
        self.updates = saved["updates"].to(device)
        return notes
