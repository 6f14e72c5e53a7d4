"""Log of the updates of a watched optimizer: from the values of each on the device to its records and histograms.

It refers to no parameter and no model, so that it can be ended after the loop's own objects are gone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.engine.histograms import FrozenWeights, HistogramWatch, is_looked_at
from mptrain.engine.module_trail import without_wrappers
from mptrain.engine.observer import boundary, nonfinite_parameters
from mptrain.engine.options import LogOptions
from mptrain.engine.ring import HostValues, Ring, StepValues
from mptrain.engine.step_log import LearnerLog, StepLog
from mptrain.integrations.passes import rank, warn
from mptrain.numerics.overflow_check import Verdict
from mptrain.system.records import EventRecord, Record, ScaleRecord, TensorKind, nonfinite_kind
from mptrain.system.torch_private import computes_now

if TYPE_CHECKING:
    from mptrain.runlog.record_writer import Sink


#: Least factor between the norms of a pass and of its update that may be a loss scale, and updates that show one.
_SCALES, _ALIKE = 16.0, 3

#: Updates by which it is judged whether a schedule moves with each of them, and the fewest that show it.
_JUDGED, _FEWEST = 20, 3

Rates = tuple[float | Tensor, ...]


class UpdateFacts(NamedTuple):
    """Facts about an update that the host knows.

    ``rates`` are those of all groups. ``loss_known`` and ``applied_known``: its loss and its norm as applied are known.
    ``abandoned``: passes that no update followed, and no update. ``set_by_loop``: the gradients are not those of the
    passes. ``changes``: how often they were changed in place between passes and update.
    """

    rates: Rates
    loss_known: bool = False
    applied_known: bool = False
    abandoned: bool = False
    set_by_loop: bool = False
    changes: int = 0


class UpdateLog:
    """Log of the updates of one learner, and of its passes that no update follows.

    Args:
        name: Name of the learner in the records.
        sink: Receiver of the records.
        options: How many steps are copied to the host together, and how often.
        written: Function that is called after records were given to the sink.
        steps: Number of steps before the first.

    ``steps`` counts updates so far, skipped ones included. ``not_looked_at`` says what the watch could not see.
    """

    def __init__(self, name: str, sink: Sink, options: LogOptions, written: Callable[[], None], steps: int = 0) -> None:
        self.name, self.steps = name, steps
        self.not_looked_at: dict[str, None] = {}
        self._sink, self._options, self._written = sink, options, written
        self._lock = threading.RLock()  # another thread may flush; a function of `on_event` may too
        self._open: tuple[StepValues, UpdateFacts] | None = None
        self._facts: deque[UpdateFacts] = deque()
        self._counted: list[UpdateHistograms] = []
        self._log: _Log | None = None

    def begin(self, names: Sequence[str], ranks: int, device: torch.device, *, sharded: bool) -> None:
        """Record updates of these parameters from now on; those of others before are recorded first."""
        with self._lock:
            if self._log is not None:
                self.flush()
            ring = Ring(self._options.ring, len(names) * min(ranks, 2), device)
            before, self._log = self._log, _Log(self.name, names, ring, self._facts, sharded=sharded)
            if before is not None:
                self._log.go_on_after(before)
            self._ring, self._step_log = ring, StepLog([self._log], self._sink, self._options)

    def add(self, values: StepValues, facts: UpdateFacts, histograms: UpdateHistograms | None = None) -> None:
        """Keep an update, recorded with the next `push`, or passes that no update followed, recorded at once."""
        with self._lock:
            if facts.abandoned:
                self._record(values, facts)
                return
            self.push()
            self._open = values, facts
            if histograms is not None:
                self._counted.append(histograms)

    def push(self, loss: Tensor | None = None) -> None:
        """Record the newest update; ``loss`` is its unscaled loss, None for that of its backward passes."""
        with self._lock:
            if self._open is None:
                return
            (values, facts), self._open = self._open, None
            if loss is not None:
                values, facts = values._replace(loss=loss), facts._replace(loss_known=True)
            self.steps += 1
            self._record(values, facts)

    def take_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record an event of this learner after the newest update."""
        self._sink.take(EventRecord(kind, self.steps, {"learner": self.name, **fields}))

    def flush(self) -> None:
        """Write the records of all updates so far; waits for the device."""
        with self._lock:
            self.push()
            self._step_log.flush()
            self._write()

    def end(self) -> None:
        """Write the records of all updates, and what has none: how many passes no update followed, what nobody saw."""
        with self._lock:
            assert self._log is not None
            try:
                self.flush()
            except Exception as error:  # the loop has done nothing wrong
                what = f"the last records: {type(error).__name__}: {error}"
                self.not_looked_at[what] = None
                warn(f"mptrain.watch: {self.name}: lost are {what}")
            self._log.end(self.steps, self.not_looked_at, self._sink)
            self._written()

    def _record(self, values: StepValues, facts: UpdateFacts) -> None:
        self._facts.append(facts)
        self._ring.record(values)
        before = self._ring.unread
        self._step_log.note(self.steps + facts.abandoned, 0)
        if self._ring.unread < before:
            self._write()

    def _write(self) -> None:
        """Write the histograms of the steps that have reached the host, which waits for the device if there are any."""
        newest = self._log.last.step if self._log is not None and self._log.last is not None else 0
        if self._log is not None:
            for what in (*self.not_looked_at,):  # at once: the process may be killed
                self._log.say(self.steps, what, self._sink)
        while self._counted and self._counted[0].step <= newest:
            look = self._counted.pop(0)
            for record in look.records():
                self._sink.take(record)
            if look.failure:
                self.not_looked_at[f"histograms of an update: {look.failure}"] = None
        self._written()


