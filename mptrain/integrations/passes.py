"""Backward passes of a watched optimizer since its last update, and looks at the gradients that they leave."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from mptrain.integrations.torch_calls import running_pass, take_losses
from mptrain.numerics.overflow_check import OverflowCheck, Verdict
from mptrain.numerics.tensors import as_real, is_first_copy, is_sharded, part
from mptrain.system.device import widest
from mptrain.system.errors import ConfigError, UsageError
from mptrain.system.torch_private import (
    after_backward,
    current_backward,
    foreach_norm,
    in_compiled_autograd,
    is_within_step,
    untraced,
)

#: Number of gradients that are remembered, to know whether a backward pass adds to them.
_REMEMBERED = 8

#: Passes in a row that no update follows, after which a warning asks whether another optimizer steps.
_MANY_PASSES = 1000

#: Weights and gradients by name; None for a missing gradient.
Tensors = Mapping[str, tuple[Tensor, Tensor | None]]


class Passes(NamedTuple):
    """Backward passes whose gradients add up, as they left them.

    Attributes:
        verdict: Look at the gradients, with their loss scale, after the last pass; after the first one whose gradients
            were not finite, if there was one.
        loss: Sum of the losses, with their loss scale, float32 (); None if there is none, NaN if one is unknown.
        rates: Learning rates of all groups at the last pass.
        local: Largest magnitude of each parameter's gradient on this rank before ranks were averaged, (P,); None on one
            rank, and where it was not seen.
        scale: Loss scale of a loop that scales by hand, float32 (1,); None for others.
    """

    verdict: Verdict
    loss: Tensor | None
    rates: tuple[float | Tensor, ...]
    local: Tensor | None
    scale: Tensor | None


class Follower(Protocol):
    """Learner that a `PassLog` tells of passes; its loss scale by hand is None for loops that do not scale so."""

    def before_pass(self) -> None:
        """Take notice that a pass has ended, before its gradients are looked at."""

    def looked(self, verdict: Verdict) -> None:
        """Take notice of a look at the end of a pass."""

    def abandoned(self, passes: Passes) -> None:
        """Take notice of passes that no update follows."""

    def parameters_changed(self) -> None:
        """Take notice that the optimizer has other parameters than at the last look."""

    def scale_by_hand(self) -> Tensor | None:
        """Return the loss scale of a loop that scales by hand, float32 (1,)."""

    def guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that never raises."""


