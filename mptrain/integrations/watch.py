"""Watch on a training loop that somebody else wrote: each update's loss scale, skip, norm, and what overflowed."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.engine.options import LogOptions
from mptrain.integrations.learner import WatchedLearner, rank
from mptrain.integrations.losses import watch_losses
from mptrain.integrations.names import Models, named_models, parameter_names, unwrapped
from mptrain.integrations.run_files import RecordFiles, RunFiles, WatchedLoop, rank_files
from mptrain.integrations.scalers import listen
from mptrain.numerics.shards import is_sharded
from mptrain.runlog.sink import Fanout
from mptrain.system.errors import StorageError
from mptrain.system.records import EvalRecord, EventRecord, OverflowRecord, Record, ScaleRecord, StepRecord
from mptrain.system.torch_private import found_overflow, has_stepped, loss_scale_of

Event = OverflowRecord | ScaleRecord | EventRecord


class _Newest:
    """Sink that keeps the newest step and overflow of each learner, and calls functions for events."""

    def __init__(self) -> None:
        self.steps: dict[str, StepRecord] = {}
        self.overflows: dict[str, OverflowRecord] = {}
        self.functions: list[Callable[[Event], None]] = []

    def take(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps[record.learner] = record
        elif isinstance(record, (OverflowRecord, ScaleRecord, EventRecord)):
            if isinstance(record, OverflowRecord):
                self.overflows[record.learner] = record
            for function in [*self.functions]:
                try:
                    function(record)
                except Exception as error:  # training goes on
                    self.functions.remove(function)
                    warnings.warn(f"on_event: {function!r} raised {error!r}, and is not called again", stacklevel=2)

    def close(self) -> None:
        pass


class _Files:
    """Sink that gives up files that cannot be written, as on a full disk, with a warning: training goes on."""

    def __init__(self, sink: RecordFiles | RunFiles) -> None:
        self._sink: RecordFiles | RunFiles | None = sink

    def take(self, record: Record) -> None:
        self._try(lambda sink: sink.take(record))

    def flush(self) -> None:
        self._try(lambda sink: sink.flush())

    def close(self) -> None:
        self._try(lambda sink: sink.close())

    def _try(self, call: Callable[[RecordFiles | RunFiles], None]) -> None:
        if self._sink is None:
            return
        try:
            call(self._sink)
        except StorageError as error:
            self._sink = None
            warnings.warn(f"mptrain.watch writes no more records: {error}", stacklevel=2)


def watch(
    model: Models,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    *,
    every: int = 100,
    dir: str | os.PathLike[str] | None = None,  # noqa: A002 - the name that loggers use
) -> Watch:
    """Watch a training loop, which stays as it is: weights, losses and random numbers do not change by a bit.

    Every update is on record with its loss, loss scale, rate and gradient norm, and whether the scaler skipped it; with
    the names of the parameters whose gradients were not finite; and with a schedule that moved although the update was
    skipped. Values are copied to the host in blocks, so that no step waits for the device.

    Args:
        model: The model as it is trained, wrapped or compiled too; or several, in a sequence or by name.
        optimizer: The optimizer, or several; also as accelerate, Lightning or Fabric wrap it.
        scaler: The loss scaler; None without loss scaling.
        every: Steps between two histograms of all tensors; 0 for none.
        dir: New folder for the records, which ``mptrain report`` and other commands read; None to keep no files.

    Raises:
        StorageError: The folder exists or cannot be written.
    """
    return Watch(model, optimizer, scaler, every=every, dir=dir)


class Watch:
    """Context manager that watches the updates of a training loop without changing it; see `watch`."""

    def __init__(
        self,
        model: Models,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
        *,
        every: int = 100,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002
        log: LogOptions | None = None,
    ) -> None:
        models, optimizers = named_models(model), _optimizers(optimizer)
        names, log = parameter_names(models), log or LogOptions()
        labels = ["main"] if len(optimizers) == 1 else [f"optimizer{at}" for at in range(len(optimizers))]
        self._newest = _Newest()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._pending: list[tuple[WatchedLearner, Tensor, list[Tensor]]] = []
        self._stepped: set[str] = set()  # learners with updates of gradients that the scaler has looked at
        self.learners: list[WatchedLearner] = []
        with contextlib.ExitStack() as undo:
            if self._scaler is not None:
                undo.callback(listen(self._scaler, self))
            self._files = [] if dir is None else [_Files(_files(Path(dir), models, optimizers, self._scaler))]
            self._sink = Fanout([self._newest, *self._files])
            undo.callback(watch_losses())
            for label, one in zip(labels, optimizers, strict=True):
                learner = WatchedLearner(
                    label, one, names, self._sink, log, models=models, every=every, before_pass=self._before_pass
                )
                undo.callback(learner.detach)
                self.learners.append(learner)
                learner.on_update(functools.partial(self._updated, learner))
            self._undo = undo.pop_all()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Tell the loss of the newest update, a scalar on any device; call it once a batch, after the update.

        Raises UsageError for a tensor that is no scalar.
        """
        for learner in self.learners:
            learner.push(loss)

    def evaluated(self, metrics: Mapping[str, float], *, split: str = "val", samples: int = 0) -> None:
        """Record an evaluation after the newest update, which ``mptrain compare`` judges.

        Args:
            metrics: Values by name, such as ``loss`` or ``accuracy``.
            split: ``val`` or ``test``.
            samples: Number of evaluated samples; 0 if unknown.
        """
        for learner in self.learners:
            learner.flush()
        step = max(learner.steps for learner in self.learners)
        values = {name: float(value) for name, value in metrics.items()}
        self._sink.take(EvalRecord(split, step, 0, samples, values))

    def on_event(self, function: Callable[[Event], None]) -> None:
        """Call a function for each event, when it has reached the host: overflows, scale changes, moved schedules."""
        self._newest.functions.append(function)

    @property
    def last(self) -> dict[str, Any]:
        """The newest step that has reached the host, for any logger: plain values by name; empty before the first.

        With several optimizers the names start with that of the optimizer and a slash.
        """
        found: dict[str, Any] = {}
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
                "shard_grad_norm" if learner.sharded else "grad_norm": step.grad_norm,
                "nonfinite": [tensor for tensor, _ in tensors],
            }
            found |= {prefix + key: value for key, value in values.items()}
        return found

    def flush(self) -> None:
        """Write the records of all updates so far; waits for the device."""
        for learner in self.learners:
            learner.flush()
            learner.refresh()
        for files in self._files:
            files.flush()

    def close(self) -> None:
        """Record everything, and take all hooks off; a second call does nothing."""
        with contextlib.ExitStack() as stack:  # all of it, even if something fails
            stack.callback(self._sink.close)
            for learner in self.learners:
                stack.callback(learner.flush)
            stack.push(self._undo)

    def _updated(self, learner: WatchedLearner) -> None:
        """Record an update without loss scaling; what the scaler has looked at is recorded when it is updated."""
        if self._scaler is None or not found_overflow(self._scaler, learner.optimizer):
            learner.complete()
        else:
            self._stepped.add(learner.name)

    def _before_pass(self) -> None:
        """Close the updates that the scaler has made: this pass is not of them, although it may reach their weights."""
        for learner in self.learners:
            if self._scaler is not None and has_stepped(self._scaler, learner.optimizer):
                learner.has_stepped()

    def before_update(self) -> None:
        """Keep what the scaler has found, which its update forgets."""
        assert self._scaler is not None
        scale = loss_scale_of(self._scaler)
        self._pending = []
        for learner in self.learners:
            values = [each.clone() for each in found_overflow(self._scaler, learner.optimizer)]
            if not values or scale is None:
                continue
            if not has_stepped(self._scaler, learner.optimizer):
                if learner.name not in self._stepped:  # unscaled, and not stepped: no update
                    continue
                values = []  # stepped by the loop itself, whatever the scaler has found
            self._pending.append((learner, scale.clone().view(1), values))
        self._stepped.clear()

    def after_update(self) -> None:
        """Record the updates between the last two calls of the scaler's ``update``."""
        assert self._scaler is not None
        scale = loss_scale_of(self._scaler)
        after = None if scale is None else scale.clone().view(1)
        for learner, before, found in self._pending:
            learner.complete(before, after, found)
        self._pending = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WatchingCallback:
    """Base of the callbacks of frameworks: starts a watch and ends it.

    ``watch`` is that of the running or last training; None before the first. For ``every`` and ``dir`` see
    `mptrain.watch`; without ``dir`` no files are written.
    """

    def __init__(self, every: int = 100, dir: str | os.PathLike[str] | None = None) -> None:  # noqa: A002
        self.watch: Watch | None = None
        self._every, self._dir = every, dir

    def _start(self, model: Models, optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
        self._close()  # that of a training that an exception ended
        self.watch = watch(model, optimizer, scaler, every=self._every, dir=self._dir)

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside the wrappers of accelerate, Lightning and Fabric."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer) and inner is not optimizer:
        optimizer = inner
    found: torch.optim.Optimizer = optimizer
    return found


def _optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    return tuple(map(_innermost, optimizer if isinstance(optimizer, Sequence) else (optimizer,)))


def _files(
    root: Path,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
) -> RecordFiles | RunFiles:
    """Return the sink of this rank's files in a new run directory."""
    parameters = [one for each in models.values() for one in each.parameters()]
    sharded = any(map(is_sharded, parameters))
    if rank() > 0:
        return rank_files(root.absolute(), rank(), sharded=sharded)
    dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in parameters}))
    kinds = ", ".join(type(unwrapped(each)).__name__.removeprefix("FSDP" * sharded) for each in models.values())
    parts = {
        "model": f"{kinds}, {sum(one.numel() for one in parameters):,} parameters",
        "precision": f"parameters {dtypes}" + ", sharded (FSDP2)" * sharded,
        "scaler": "none" if scaler is None else _described(scaler),
        "optimizer": "; ".join(f"{type(one).__name__}(lr={_first_rate(one):g})" for one in optimizers),
    }
    device = parameters[0].device if parameters else torch.device("cpu")
    return RunFiles(root, WatchedLoop(parts, {} if scaler is None else _rule(scaler), device, sharded))


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