class _Log(LearnerLog):
    """Log of a watched optimizer with the facts that the host knows of its updates.

    It says which passes no update followed, that the scale changed between updates, and that a schedule moved although
    there was no update.
    """

    def __init__(
        self, name: str, names: Sequence[str], ring: Ring, facts: deque[UpdateFacts], *, sharded: bool
    ) -> None:
        super().__init__(name, names, ring)
        self._facts, self._sharded = facts, sharded
        self._abandoned = 0
        self._divided = 0  # updates in a row whose gradients the loop seems to have unscaled
        self._said: set[str] = set()  # what was not looked at
        self._scale: tuple[int, float] | None = None  # of the next update, as the last one left it, and its step
        self._before: tuple[int, tuple[float, ...], bool] | None = None  # step, rates, and whether it was an update
        self._moves: deque[bool] = deque(maxlen=_JUDGED)  # whether the rates changed after an update
        self._moved: list[EventRecord] = []  # after passes without an update; to be said if `_moves` is true mostly

    def go_on_after(self, other: _Log) -> None:
        """Continue the counts of the log of the same optimizer with other parameters."""
        self.updates, self.skipped, self.history, self.last = other.updates, other.skipped, other.history, other.last
        self._abandoned, self._scale, self._divided = other._abandoned, other._scale, other._divided
        self._said = other._said
        self._before, self._moves, self._moved = other._before, other._moves, other._moved

    @override
    def digest(self, step: int, epoch: int, row: HostValues, sink: Sink) -> None:
        facts = self._facts.popleft()
        rates = tuple(map(float, facts.rates))  # of tensors on the device they are read here, with the block
        if len(row.norms) > len(self._parameters):
            row, local = row._replace(norms=row.norms[: len(self._parameters)]), row.norms[len(self._parameters) :]
            count, tensors = nonfinite_parameters(self._parameters, local)
            if count:
                fields = {"learner": self.name, "rank": rank(), "tensors": tensors, "count": count}
                sink.take(EventRecord("rank_overflow", step, fields))
        if self._sharded and row.skip and not row.overflow:  # because of another rank's shards
            row = row._replace(grad_norm=math.inf, norms=[0.0] * len(self._parameters))
        self._follow_rates(step, rates, updated=not (row.skip or facts.abandoned), sink=sink)
        if self._scale is not None and self._scale[1] != row.loss_scale:  # by a call of the loop's own
            sink.take(ScaleRecord(self.name, *self._scale, row.loss_scale, "set"))
        self._scale = step, row.next_scale
        if facts.abandoned:
            self._take_abandoned(step, row, sink, loss_known=facts.loss_known)
            return
        if facts.set_by_loop and facts.applied_known:
            self.say(
                step,
                "grad_norm of updates whose gradients the loop sets itself is that as applied, after clipping if there "
                "is any, and gradients that it sets and makes no update of are not seen",
                sink,
            )
        elif facts.applied_known and row.loss_scale == 1:
            self._look_for_scale(step, row, facts.changes, sink)
        row = row._replace(lr=rates[0] if rates else math.nan)
        self.record(step, epoch, row, sink, loss_known=facts.loss_known, applied_known=facts.applied_known)

    def say(self, step: int, what: str, sink: Sink) -> bool:
        """Say once what was not looked at; return whether it is said now."""
        if what in self._said:
            return False
        self._said.add(what)
        fields = {"learner": self.name, "what": what} | ({"rank": rank()} if rank() else {})
        sink.take(EventRecord("not_looked_at", step, fields))
        return True

    def _look_for_scale(self, step: int, row: HostValues, changes: int, sink: Sink) -> None:
        """Say that the loop seems to scale its loss by hand.

        It divides gradients by a power of two each time, or changes them at least twice, which clipping does once.
        """
        ratio = row.grad_norm / row.applied_norm if row.applied_norm else 0.0
        power = 2.0 ** round(math.log2(ratio)) if math.isfinite(ratio) and ratio >= _SCALES else 0.0
        power = power if power and math.isclose(ratio, power, rel_tol=1e-3) else 0.0
        self._divided = self._divided + 1 if changes > 1 or power else 0
        if self._divided == _ALIKE:
            how = f"divides its gradients by {power:g}" if power else "changes its gradients more than once"
            what = f"the loop {how} between pass and update; if a loss scale is among that, grad_norm and loss are "
            what += "multiplied by that: give mptrain.watch loss_scale="
            if self.say(step, what, sink):
                warn(f"mptrain.watch: {what}")

    def _take_abandoned(self, step: int, row: HostValues, sink: Sink, *, loss_known: bool) -> None:
        """Say the first passes that no update followed, and all whose gradients were not finite; count the others."""
        self._abandoned += 1
        if self._abandoned == 1 or row.overflow:
            count, tensors = nonfinite_parameters(self._parameters, row.norms) if row.overflow else (0, ())
            fields = {
                "learner": self.name,
                "overflow": row.overflow,
                "loss_scale": row.loss_scale,
                "loss": (nonfinite_kind(row.loss) or "finite") if loss_known else "unknown",
                "tensors": tensors,
                "count": count,
                "boundary": boundary(self._parameters, row.norms) if row.overflow else ("", ""),
            }
            sink.take(EventRecord("abandoned", step, fields))
        if row.next_scale != row.loss_scale:
            sink.take(ScaleRecord(self.name, step, row.loss_scale, row.next_scale, self._why(row)))

    def _follow_rates(self, step: int, rates: tuple[float, ...], *, updated: bool, sink: Sink) -> None:
        """Say that a schedule moved although there was no update, if it moves with each update.

        One that moves once an epoch, or when a metric stands still, is no fault wherever it moves.
        """
        if self._before is not None:
            last, before, was_updated = self._before
            if was_updated:
                self._moves.append(rates != before)
            elif rates != before:
                at = next((at for at, (old, new) in enumerate(zip(before, rates, strict=False)) if old != new), 0)
                fields = {"learner": self.name, "from_lr": before[at], "to_lr": rates[at], "group": at}
                self._moved.append(EventRecord("schedule_moved", last, fields))
        self._before = step, rates, updated
        if len(self._moves) >= _FEWEST:
            self._say_moved(sink)

    def _say_moved(self, sink: Sink) -> None:
        if sum(self._moves) >= 0.9 * len(self._moves):
            for event in self._moved:
                sink.take(event)
        self._moved = []

    def end(self, step: int, not_looked_at: Iterable[str], sink: Sink) -> None:
        """Say what is known at the end of a loop alone."""
        self._say_moved(sink)
        if self._abandoned > 1:
            sink.take(EventRecord("abandoned_passes", step, {"learner": self.name, "count": self._abandoned}))
        for what in not_looked_at:
            self.say(step, what, sink)