class PassLog:
    """Log of the backward passes that reach an optimizer's parameters; it knows those that no update follows.

    Gradients are looked at on the device when a pass ends, before unscaling and clipping, which hide what was not
    finite; no look waits for the device.

    Args:
        optimizer: The optimizer; it may be given parameters later, see `refresh`.
        all_names: Name of each parameter by its id, in module order.
        models: Models by the prefix of their names.
        follower: The learner that the passes belong to.

    ``not_looked_at`` says what could not be looked at, empty if there is nothing; ``since_update`` counts passes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        all_names: Mapping[int, str],
        models: Mapping[str, nn.Module],
        follower: Follower,
    ) -> None:
        self._optimizer, self._all_names, self._models, self._follower = optimizer, all_names, models, follower
        self.since_update = self._longest = 0
        self.not_looked_at = ""
        self._warned = False  # that no update follows
        self._open: Passes | None = None
        self._added: int | None = None
        self._consumed: int | None = None
        self._views: bool | None = None  # of DDP, in the memory of its buckets; unknown before the first pass
        self.stepping = False  # the optimizer runs passes itself, by a closure, unless an exception has ended it
        self.inside = False  # the open passes ran within its step
        self._within = False  # so does the running one
        self._fresh = False  # the running pass has made a gradient anew that a bucket had had
        self._local: dict[int, Tensor] = {}
        self._seen: list[tuple[nn.Parameter, ReferenceType[Tensor], int]] = []
        self._queued: set[int] = set()
        self._reached: set[int] = set()  # parameters to whose gradients the running pass has added
        self._handles: list[Any] = []
        self._begin()

    def refresh(self) -> None:
        """Watch parameters that the optimizer was given since."""
        if self.ids != [id(param) for param in self._given()]:
            self.detach()
            self._begin()
            self._follower.parameters_changed()

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take(self) -> Passes | None:
        """Return the passes since the last update, which an update follows; None if none was looked at."""
        passes, self._open, self.inside = self._open, None, False
        self._longest, self.since_update = max(self._longest, self.since_update), 0
        return passes

    def abandon(self) -> None:
        """Take notice that no update will follow the passes so far."""
        if self._open is not None:
            passes, self._open, self.inside = self._open, None, False
            self._follower.abandoned(passes)

    def is_same(self) -> bool:
        """Return whether the gradients are the tensors of the last look; their values may have changed."""
        return bool(self._seen) and all(
            param.grad is not None and param.grad is last() for param, last, _ in self._seen
        )

    def changes(self) -> int:
        """Return how often gradients were changed in place since the last look, as by clipping: once."""
        return max((param.grad._version - seen for param, _, seen in self._seen if param.grad is not None), default=0)

    def look(self) -> Verdict | None:
        """Return a verdict on the gradients as they are now; None if there are none."""
        if self._check is None or all(param.grad is None for param in self.params):
            return None
        # Where this rank counts none of them, others do.
        grads = [
            _dense(param.grad) if here else None for param, here in zip(self.params, self.counted_here, strict=True)
        ]
        # as the weights' shapes
        whole = not any(param.grad is not None and param.grad.is_sparse for param in self.params)
        return self._check(grads, self.unit_scale, skip_on_overflow=False, offenders_only=whole)

    @torch.no_grad()
    def look_at_step(self) -> Verdict | None:
        """Return a verdict on the gradients as the optimizer is given them; None if there are none."""
        verdict = self.look()
        if self._open is None and verdict is not None:
            self._consumed = running_pass()  # an optimizer that steps inside a pass: its end is of no update
        return verdict

    def unseen_losses(self) -> Tensor | None:
        """Return the sum of the losses of passes that nobody has looked at, float32 (); None without any.

        Where passes without an update cannot be told from others, that of several is unknown.
        """
        self._added = running_pass() or self._added
        return self._sum(None, earlier=self.sharded or bool(self.not_looked_at), single=bool(self.not_looked_at))

    def end(self) -> None:
        """Take notice that the loop has ended: passes since the last update are followed by none."""
        # A loop may end within an update, of as many passes as those before it.
        if self.since_update > 2 * self._longest + (self._longest and _REMEMBERED):
            self._warn_of_no_update()
        self.abandon()

    def rates(self) -> tuple[float | Tensor, ...]:
        """Return the learning rates of all groups as they are now; NaN for an optimizer that chooses them itself."""
        rates = (group.get("lr") for group in self._optimizer.param_groups)
        return tuple(math.nan if rate is None else rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)

    def tensors(self) -> Tensors:
        """Return weights and gradients by name, without those that another rank counts."""
        here = zip(self.names, self.params, self.counted_here, strict=True)
        return {name: (part(param.detach()), _dense(param.grad)) for name, param, counted in here if counted}

    def scalar(self, loss: Tensor | float) -> Tensor:
        """Return a copy of a loss, float32 ()."""
        loss = torch.as_tensor(loss)
        if loss.numel() != 1:
            raise UsageError(f"the loss of a step has the shape {list(loss.shape)}", "give a scalar, such as its mean")
        return loss.detach().float().reshape(()).to(self.unit_scale.device, copy=True)

    def _given(self) -> list[nn.Parameter]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _begin(self) -> None:
        params = self._given()
        whole = [param for model in self._models.values() for param in model.parameters()]
        self.sharded = any(map(is_sharded, [*params, *whole]))  # one for the run: all ranks have records then, or one
        self.ranks = 1 if self.sharded else world_size()  # ranks whose own gradients are looked at before others'
        self.ids = [id(param) for param in params]
        order = {key: at for at, key in enumerate(self._all_names)}
        # Frozen ones too: they may thaw, and the first pass after that is looked at like any other.
        floating = [param for param in params if param.is_floating_point() or param.is_complex()]
        self.params = sorted(floating, key=lambda param: order.get(id(param), len(order)))
        self.names = tuple(self._all_names.get(id(param), f"parameter{at}") for at, param in enumerate(self.params))
        if len(devices := {str(param.device) for param in self.params}) > 1:
            raise ConfigError(
                f"the parameters of an optimizer are on {' and '.join(sorted(devices))}, and a watch looks at one",
                "give the parameters of each device an optimizer of their own",
            )
        self.counted_here = [_is_counted_here(param) if self.sharded else True for param in self.params]
        device = self.params[0].device if self.params else torch.device("cpu")
        own = [as_real(part(param.detach())) for param in self.params]
        self._check = OverflowCheck(own, exact=False) if own else None
        self.unit_scale, self.zero = torch.ones(1, device=device), torch.zeros((), device=device)
        self.unknown = torch.full((), math.nan, device=device)
        if self.params and not any(id(param) in self._all_names for param in self.params):
            self.not_looked_at = (
                "the optimizer has none of the model's parameters, as with master weights by hand: gradients are "
                "looked at when it steps, after clipping, and not the model's own, nor passes that no update follows"
            )
            warn(f"mptrain.watch: {self.not_looked_at}")
        self._handles = [hook for param in self.params if (hook := self._hooked(param)) is not None]

    def _hooked(self, parameter: nn.Parameter) -> Any:
        known, thawed = ref(self), parameter.requires_grad

        def hook(parameter: nn.Parameter) -> None:  # weak: Python cannot collect a parameter whose hook leads to it
            if (log := known()) is not None:
                log._follower.guarded(log._accumulated)(parameter)

        if parameter.is_inference() and not thawed:  # it can never get a gradient
            return None
        try:
            parameter.requires_grad_(True)  # torch hooks no frozen parameter, but keeps the hook of one that freezes
            return parameter.register_post_accumulate_grad_hook(untraced(hook))
        finally:
            parameter.requires_grad_(thawed)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if in_compiled_autograd():  # it has no end of a pass to call at; the look at the step remains
            if not self.not_looked_at:
                self.not_looked_at = (
                    "compiled autograd: gradients are looked at when the optimizer steps, after clipping, and backward "
                    "passes that no update follows are not"
                )
                warn(f"mptrain.watch: {self.not_looked_at}")
            return
        self._reached.add(id(parameter))
        number = current_backward()
        if number not in self._queued:
            self._queued.add(number)
            after_backward(self._follower.guarded(self._pass_ended))
        # DDP averages in the memory of views at once. It is unknown before the first pass whether there are views.
        if self._views is not False and self.ranks > 1 and parameter.grad is not None:
            (self._local[id(parameter)],) = _magnitudes([parameter.grad])
            self._fresh = not _is_view(parameter.grad)

    @torch.no_grad()
    def _pass_ended(self) -> None:
        """Look at this rank's own gradients, and again when what others have queued is done: DDP averages them."""
        self._follower.before_pass()
        # On a device torch calls this in a thread of its own, where nothing is known of an exception.
        self._within = self.stepping and (not self.unit_scale.is_cpu or is_within_step(self._optimizer))
        if running_pass() != self._added and not (self._within and self.inside) and not self._goes_on():
            self.abandon()
        if self.ranks > 1 and self._views is False:
            there = [param for param in self.params if param.grad is not None]
            grads = [param.grad for param in there if param.grad is not None]
            self._local = dict(zip(map(id, there), _magnitudes(grads), strict=True))
        after_backward(self._follower.guarded(self._look))

    def _goes_on(self) -> bool:
        """Return whether this pass added to the gradients of the last look; else its passes were abandoned.

        A gradient that was set to zero and added to has two versions more; one that the pass does not reach has one
        more if it was set to zero, and else none. A pass that makes a graph of its gradients replaces them by their
        sum. DDP replaces gradients by views, but only those that were made anew.
        """
        if self._views and self.ranks > 1:
            return not self._fresh
        return any(
            param.grad is not None
            and (
                param.grad.requires_grad
                or (param.grad is last() and param.grad._version <= seen + (id(param) in self._reached))
            )
            for param, last, seen in self._seen
        )

    @torch.no_grad()
    def _look(self) -> None:
        self._queued.clear()
        self._reached.clear()
        if self._consumed is not None and running_pass() == self._consumed:
            return
        self.refresh()
        there = [(param, param.grad) for param in self.params if param.grad is not None]
        known, self._views = self._views, self.ranks > 1 and any(_is_view(grad) for _, grad in there)
        # Where gradients have just become views, DDP may have averaged them before they were looked at.
        local = None if known is False and self._views else self._local_magnitudes()
        self._local = {}
        self._seen = [(param, ref(grad), grad._version) for param, grad in there[:: max(1, len(there) // _REMEMBERED)]]
        if (verdict := self.look()) is None:
            return
        before, loss = self._open, None if self._open is None else self._open.loss
        if (
            self._within and self.inside and before is not None
        ):  # loss and norm are those before the update: of the first pass in it
            self._added = running_pass()
            take_losses(earlier=False)
            self._open = before._replace(verdict=first_not_finite(before.verdict, verdict, before.verdict))
            return
        if running_pass() not in (None, self._added):
            self._added = running_pass()
            loss = self._sum(loss, earlier=self.sharded)
            self.since_update += 1
            if self.since_update == _MANY_PASSES and before is None:  # no update of very many micro-batches
                self._warn_of_no_update()
        self._follower.looked(verdict)
        if before is not None and len(before.verdict.norms) == len(verdict.norms):
            verdict = first_not_finite(before.verdict, verdict)
        self._open = Passes(verdict, loss, self.rates(), local, self._follower.scale_by_hand())
        self.inside = self._within

    def _warn_of_no_update(self) -> None:
        if self._warned:
            return
        self._warned = True
        warn(
            f"mptrain.watch: {self.since_update} backward passes and no update of the watched "
            f"{type(self._optimizer).__name__} after them: does another optimizer step?"
        )

    def _local_magnitudes(self) -> Tensor | None:
        """Return the largest magnitude of each parameter's gradient on this rank, or 0 without one."""
        if self.ranks == 1:
            return None
        largest = torch.stack([self._local.get(id(param), self.zero) for param in self.params])
        return largest.to(widest(self.unit_scale.device))

    def _sum(self, loss: Tensor | None, *, earlier: bool, single: bool = False) -> Tensor | None:
        for pass_loss in take_losses(earlier=earlier):
            if pass_loss is None or loss is self.unknown or (single and loss is not None):
                loss = self.unknown
            else:
                loss = self.scalar(pass_loss) if loss is None else loss + self.scalar(pass_loss)
        return loss


def first_not_finite(before: Verdict, now: Verdict, norm: Verdict | None = None) -> Verdict:
    """Return one verdict of two looks at gradients: the first that was not finite, else ``norm``, else the newer one.

    What is not finite spreads: clipping gives it to all parameters, so the first look has the names.
    """
    norm = norm or now
    if before.known_finite and now.known_finite:
        return norm
    grad_norm = torch.where(now.overflow, now.grad_norm, norm.grad_norm)
    return now._replace(
        overflow=before.overflow | now.overflow,
        grad_norm=torch.where(before.overflow, before.grad_norm, grad_norm),
        norms=torch.where(before.overflow, before.norms, now.norms),
        known_finite=False,
    )


def _magnitudes(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each gradient, float32 (); inf or NaN if it is not finite."""
    values = [(grad._values() if grad.is_sparse else grad).detach() for grad in grads]
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in values]
    return [norm.float() for norm in (foreach_norm(filled, math.inf) if filled else ())]


def _is_view(grad: Tensor) -> bool:
    """Return whether a gradient lies in memory that holds others too, as in the buckets of DDP."""
    return grad.layout == torch.strided and not is_sharded(grad) and grad.untyped_storage().nbytes() > grad.nbytes


def warn(text: str) -> None:
    """Warn the user whose loop is watched; where warnings are errors, they must not end a training."""
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=3)


def rank() -> int:
    """Return the number of this rank; 0 if there is one."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


def world_size() -> int:
    """Return the number of ranks that train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def _is_counted_here(parameter: Tensor) -> bool:
    """Return whether this rank counts the gradient of a parameter, which others may have too, in the norm of all."""
    return is_first_copy(parameter) if is_sharded(parameter) else rank() == 0


def _dense(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return as_real(grad.detach().coalesce().values() if grad.is_sparse else part(grad.detach()))
