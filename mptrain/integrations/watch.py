"""Watch on a training loop that somebody else wrote: each update's loss scale, skip, norm, and what overflowed."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.engine.module_trail import Models, named_models, parameter_names, unwrapped
from mptrain.engine.options import LogOptions
from mptrain.integrations.learner import Owner, WatchedLearner, guarded_call
from mptrain.integrations.passes import rank, warn, world_size
from mptrain.integrations.run_files import RecordFiles, RunFiles, WatchedLoop, rank_files
from mptrain.integrations.torch_calls import Listener, listen, watch_losses
from mptrain.integrations.updates import UpdateLog
from mptrain.numerics.tensors import is_sharded
from mptrain.runlog.lost_updates import lost_shares
from mptrain.runlog.record_writer import Fanout
from mptrain.system.errors import StorageError, UsageError
from mptrain.system.records import (
    EvalRecord,
    EventRecord,
    HistogramRecord,
    OverflowRecord,
    Record,
    ScaleRecord,
    StepRecord,
)
from mptrain.system.torch_private import found_overflow, has_stepped, is_unscaled, loss_scale_of

Event = OverflowRecord | ScaleRecord | EventRecord

#: Entries of the Trainers beside the metrics of an evaluation, and beside those that end in a unit of time.
_NO_METRICS = frozenset({"epoch", "model_preparation_time"})


class _Newest:
    """Sink that keeps the newest step and overflow of each learner, and calls functions for events."""

    def __init__(self) -> None:
        self.steps: dict[str, StepRecord] = {}
        self.overflows: dict[str, OverflowRecord] = {}
        self.lost: dict[str, tuple[int, float, float]] = {}  # step and shares, of weights stored in half precision
        self.functions: list[Callable[[Event], None]] = []
        self._first: list[Event] = []  # before there was a step, and a function

    def take(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps[record.learner] = record
        elif isinstance(record, HistogramRecord):
            stored = record.tensors.get("weights", {})
            in_half = {name for name, counts in stored.items() if counts.dtype in ("float16", "bfloat16")}
            half = [lost for name, lost in record.lost.items() if name in in_half]
            self.lost |= {record.learner: (record.step, *lost_shares(half))} if half else {}
        elif isinstance(record, (OverflowRecord, ScaleRecord, EventRecord)):
            if isinstance(record, OverflowRecord):
                self.overflows[record.learner] = record
            if not self.steps:
                self._first.append(record)
            for function in [*self.functions]:
                self._call(function, record)

    def add(self, function: Callable[[Event], None]) -> None:
        """Call a function for all events from now on, and for those before the first step."""
        self.functions.append(function)
        for event in self._first:
            self._call(function, event)

    def _call(self, function: Callable[[Event], None], event: Event) -> None:
        try:
            function(event)
        except Exception as error:  # training goes on
            self.functions.remove(function)
            warn(f"on_event: {function!r} raised {error!r}, and is not called again")

    def close(self) -> None:
        pass


class _Files:
    """Sink that gives up files that cannot be written, as on a full disk, with a warning: training goes on.

    Histograms are given up first, because they are large; what is written stays.
    """

    def __init__(self, sink: RecordFiles) -> None:
        self._sink: RecordFiles | None = sink
        self._histograms = True
        self._lock = threading.RLock()  # several learners have these files, and another thread may flush one

    def take(self, record: Record) -> None:
        if self._histograms or not isinstance(record, HistogramRecord):
            self._try(lambda sink: sink.take(record))

    def flush(self) -> None:
        self._try(lambda sink: sink.flush())

    def close(self) -> None:
        self._try(lambda sink: sink.close())

    def _try(self, call: Callable[[RecordFiles], object]) -> None:
        with self._lock:
            if self._sink is None:
                return
            try:
                call(self._sink)
            except StorageError as error:
                if self._histograms and self._sink.drop_histograms():
                    self._histograms = False
                    warn(f"mptrain.watch writes no more histograms: {error}")
                    self.flush()  # what is in memory yet
                else:
                    self._sink = None
                    warn(f"mptrain.watch writes no more records: {error}")


def watch(
    model: Models,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    *,
    every: int = 100,
    dir: str | os.PathLike[str] | None = None,  # noqa: A002 - the name that loggers use
    loss_scale: Callable[[], float | Tensor] | None = None,
) -> Watch:
    """Watch a training loop, which stays as it is: weights, losses and random numbers do not change by a bit.

    Every update is on record with its loss, loss scale, rate and gradient norm, and whether the scaler skipped it; with
    the names of the parameters whose gradients were not finite; and with a schedule that moved although the update was
    skipped. So are backward passes that no update follows, if their gradients were not finite; the others are counted.
    Values are copied to the host in blocks, so that no step waits for the device.

    Args:
        model: The model as it is trained, wrapped or compiled too; or several, in a sequence or by name.
        optimizer: The optimizer, or several; also inside the wrappers of accelerate, Lightning, Opacus and others.
        scaler: The loss scaler; None without loss scaling.
        every: Steps between two histograms of all tensors; 0 for none.
        dir: New folder for the records, which ``mptrain report`` and other commands read; None to keep no files.
        loss_scale: Function that returns the present loss scale of a loop that multiplies its loss by hand, without a
            `torch.amp.GradScaler`. It is called at the end of each backward pass.

    Raises:
        StorageError: The folder exists or cannot be written.
        UsageError: The scaler is no `torch.amp.GradScaler`, or the optimizer none of torch; the hint says what to give.
    """
    return Watch(model, optimizer, scaler, every=every, dir=dir, loss_scale=loss_scale)


#: Watches of this process, which a forked child does not continue.
_watches: WeakSet[Watch] = WeakSet()


class Watch(Owner, Listener):
    """Context manager that watches the updates of a training loop without changing it; see `watch`.

    It lives as long as the optimizer that it watches, and ends with it, or with the process, if nobody closes it.
    ``steps`` is the number of steps of the training before this loop, as of one that is resumed.
    """

    def __init__(
        self,
        model: Models,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
        *,
        every: int = 100,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002
        loss_scale: Callable[[], float | Tensor] | None = None,
        log: LogOptions | None = None,
        steps: int = 0,
    ) -> None:
        given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
        models, optimizers = named_models(model), [_with_inner(outer) for outer in given]
        names, log = parameter_names(models), log or LogOptions()
        labels = ["main"] if len(optimizers) == 1 else [f"optimizer{at}" for at in range(len(optimizers))]
        self._newest = _Newest()
        self._hooks = contextlib.ExitStack()  # also if looking fails before there are any
        self._scaler, self._by_hand = _checked(scaler, loss_scale), loss_scale
        self._pending: list[tuple[WatchedLearner, Tensor, list[Tensor] | None]] = []
        self._stepped: set[str] = set()  # learners with updates of gradients that the scaler has looked at
        self._left_out: set[str] = set()
        self._given_up = False
        self.learners: list[WatchedLearner] = []
        with contextlib.ExitStack() as undo:
            if self._scaler is not None:
                undo.callback(listen(self._scaler, self))
            innermost = [chain[-1] for chain in optimizers]
            files = (
                None
                if dir is None
                else _files(Path(dir), models, innermost, self._scaler, steps, by_hand=loss_scale is not None)
            )
            self._files = [] if files is None else [_Files(files)]
            self._sink = Fanout([self._newest, *self._files])
            undo.callback(watch_losses())
            with contextlib.ExitStack() as hooks:
                written = self._files[0].flush if self._files else lambda: None
                for label, chain in zip(labels, optimizers, strict=True):
                    updates = UpdateLog(label, self._sink, log, written, steps)
                    learner = WatchedLearner(chain, names, updates, self, models=models, every=every)
                    hooks.callback(learner.detach)
                    self.learners.append(learner)
                self._hooks = hooks.pop_all()
            # What it calls refers neither to this watch nor to its learners, so that they can be collected.
            logs = [learner.updates for learner in self.learners]
            self._end = finalize(self, _end, logs, self._sink, undo.pop_all(), os.getpid())
        _watches.add(self)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Tell the loss of the newest update, a scalar on any device; call it once a batch, after the update.

        Raises UsageError for a tensor that is no scalar.
        """
        for learner in self.learners if not self._given_up else ():
            value = None if loss is None else learner.passes.scalar(loss)
            learner.guarded(learner.updates.push)(value)

    def evaluated(self, metrics: Mapping[str, float], *, split: str = "val", samples: int = 0) -> None:
        """Record an evaluation after the newest update, which ``mptrain compare`` judges.

        Args:
            metrics: Values by name, such as ``loss`` or ``accuracy``; what is no number is left out, with a warning.
            split: ``val`` or ``test``.
            samples: Number of evaluated samples; 0 if unknown.
        """
        self.flush()
        step = max((learner.updates.steps for learner in self.learners), default=0)
        values = {str(name): number for name, value in metrics.items() if (number := _number(value)) is not None}
        if left_out := [name for name in metrics if str(name) not in values and name not in self._left_out]:
            self._left_out.update(left_out)
            warn(f"mptrain.watch: not on record, because they are no numbers: {', '.join(map(str, left_out))}")
        if values and self.learners:  # a forked child has none
            self._sink.take(EvalRecord(split, step, 0, samples, values))

    def on_event(self, function: Callable[[Event], None]) -> None:
        """Call a function for each event, when it has reached the host: overflows, scale changes, moved schedules.

        It is called at once for what was found before the first step.
        """
        self._newest.add(function)

    @property
    def last(self) -> dict[str, Any]:
        """The newest step that has reached the host, for any logger: plain values by name; empty before the first.

        Of weights stored in half precision without a master copy there are, from the newest look, the share of updates
        that changed nothing, ``lost_updates``, and their share of the magnitude of all, ``lost_magnitude`` (NaN if only
        the optimizer knows its updates); ``looked_at`` is the step of that look.
        With several optimizers the names start with that of the optimizer and a slash.
        """
        last: dict[str, Any] = {}
        for learner in self.learners:
            name = learner.name
            if (step := self._newest.steps.get(name)) is None:
                continue
            prefix = f"{name}/" if len(self.learners) > 1 else ""
            overflow = self._newest.overflows.get(name)
            tensors = overflow.tensors if overflow and overflow.step == step.step else ()
            values = {
                "step": step.step,
                "loss_scale": step.loss_scale,
                "skipped": step.skipped,
                "shard_grad_norm" if learner.passes.sharded else "grad_norm": step.grad_norm,
                "nonfinite": [tensor for tensor, _ in tensors],
            }
            if (lost := self._newest.lost.get(name)) is not None:
                values |= dict(zip(("looked_at", "lost_updates", "lost_magnitude"), lost, strict=True))
            last |= {prefix + key: value for key, value in values.items()}
        return last

    def flush(self) -> None:
        """Write the records of all updates so far; waits for the device. Any thread may call it."""
        for learner in self.learners:
            learner.guarded(learner.updates.flush)()

    def close(self) -> None:
        """Record everything, and take all hooks off; a second call does nothing."""
        if self._end.alive:
            for learner in self.learners if not self._given_up else ():
                learner.guarded(learner.passes.end)()
        with self._hooks:
            self._end()

    @override
    def give_up(self, error: Exception) -> None:
        """Observe no longer, because observing failed; training goes on, and the record says where it ends."""
        if self._given_up:
            return
        self._given_up = True
        for learner in self.learners:
            with contextlib.suppress(Exception):  # it may be what has failed
                learner.updates.push()
            what = f"steps after {learner.updates.steps}: {type(error).__name__}: {error}"
            learner.updates.not_looked_at[what] = None
            with contextlib.suppress(Exception):
                learner.updates.flush()
        self._hooks.close()
        warn(f"mptrain.watch has stopped, and training goes on: {type(error).__name__}: {error}")

    def leave_to_parent(self) -> None:
        """End in a forked child: the records are the parent's."""
        self._end.detach()
        self._hooks.close()
        self._scaler = None
        self.learners = []

    @override
    def updated(self, learner: WatchedLearner) -> None:
        """Record an update without loss scaling; what the scaler has looked at is recorded when it is updated."""
        if self._given_up:
            return
        if self._scaler is None or not found_overflow(self._scaler, self._asked(learner)):
            learner.complete()
        else:
            self._stepped.add(learner.name)

    @override
    def before_pass(self) -> None:
        """Close the updates that the scaler has made: this pass is not of them, although it may reach their weights."""
        for learner in self.learners:
            if self._scaler is not None and has_stepped(self._scaler, self._asked(learner)):
                learner.has_stepped()

    @override
    def loss_scale(self) -> Tensor | None:
        scale = None if self._scaler is None else loss_scale_of(self._scaler)
        return None if scale is None else scale.clone().view(1)

    @override
    def scale_by_hand(self) -> float | Tensor | None:
        return None if self._by_hand is None else self._by_hand()

    @override
    def is_unscaled(self, learner: WatchedLearner) -> bool:
        return self._scaler is None or is_unscaled(self._scaler, self._asked(learner))

    @override
    def before_update(self) -> None:
        if not self._given_up:
            guarded_call(self._keep_found, self)

    def _keep_found(self) -> None:
        """Keep what the scaler has found, which its update forgets."""
        scale, self._pending = self.loss_scale(), []
        for learner in self.learners:
            if self._scaler is None or scale is None:
                continue
            asked = self._asked(learner)
            values: list[Tensor] | None = [each.clone() for each in found_overflow(self._scaler, asked)]
            if not values:
                continue
            if not has_stepped(self._scaler, asked):
                # Stepped by the loop itself, whatever the scaler has found; or unscaled and not stepped: no update.
                values = [] if learner.name in self._stepped else None
            self._pending.append((learner, scale, values))
        self._stepped.clear()

    @override
    def after_update(self) -> None:
        if not self._given_up:
            guarded_call(self._record_pending, self)

    def _record_pending(self) -> None:
        """Record the updates between the last two calls of the scaler's ``update``."""
        after = self.loss_scale()
        for learner, before, found_infs in self._pending:
            if found_infs is not None:
                learner.complete(before, after, found_infs)
            else:
                learner.abandon(before, after)
        self._pending = []

    def _asked(self, learner: WatchedLearner) -> torch.optim.Optimizer:
        """Return the optimizer that the scaler was given: the one that updates, or one that wraps it."""
        assert self._scaler is not None
        known = (optimizer for optimizer in learner.optimizers if found_overflow(self._scaler, optimizer))
        return next(known, learner.optimizer)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WatchingCallback:
    """Base of the callbacks of frameworks: starts a watch and ends it; it never ends a training.

    ``watch`` is that of the running or last training; None before the first, and if it could not begin. For ``every``
    and ``dir`` see `mptrain.watch`; a folder that exists stays, and the records go to ``DIR-2``, ``DIR-3`` and so on.
    Without ``dir`` no files are written.
    """

    def __init__(self, every: int = 100, dir: str | os.PathLike[str] | None = None) -> None:  # noqa: A002
        self.watch: Watch | None = None
        self._every, self._dir, self._trainings = every, dir, 0

    def _start(self, model: Models, optimizer: Any, scaler: torch.amp.GradScaler | None, steps: int) -> None:
        self._close()  # that of a training that an exception ended
        self._trainings += 1
        try:
            self.watch = Watch(model, optimizer, scaler, every=self._every, dir=self._new_folder(), steps=steps)
        except Exception as error:
            self.watch = None
            warn(f"mptrain does not watch this training: {error}. {getattr(error, 'hint', '')}".rstrip(". ") + ".")

    def _evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of an evaluation, without times."""
        named = {
            name: value
            for name, value in metrics.items()
            if name not in _NO_METRICS and not name.endswith(("runtime", "_per_second"))
        }
        if self.watch is not None and named:
            guarded_call(self.watch.evaluated, self.watch, named)

    def _close(self) -> None:
        if self.watch is not None:
            guarded_call(self.watch.close, self.watch)

    def _new_folder(self) -> Path | None:
        if self._dir is None:
            return None
        names = itertools.chain([str(self._dir)], (f"{self._dir}-{number}" for number in itertools.count(2)))
        if world_size() > 1:  # what ranks see of a folder that another makes depends on the time; all count alike
            return Path(next(itertools.islice(names, self._trainings - 1, None)))
        return next(path for name in names if not (path := Path(name)).exists())


def _end(logs: Sequence[UpdateLog], sink: Fanout, undo: contextlib.ExitStack, process: int) -> None:
    """Record everything that is left, and restore what was replaced in torch; not in a forked child."""
    if os.getpid() != process:
        return
    with contextlib.ExitStack() as stack:  # all of it, even if something fails
        stack.callback(sink.close)
        for log in logs:
            stack.callback(_ended, log)
        stack.push(undo)


def _ended(log: UpdateLog) -> None:
    try:
        log.end()
    except Exception as error:  # the loop has done nothing wrong
        warn(f"mptrain.watch: {log.name} has no end on record: {type(error).__name__}: {error}")


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except Exception:  # classes of others may raise anything
        return None


def _with_inner(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return an optimizer, and after it those that it wraps: accelerate's, Lightning's, Opacus', SAM's, Lookahead's.

    The last one updates. One that wraps others has them in an attribute; an optimizer that has one of other parameters
    than its own, for a part of them, is none of these.
    """
    if rounded_by := getattr(optimizer, "rounded_by", ""):
        raise UsageError(
            f"{type(optimizer).__name__} is inside of {rounded_by}, which steps it several times an update, on copies",
            f"give the {rounded_by}, as the loop has it",
        )
    optimizers = [optimizer]
    while True:
        outer = optimizers[-1]
        if getattr(outer, "rounds_bf16", False):  # it steps the one inside several times an update, on copies
            break
        inside = [inner for inner in vars(outer).values() if isinstance(inner, torch.optim.Optimizer)]
        inside = [inner for inner in inside if all(inner is not other for other in optimizers)]
        if len(inside) != 1 or (isinstance(outer, torch.optim.Optimizer) and _updates(outer) != _updates(inside[0])):
            break
        optimizers.append(inside[0])
    if not isinstance(optimizers[-1], torch.optim.Optimizer):
        raise UsageError(
            f"{type(optimizers[-1]).__name__} is no torch.optim.Optimizer, and has not one in an attribute",
            "give the optimizers that it steps, in a list",
        )
    return tuple(optimizers)


