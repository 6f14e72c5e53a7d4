"""One optimizer of a watched training loop: its gradients at the end of each backward pass, and its updates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.engine.options import LogOptions
from mptrain.engine.ring import Ring
from mptrain.engine.step_log import LearnerLog, StepLog
from mptrain.engine.step_values import HostValues, StepValues
from mptrain.integrations.histograms import Tensors, UpdateHistograms
from mptrain.integrations.losses import running_pass, take_losses
from mptrain.numerics.overflow_check import OverflowCheck, Verdict
from mptrain.numerics.shards import is_first_copy, is_sharded, part
from mptrain.probe.overflow_attribution import nonfinite_parameters
from mptrain.system.device import widest
from mptrain.system.errors import ConfigError, UsageError
from mptrain.system.records import EventRecord
from mptrain.system.torch_private import after_backward, current_backward, foreach_norm, is_within_other_step

if TYPE_CHECKING:
    from mptrain.runlog.sink import Sink

#: Number of gradients that are remembered, to know whether a backward pass adds to them.
_LOOKED_AT = 8


class WatchedLearner:
    """Optimizer of a watched loop with its parameters, whose gradients are looked at when a backward pass ends.

    The look is on the device and waits for nothing. It comes before unscaling and clipping, which hide what was not
    finite.

    Args:
        name: Name in the records.
        optimizer: The optimizer; it may be given parameters later, see `refresh`.
        names: Name of each parameter by its id, in module order.
        models: Models by the prefix of their names, for histograms.
        every: Steps between two histograms; 0 for none.
        sink: Receiver of the records.
        before_pass: Function that is called at the end of each backward pass, before the gradients are looked at.
        log: How many steps are copied to the host together, and how often.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        sink: Sink,
        log: LogOptions,
        *,
        models: Mapping[str, nn.Module],
        every: int,
        before_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_pass = before_pass
        self.name, self.optimizer = name, optimizer
        self.steps = 0
        self._all_names, self._sink, self._options = names, sink, log
        self._models, self._every = models, every
        self._histograms: UpdateHistograms | None = None
        self._counted: list[UpdateHistograms] = []
        self._handles: list[Any] = []
        self._of_update: Any = None
        self._verdict: Verdict | None = None
        self._stepped: tuple[Verdict | None, Tensor | None] | None = None
        self._added: int | None = None
        self._consumed: int | None = None
        self._rate: float | Tensor = 0.0
        self._queued: set[int] = set()
        self._views = any(getattr(model, "gradient_as_bucket_view", False) for model in models.values())
        self._local: dict[int, Tensor] = {}
        self._open: tuple[StepValues, _Told] | None = None
        self._loss: Tensor | None = None
        self._seen_grads: list[tuple[nn.Parameter, ReferenceType[Tensor], int]] = []
        self._told: deque[_Told] = deque()
        self._log: _Log | None = None
        self._begin()
        self._sample(1)

    def refresh(self) -> None:
        """Watch parameters that the optimizer was given since; the updates so far are recorded first."""
        if self._seen != [(id(one), one.requires_grad) for one in self._given()]:
            self.flush()
            self._leave_parameters()
            self._begin()

    def detach(self) -> None:
        """Remove all hooks."""
        if self._histograms is not None:
            self._histograms.close()
            self._histograms = None
        self._leave_parameters()
        if self._of_update is not None:
            self._of_update.remove()

    def on_update(self, function: Callable[[], None]) -> None:
        """Call a function after each call of the optimizer's ``step``."""

        def stepped(*_: Any) -> None:
            if is_within_other_step(self.optimizer):
                return
            self._read_rate()
            function()

        self._of_update = self.optimizer.register_step_post_hook(stepped)

    def has_stepped(self) -> None:
        """Take notice that the scaler has stepped the optimizer and is not updated yet: later passes are of others."""
        if self._stepped is None:
            self._stepped, self._verdict, self._loss = (self._verdict, self._loss), None, None

    def complete(
        self, scale: Tensor | None = None, next_scale: Tensor | None = None, found: Sequence[Tensor] = ()
    ) -> None:
        """Take notice of an update that was made or skipped; it is recorded with the next `push`.

        Args:
            scale: Loss scale of the update, float32 of shape (1,); None for no loss scaling.
            next_scale: Loss scale of the next update, likewise.
            found: Scalars that are above 0 if the update was skipped.
        """
        unscaled = False
        if self._stepped is None:
            if self._verdict is None:  # gradients that no backward pass has left, or a step inside of one
                self._look()
                unscaled = bool(found)
                self._consumed = running_pass()
            self._stepped, self._verdict, self._loss = (self._verdict, self._loss), None, None
        (verdict, loss), self._stepped = self._stepped, None
        if verdict is None:
            return
        self.push()
        one = self._one if scale is None else scale.to(self._one.device)
        after = one if next_scale is None else next_scale.to(self._one.device)
        skip = sum((each.to(self._one.device).reshape(1) for each in found), torch.zeros_like(self._one)).gt(0).float()
        known = loss is not None and loss is not self._unknown
        loss = loss / one.squeeze(0) if loss is not None and known else self._unknown
        norms = verdict.norms if self._ranks == 1 else torch.cat([verdict.norms, self._local_norms()])
        grad_norm = verdict.grad_norm if unscaled else verdict.grad_norm / one
        self._open = StepValues(loss, one, self._zero, after, grad_norm, skip, norms), _Told(self._rate, known)
        if self._histograms is not None:
            still = not isinstance(self._rate, Tensor) and self._rate == 0  # as in the first step of a warm-up
            self._histograms.update_ended(self._tensors(), one, skip, moves=not still)
            self._counted.append(self._histograms)
            self._histograms = None
        self._sample(self.steps + 2)

    def push(self, loss: Tensor | float | None = None) -> None:
        """Record the newest update; ``loss`` is its unscaled loss, None for that of its backward passes."""
        if self._open is None:
            return
        (values, told), self._open = self._open, None
        if loss is not None:
            values, told = values._replace(loss=self._scalar(loss)), told._replace(loss_known=True)
        self._told.append(told)
        self._ring.record(values)
        self.steps += 1
        self._step_log.note(self.steps, 0)
        self._write_histograms()

    def flush(self) -> None:
        """Write the records of all updates so far; waits for the device."""
        self.push()
        self._step_log.flush()
        self._write_histograms()

    def _write_histograms(self) -> None:
        """Write the histograms of the steps that have reached the host; waits for the device if there are any."""
        newest = self._log.last.step if self._log is not None and self._log.last is not None else 0
        while self._counted and self._counted[0].step <= newest:
            for record in self._counted.pop(0).records():
                self._sink.take(record)

    def _sample(self, step: int) -> None:
        if self._every and (step == 1 or step % self._every == 0):
            own = {id(one) for one in self._given()}
            self._histograms = UpdateHistograms(self.name, step, self._models, own)

    def _tensors(self) -> Tensors:
        """Return weights and gradients by name, without those that another rank counts."""
        here = zip(self.names, self._params, self._counted_here, strict=True)
        return {name: (part(one.detach()), _dense(one.grad)) for name, one, counted in here if counted}

    def _given(self) -> list[nn.Parameter]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def _leave_parameters(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self) -> None:
        params = self._given()
        whole = [one for model in self._models.values() for one in model.parameters()]
        self.sharded = any(map(is_sharded, [*params, *whole]))  # one for the run: all ranks have records then, or one
        self._ranks = 1 if self.sharded else world_size()  # ranks whose own gradients are looked at before others'
        self._seen, self._given_ids = [(id(one), one.requires_grad) for one in params], [id(one) for one in params]
        order = {key: at for at, key in enumerate(self._all_names)}
        self._params = sorted(
            (one for one in params if one.requires_grad), key=lambda one: order.get(id(one), len(order))
        )
        self._frozen = [one for one in params if not one.requires_grad]
        self.names = tuple(self._all_names.get(id(one), f"parameter{at}") for at, one in enumerate(self._params))
        if len(devices := {str(one.device) for one in params if one.requires_grad}) > 1:
            raise ConfigError(
                f"the parameters of an optimizer are on {' and '.join(sorted(devices))}, and a watch looks at one",
                "give the parameters of each device an optimizer of their own",
            )
        self._counted_here = [_is_counted_here(one) if self.sharded else True for one in self._params]
        device = self._params[0].device if self._params else torch.device("cpu")
        own = [_as_real(part(one.detach())) for one in self._params]
        self._check = OverflowCheck(own, exact=False) if own else None
        self._one, self._zero = torch.ones(1, device=device), torch.zeros((), device=device)
        self._unknown = torch.full((), math.nan, device=device)
        self._ring = Ring(self._options.ring, len(self.names) * min(self._ranks, 2), device)
        before, self._log = self._log, _Log(self.name, self.names, self._ring, self._told, sharded=self.sharded)
        if before is not None:
            self._log.go_on_after(before)
        self._step_log = StepLog([self._log], self._sink, self._options)
        self._handles = [one.register_post_accumulate_grad_hook(self._accumulated) for one in self._params]

    def _accumulated(self, parameter: nn.Parameter) -> None:
        number = current_backward()
        if number not in self._queued:
            self._queued.add(number)
            after_backward(self._before_others)
        if self._views and self._ranks > 1 and parameter.grad is not None:  # DDP averages in this memory at once
            (self._local[id(parameter)],) = _magnitudes([parameter.grad])

    @torch.no_grad()
    def _before_others(self) -> None:
        """Look at this rank's own gradients, and again when what others have queued is done: DDP averages them."""
        self._before_pass()
        if running_pass() != self._added and not self._goes_on():
            self._loss = None
        if self._ranks > 1 and not self._views:
            there = [one for one in self._params if one.grad is not None]
            grads = [one.grad for one in there if one.grad is not None]
            self._local = dict(zip(map(id, there), _magnitudes(grads), strict=True))
        after_backward(self._look)

    def _goes_on(self) -> bool:
        """Return whether this pass added to the gradients of the last look; else the update before was abandoned.

        With views DDP replaces gradients, so that it cannot be told; there no update counts as abandoned. A gradient
        that was set to zero and added to has two versions more; one that the pass does not reach has none.
        """
        if self._views:
            return self._verdict is not None
        return any(
            one.grad is not None and one.grad is last() and one.grad._version <= version + 1
            for one, last, version in self._seen_grads
        )

    def _local_norms(self) -> Tensor:
        """Return the largest magnitude of each parameter's gradient on this rank, or 0 without one, and begin anew."""
        local, self._local = self._local, {}
        return torch.stack([local.get(id(one), self._zero) for one in self._params]).to(widest(self._one.device))

    @torch.no_grad()
    def _look(self) -> None:
        self._queued.clear()
        if self._consumed is not None and running_pass() == self._consumed:  # an optimizer that steps in the pass
            return
        self._read_rate()
        given = [id(one) for group in self.optimizer.param_groups for one in group["params"]]
        if given != self._given_ids or any(one.requires_grad for one in self._frozen):
            self.refresh()
        if self._check is None:
            return
        grads = [_dense(one.grad) if here else None for one, here in zip(self._params, self._counted_here, strict=True)]
        if any(one.grad is not None for one in self._params):  # also where other ranks count them all
            dense = not any(
                one.grad is not None and one.grad.is_sparse for one in self._params
            )  # as the weights' shapes
            self._verdict = self._check(grads, self._one, skip_on_overflow=False, offenders_only=dense)
            if self._histograms is not None:
                self._histograms.backward_ended(self._tensors(), self._verdict)
        there = [(one, one.grad) for one in self._params if one.grad is not None]
        self._seen_grads = [(one, ref(grad), grad._version) for one, grad in there[:: max(1, len(there) // _LOOKED_AT)]]
        if running_pass() not in (None, self._added):
            self._added = running_pass()
            for loss in take_losses(earlier=self.sharded):
                if loss is None or self._loss is self._unknown:
                    self._loss = self._unknown
                else:
                    self._loss = self._scalar(loss) if self._loss is None else self._loss + self._scalar(loss)

    def _read_rate(self) -> None:
        rate = self.optimizer.param_groups[0].get("lr")
        rate = math.nan if rate is None else rate  # an optimizer that chooses its steps itself
        self._rate = rate.clone() if isinstance(rate, Tensor) else rate

    def _scalar(self, loss: Tensor | float) -> Tensor:
        loss = torch.as_tensor(loss)
        if loss.numel() != 1:
            raise UsageError(f"the loss of a step has the shape {list(loss.shape)}", "give a scalar, such as its mean")
        return loss.detach().float().reshape(()).to(self._one.device, copy=True)


class _Told(NamedTuple):
    """Facts about an update that the host knows: the learning rate of its first group, and if its loss was told."""

    rate: float | Tensor
    loss_known: bool


class _Log(LearnerLog):
    """Log of a watched optimizer, with the rates that the host knows; it says when a schedule moved at a skip."""

    def __init__(self, name: str, names: Sequence[str], ring: Ring, told: deque[_Told], *, sharded: bool) -> None:
        super().__init__(name, names, ring)
        self._told, self._sharded = told, sharded
        self._skipped: tuple[int, float] | None = None

    def go_on_after(self, other: _Log) -> None:
        """Continue the counts of the log of the same optimizer with fewer parameters."""
        self.updates, self.skipped, self.history, self.last = other.updates, other.skipped, other.history, other.last
        self._skipped = other._skipped

    @override
    def digest(self, step: int, epoch: int, row: HostValues, sink: Sink, *, loss_known: bool = True) -> None:
        told = self._told.popleft()
        rate = float(told.rate)  # of a tensor on the device it is read here, with the block of its step
        if len(row.norms) > len(self._parameters):
            row, local = row._replace(norms=row.norms[: len(self._parameters)]), row.norms[len(self._parameters) :]
            count, tensors = nonfinite_parameters(self._parameters, local)
            if count:
                fields = {"learner": self.name, "rank": rank(), "tensors": tensors, "count": count}
                sink.take(EventRecord("rank_overflow", step, fields))
        if self._sharded and row.skip and not row.overflow:  # because of another rank's shards
            row = row._replace(grad_norm=math.inf, norms=[0.0] * len(self._parameters))
        if self._skipped is not None and self._skipped[1] != rate:
            fields = {"learner": self.name, "from_lr": self._skipped[1], "to_lr": rate}
            sink.take(EventRecord("schedule_moved", self._skipped[0], fields))
        super().digest(step, epoch, row._replace(lr=rate), sink, loss_known=told.loss_known)
        self._skipped = (step, rate) if row.skip else None


def _magnitudes(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each gradient, float32 (); inf or NaN if it is not finite."""
    values = [(one._values() if one.is_sparse else one).detach() for one in grads]
    filled = [one if one.numel() else one.new_zeros(1) for one in values]
    return [one.float() for one in (foreach_norm(filled, math.inf) if filled else ())]


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
    return _as_real(grad.detach().coalesce().values() if grad.is_sparse else part(grad.detach()))


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as its real and imaginary parts, in a last dimension of two; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