#: Weights and scaled gradients by name; None for a missing gradient.
Tensors = Mapping[str, tuple[Tensor, Tensor | None]]


#: Function of a weight's name, of some of its elements before an update, and of what takes the same elements of other
#: tensors; returns the update of these elements before it was rounded, or None.
ExactUpdate = Callable[[str, Tensor, Callable[[Tensor], Tensor]], "Tensor | None"]


class UpdateHistograms(HistogramWatch):
    """Exponent histograms of the tensors of one update, from the end of the one before it to its own end.

    Activations of compiled models are left out, because hooks on their modules would compile them again. So are those
    of modules whose parameters, by id in ``own``, are not the optimizer's. A look that fails, as without memory, is
    given up with a warning, and ``failure`` says why: training goes on.
    """

    def __init__(
        self,
        learner: str,
        step: int,
        models: Mapping[str, nn.Module],
        own: Set[int],
        frozen: FrozenWeights | None = None,
    ) -> None:
        super().__init__(learner, step, frozen)
        self._exact: ExactUpdate | None = None
        self.step = step
        self.failure = ""
        self._hooks = contextlib.ExitStack()
        for prefix, model in models.items():
            if any(_is_compiled(module) for module in model.modules()):
                continue
            belongs: dict[str, bool] = {}
            for name, module in model.named_modules():
                ids = {id(parameter) for parameter in module.parameters()}
                belongs[name] = bool(ids & own) if ids else belongs.get(name.rpartition(".")[0], False)
                if belongs[name] and is_looked_at(module):
                    look = self._hook(prefix + without_wrappers(name), self._hooks)
                    hook = _InTraining(functools.partial(self._try, look))
                    self._hooks.callback(module.register_forward_hook(hook).remove)

    def backward_ended(self, tensors: Tensors, verdict: Verdict) -> None:
        """Look at weights and accumulated gradients; the last look before the update counts."""
        weights = {name: weight for name, (weight, _) in tensors.items()}
        gradients = {name: gradient for name, (_, gradient) in tensors.items() if gradient is not None}
        half = {name for name, weight in weights.items() if weight.dtype.itemsize <= 2}
        self._try(self._count_before, weights, gradients, half, verdict, verdict.skip)

    def update_ended(
        self,
        tensors: Tensors,
        scale: Tensor,
        skip: Tensor,
        *,
        moves: Callable[[str], bool | Tensor],
        loses: Callable[[str], bool],
        exact: ExactUpdate,
    ) -> None:
        """Look at the weights after an update.

        Args:
            tensors: Weights and gradients.
            scale: Loss scale of the update, float32 (1,).
            skip: 1 if the update was skipped, float32 (1,).
            moves: Whether the rate of a weight of this name is not 0; if it is, an unchanged weight has lost nothing.
            loses: Whether nothing keeps what rounding takes from a weight of this name.
            exact: The update of a weight, as `exact_update`; not called later.
        """
        self.close()
        for name, before in self._before.items():
            if before.moving is not None:
                moving = before.moving & moves(name)  # a rate in a tensor stays on the device
                self._before[name] = before._replace(moving=moving if loses(name) else None)
        if self._verdict is not None:
            self._verdict, self._scale = self._verdict._replace(skip=skip), scale
            self._exact = exact
            self._try(self._count_after, {name: weight for name, (weight, _) in tensors.items()}, {})
            self._exact = None
        if self.left_out:
            classes = "; ".join(f"{name} ({kind})" for name, kind in self.left_out.items())
            warnings.warn(f"mptrain.watch cannot count, and leaves out of histograms: {classes}", stacklevel=2)

    @override
    def exact_update(self, name: str, before: Tensor, same: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if self._exact is None else self._exact(name, before, same)

    @override
    def records(self) -> Sequence[Record]:
        records: list[Record] = []
        self._try(lambda: records.extend(HistogramWatch.records(self)))
        return records

    def close(self) -> None:
        """Take the hooks off the modules."""
        self._hooks.close()

    @override
    def _count(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        if kind in ("activations", "activation_gradients"):  # inside the loop's own passes
            self._try(super()._count, kind, name, tensor)
        else:
            super()._count(kind, name, tensor)

    def _try(self, look: Callable[..., None], *arguments: Any) -> None:
        """Call a function that looks at tensors; after one that has failed, as without memory, do nothing more."""
        if self.failure:
            return
        try:
            look(*arguments)
        except Exception as error:
            self._verdict = None
            self._counts, self._before, self._unchanged, self.left_out = {}, {}, {}, {}
            self.close()
            self.failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            warnings.warn(f"mptrain.watch leaves the histograms of an update out: {self.failure}", stacklevel=2)


class _InTraining:
    """Forward hook that leaves out passes without gradients, as in an evaluation; of a copy of the module, all."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        if self._hook is not None and torch.is_grad_enabled() and computes_now():
            self._hook(*arguments)

    def __reduce__(self) -> tuple[type[_InTraining], tuple[()]]:
        return _InTraining, ()  # for copy and pickle


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