def _updates(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _checked(scaler: Any, loss_scale: Callable[[], float | Tensor] | None) -> torch.amp.GradScaler | None:
    """Return the scaler, None for one that is disabled; refuse what is none, or stands beside a scale by hand."""
    if scaler is None:
        return None
    name = type(scaler).__name__
    if not isinstance(scaler, torch.amp.GradScaler):
        inside = [
            key
            for key, attribute in getattr(scaler, "__dict__", {}).items()
            if isinstance(attribute, torch.amp.GradScaler)
        ]
        raise UsageError(
            f"{name} is no torch.amp.GradScaler",
            f"give its attribute {inside[0]}" if inside else "give loss_scale=, a function that returns its scale",
        )
    if loss_scale is not None:
        raise UsageError(f"{name} and loss_scale= are two answers to one question", "give one of them")
    return scaler if scaler.is_enabled() else None


def _files(
    root: Path,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    steps: int,
    *,
    by_hand: bool,
) -> RecordFiles:
    """Return the sink of this rank's files in a new run directory."""
    parameters = [parameter for each in models.values() for parameter in each.parameters()]
    sharded = any(map(is_sharded, parameters))
    if rank() > 0:
        return rank_files(root.absolute(), rank(), sharded=sharded)
    dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    kinds = ", ".join(type(unwrapped(each)).__name__.removeprefix("FSDP" * sharded) for each in models.values())
    # Replicas have one record; of a pipeline, or of ranks that average by hand, it is not known to be that of all.
    alike = sharded or any(isinstance(model, nn.parallel.DistributedDataParallel) for model in models.values())
    whose = "" if world_size() == 1 or alike else f", as rank 0 of {world_size()} has it"
    parts = {
        "model": f"{kinds}, {sum(parameter.numel() for parameter in parameters):,} parameters{whose}",
        "precision": f"parameters {dtypes}" + ", sharded (FSDP2)" * sharded,
        "scaler": "of the loop's own" if by_hand else "none" if scaler is None else _described(scaler),
        "optimizer": "; ".join(
            f"{type(optimizer).__name__}(lr={_first_rate(optimizer):g})" for optimizer in optimizers
        ),
    }
    device = parameters[0].device if parameters else torch.device("cpu")
    kinds_inside = {type(module) for each in models.values() for module in each.modules() if module._parameters}
    own = sorted(kind.__name__ for kind in kinds_inside if not kind.__module__.startswith("torch.nn."))
    inside = f"{', '.join(own[:3])}{' and others' * (len(own) > 3)}"
    loop = WatchedLoop(parts, {} if scaler is None else _rule(scaler), device, sharded, steps, inside)
    return RunFiles(root, loop)


def _first_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the rate that the user gave, before a schedule changed it."""
    group = optimizer.param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))
    return math.nan if rate is None else float(rate)


def _described(scaler: torch.amp.GradScaler) -> str:
    rule = _rule(scaler)
    return (
        f"{type(scaler).__name__}, x{rule['growth_factor']:g} every {rule['growth_interval']} clean steps, "
        f"x{rule['backoff_factor']:g} on overflow"
    )


def _rule(scaler: torch.amp.GradScaler) -> dict[str, float]:
    return {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }


def _leave_to_parent() -> None:
    """End all watches in a forked child, which has the parent's hooks, buffers and files."""
    for active in list(_watches):
        active.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
