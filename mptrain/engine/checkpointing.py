"""Checkpoints of a run: its whole state as plain values and tensors and back, when it is saved, and by which rank.

Weights are saved in full precision (master weights where there are any), whatever dtype the model computes in, so a
checkpoint can be resumed or evaluated in another precision mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.engine.parts import Parts
from mptrain.engine.progress import Progress
from mptrain.engine.weights_io import is_weight, set_extra_states
from mptrain.numerics.tensors import part, part_for, saturated
from mptrain.precision.apply import count_out_of_range, describe_clamped, input_dtype
from mptrain.system.errors import CheckpointError, error_in_user_code, out_of_memory
from mptrain.system.process_state import random_state, set_random_state
from mptrain.system.torch_private import loads_itself
from mptrain.system.words import listed

if TYPE_CHECKING:
    from mptrain.engine.options import Options
    from mptrain.engine.step_log import StepLog
    from mptrain.engine.telemetry import NoStorage, Storage, Telemetry


SCHEMA = 3


def take_snapshot(
    parts: Parts, step_log: StepLog, progress: Progress, carried: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Return the complete state of a run, from which it can be resumed exactly. Call it after `StepLog.flush`.

    ``carried`` are non-persistent buffers merged over all ranks, by name; None if this rank has all rows. In the result
    ``model`` has the full-precision weights by name, ``learners`` the states of optimizers, scalers and averages, and
    ``progress`` the counts and metrics.
    """
    weights, tied = parts.full_precision(), tied_names(parts.model)
    model = {
        name: weights.get(tied.get(name, name), value.detach() if isinstance(value, torch.Tensor) else value)
        for name, value in parts.model.state_dict(keep_vars=True).items()
    }
    return {
        "schema": SCHEMA,
        "batch_size": parts.loaders["train"].batch_size,
        "micro_batches": parts.plan.accumulate * parts.comm.world_size,
        "accumulate": parts.plan.accumulate_in_all,
        "ranks": parts.comm.world_size,
        "progress": progress.state_dict(),
        "model": model,
        "tied": tied,
        "carried": dict(carried) if carried is not None else parts.carried(),
        "reshaped": sorted(parts.plan.guard.reshaped),
        "labels": parts.labels_digest,
        "learners": {learner.name: learner.state_dict() for learner in parts.learners},
        "accounts": {log.name: log.state_dict() for log in step_log.learner_logs},
        "random": random_state(parts.device),
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the additional names of a model's tied parameters, each with the first name of its parameter."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: own for name, own in names if name != own}


def require_same_schema(saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if another version of mptrain wrote an untrusted state, or it is damaged."""
    if saved.get("schema") != SCHEMA:
        raise CheckpointError(
            f"the checkpoint has schema {saved.get('schema')}, this mptrain reads {SCHEMA}",
            "use the mptrain version that wrote it",
        )
    if not isinstance(saved.get("labels"), str | None) or not isinstance(saved.get("batch_size"), int):
        raise _damaged("labels or batch_size")
    for name in ("progress", "model", "tied", "carried", "learners", "accounts", "random"):
        if not isinstance(saved.get(name), dict):
            raise _damaged(name)
    for name in ("learners", "accounts"):
        if not all(isinstance(key, str) and isinstance(value, dict) for key, value in saved[name].items()):
            raise _damaged(name)
    for name in ("model", "carried"):
        if not all(isinstance(key, str) for key in saved[name]):
            raise _damaged(name)
    if not isinstance(saved.get("reshaped", []), list):
        raise _damaged("reshaped")
    if not all(isinstance(saved["model"].get(first), torch.Tensor) for first in map(str, saved["tied"].values())):
        raise _damaged("tied")
    for name, learner in saved["learners"].items():
        average = learner.get("average") or {}
        fine = isinstance(average, dict) and all(isinstance(value, torch.Tensor) for value in average.values())
        if "average" not in learner or not fine:
            raise _damaged(f"learners.{name}.average")
    if lost := {"step", "epoch", "batch", "seconds"} - saved["progress"].keys():
        raise _damaged(f"progress.{min(lost)}")
    _require_alike(Progress().state_dict(), saved["progress"], "progress")


def _damaged(path: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's state is damaged: {path} is missing or has a wrong type",
        "restore the folder from a copy, or name another run",
    )


def _require_alike(own: Any, saved: Any, path: str) -> None:
    """Check that saved values have the types and shapes of ours. Missing keys are left to the code that reads them."""
    fine = True
    if isinstance(own, dict):
        fine = isinstance(saved, dict)
        for key in own.keys() & saved.keys() if fine else ():
            _require_alike(own[key], saved[key], f"{path}.{key}")
    elif isinstance(own, torch.Tensor):
        fine = isinstance(saved, torch.Tensor) and saved.shape == own.shape
    elif own is None:  # no value of ours to compare with
        fine = saved is None or isinstance(saved, dict) or type(saved) in (int, float)
    elif isinstance(own, float):
        fine = type(saved) in (int, float)
    elif isinstance(own, bool | str):
        fine = type(saved) is type(own)
    elif isinstance(own, int):
        fine = type(saved) is int and abs(saved) < 2**63
    if not fine:
        raise _damaged(path)


@contextmanager
def _reading() -> Iterator[None]:
    """Convert exceptions from reading a malformed, untrusted state into `CheckpointError`."""
    try:
        yield
    except (
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ) as error:
        if out_of_memory(error) or error_in_user_code(error):
            raise
        raise CheckpointError(
            f"the checkpoint's state is damaged: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0][:200]}",
            "restore the folder from a copy, or name another run",
        ) from error


def require_fit(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless an untrusted saved state fits a run's model, task and batch size."""
    require_same_schema(saved)
    names = {learner.name for learner in parts.learners}
    if saved["learners"].keys() != names:
        raise CheckpointError(
            f"the checkpoint has learners {sorted(saved['learners'])}, the task has {sorted(names)}",
            "resume with the task that it was saved with",
        )
    require_same_labels(parts, saved)  # first, because another vocabulary changes shapes too
    _reshape(parts, saved)
    _require_same_tensors(_fixed(parts), saved["model"])
    before, now = saved["batch_size"], parts.loaders["train"].batch_size
    if before != now:
        raise CheckpointError(
            f"train.batch_size was {before} and is now {now}: position, schedule and steps count batches of {before}",
            f"resume with train.batch_size={before}; train.accumulate may change",
        )
    _require_same_tensors(
        parts.carried(), saved["carried"], "resume with the same carried state: dataset.stream may not change"
    )


def _reshape(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Give buffers the shapes that training has given them, of those that it reshaped or made."""
    tensors = {**saved["model"], **saved["carried"]}
    there = {
        str(name): tensors[name] for name in saved.get("reshaped", ()) if isinstance(tensors.get(name), torch.Tensor)
    }
    parts.plan.guard.reshape(there)


def _fixed(parts: Parts) -> dict[str, Any]:
    """Return a model's state, whose shapes are fixed, without shapes of buffers that its modules load themselves."""
    own = parts.model.state_dict()
    for path, module in parts.model.named_modules():
        if loads_itself(module):
            own.update(
                {name: None for buffer_name in module._buffers if (name := f"{path}.{buffer_name}".strip(".")) in own}
            )
    return own


def _require_same_tensors(
    own: Mapping[str, Any], saved: Mapping[str, Any], hint: str = "resume with the model that it was saved from"
) -> None:
    wrong = [f"it has no {name}" for name in sorted(own.keys() - saved.keys())]
    wrong += [f"the model has no {name}" for name in sorted(saved.keys() - own.keys())]
    wrong += [
        f"{name} is {tuple(saved[name].shape)}, the model's {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
        and isinstance(saved.get(name), torch.Tensor)
        and saved[name].shape != value.shape
    ]
    wrong += [
        f"its {name} is not a tensor"
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and name in saved and not isinstance(saved[name], torch.Tensor)
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {listed(wrong, separator='; ')}",
            hint,
        )


def require_same_labels(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the weights were trained on other labels, so that outputs would mean others."""
    if saved["labels"] != parts.labels_digest:
        has = "other labels (classes, tokens)"
        if tokenizer := parts.data_card().get("tokenizer"):
            has = f"another tokenizer in dataset.tokenizer={tokenizer['name']} as it is read now, or other classes,"
        raise CheckpointError(
            f"{parts.dataset.name} has {has} than the run was trained on",
            "restore the data and the run's dataset keys; data.json in the run directory lists the labels",
        )


def load_weights(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Restore weights, persistent buffers, master weights and averages from a checkpoint, without other state.

    If the checkpoint has no averages, they start from the weights. Raises CheckpointError if the weights do not fit.
    """
    with _reading():
        _reshape(parts, saved)
        _require_same_tensors(_fixed(parts), saved["model"])
        own = parts.model.state_dict(keep_vars=True)
        if parts.blank is None:
            own.update({name: _held(value, own[name]) for name, value in saved["model"].items()})
            parts.model.load_state_dict(own)  # own also has the versions of the modules
        else:
            with torch.no_grad():
                for name, value in own.items():
                    if is_weight(name, value):
                        part(value).copy_(_held(part_for(saved["model"][name], value), value))
                set_extra_states(parts.model, saved["model"], "the checkpoint")
        parts.frozen.update({name: saved["model"][name].float() for name in parts.frozen})
        for learner in parts.learners:
            learner.weights.masters.load_full_precision(saved["model"])
            average = saved["learners"].get(learner.name, {}).get("average")
            if learner.average is not None and average:
                learner.average.load(average)
            elif learner.average is not None:
                learner.average.restart()


def load_carried(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Restore the non-persistent buffers from a checkpoint, where they may have another floating-point dtype."""
    for name, buffer in parts.carried().items():
        buffer.copy_(_held(saved["carried"][name], buffer))


def _held(saved: Any, own: Any) -> Any:
    """Return a saved value saturated to the dtype of the model's tensor: an FP32 value may be beyond the FP16 range."""
    both_float = all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in (saved, own))
    return saturated(saved, own.dtype) if both_float else saved


def _clamped(parts: Parts, saved: Mapping[str, Any]) -> list[str]:
    dtype = input_dtype(parts.policy)
    own = {name for name, value in parts.model.state_dict().items() if getattr(value, "dtype", None) == dtype}
    tensors = {name: saved["model"][name] for name in own if saved["model"][name].is_floating_point()}
    counts = {name: count for name, value in tensors.items() if (count := count_out_of_range(value, dtype))}
    return [describe_clamped(counts, dtype)] if counts else []


def restore_snapshot(parts: Parts, step_log: StepLog, saved: Mapping[str, Any]) -> tuple[Progress, list[str]]:
    """Restore a run from an untrusted saved state: weights, buffers, optimizers, scalers, logs and random states.

    Returns the progress of the run, and one sentence for the user about each item that could not be restored or has
    changed. Raises CheckpointError if the state does not fit the model or the task.
    """
    with _reading():
        require_fit(parts, saved)
        load_weights(parts, saved)
        load_carried(parts, saved)
        notes = _clamped(parts, saved)
        for learner in parts.learners:
            notes += learner.load_state_dict(saved["learners"][learner.name])
        before, now = saved["ranks"], parts.comm.world_size
        if before != now:
            each = f"{parts.plan.accumulate} micro-batch{'es' if parts.plan.accumulate > 1 else ''} per rank"
            notes.append(f"{before} rank{'s' if before != 1 else ''} before, {now} now: the same batches, {each}")
        for log in step_log.learner_logs:
            _require_alike(log.state_dict(), saved["accounts"][log.name], f"accounts.{log.name}")
            log.load_state_dict(saved["accounts"][log.name])
        set_random_state(saved["random"], parts.device)
        return Progress.from_state(saved["progress"]), notes


class Checkpointing:
    """Connection between a run and its checkpoints: decides when to save, saves the state and restores it.

    Attributes:
        saver: Writer of checkpoints, optionally in a background thread. A context manager, entered around the run.
        carried: Buffers that belong to the run and not to its weights, such as an LSTM's state between batches.
    """

    def __init__(
        self, parts: Parts, options: Options, storage: Storage | NoStorage, progress: Progress, telemetry: Telemetry
    ) -> None:
        self._parts, self._options, self._storage = parts, options.checkpoint, storage
        self._progress, self._telemetry = progress, telemetry
        self.saver = storage.saver(async_save=options.checkpoint.async_save)
        self.carried = CarriedBuffers(parts)

    def restore(self, state: Mapping[str, Any], *, forgive: bool) -> list[str]:
        """Restore the run from a checkpoint, and return a sentence for the user about each item that is lost.

        ``forgive`` resets the count of consecutive overflows, for a run that they stopped and that is tried again.
        """
        restored, notes = restore_snapshot(self._parts, self._telemetry.step_log, state)
        self._progress.become(restored)
        self.carried.begin()
        if forgive:
            for log in self._telemetry.step_log.learner_logs:
                log.history.consecutive = 0
        return notes

    def due_after_step(self) -> bool:
        """Return whether ``checkpoint.every_steps`` asks for a checkpoint after the current step."""
        every = self._options.every_steps
        return every is not None and self._progress.step % every == 0

    def due_after_epoch(self) -> bool:
        """Return whether ``checkpoint.every_epochs`` asks for a checkpoint after the current epoch."""
        every = self._options.every_epochs
        return every is not None and self._progress.epoch % every == 0

    def save(self, *, wait: bool = False) -> None:
        """Save the run as a checkpoint, with the validation metric if exactly these weights were validated.

        It is called outside of training steps. ``wait`` blocks until the checkpoint is on disk. Raises StorageError if
        it cannot be written.
        """
        progress, telemetry = self._progress, self._telemetry
        telemetry.show("saving")
        telemetry.step_log.flush()
        telemetry.clock.save()
        metric = None  # kept also if a step is saved again, because it selects the best checkpoint
        if progress.evaluated_at == progress.step:
            metric = progress.last.get("val", {}).get(self._parts.task.metric or "")
        telemetry.event("checkpoint", metric=metric)
        self.saver.save(
            take_snapshot(self._parts, telemetry.step_log, progress, self.carried.whole()),
            step=progress.step,
            metric=metric,
            config_digest=self._storage.config_digest,
            comm=self._parts.comm,
        )
        if wait:
            self.saver.wait()


class CarriedBuffers:
    """Non-persistent buffers of a model, whose rows each rank changes for its own samples, merged over all ranks.

    Each rank trains on its rows of every batch, so it changes only its own rows of such a buffer. The merged buffer
    combines the rows that each rank has changed since all ranks last held the same values. If the last batch of an
    epoch is smaller, a row may belong to another rank. Buffers are therefore merged at the end of every epoch, where
    the row of the highest rank wins. All ranks start with the same buffers.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.begin()

    def begin(self) -> None:
        """Mark the current buffers as equal on all ranks, from which later changes are counted."""
        alone = self._parts.comm.world_size == 1
        self._base = {} if alone else {name: buffer.clone() for name, buffer in self._parts.carried().items()}

    def whole(self) -> dict[str, Tensor]:
        """Return the buffers merged over all ranks, by name, and store them in place on each rank.

        All ranks must call this, outside of steps: at checkpoints and at the end of an epoch. It waits for the device.
        """
        buffers = self._parts.carried()
        if not self._base:
            return buffers
        changes: dict[str, Tensor] = {}
        own = self._parts.plan.guard.reshaped  # of another shape on each rank, perhaps: rank 0's are saved
        for name, buffer in buffers.items():
            if name not in own and not torch.equal(buffer, self._base[name]):
                changes[name] = buffer.cpu()
        base = {name: buffer.cpu() for name, buffer in self._base.items()}
        merged = {name: buffer.clone() for name, buffer in base.items()}
        for theirs in self._parts.comm.all_gather_object(changes):
            for name, buffer in theirs.items():
                merged[name] = torch.where(buffer != base[name], buffer, merged[name])
        for name, buffer in buffers.items():
            buffer.copy_(buffer if name in own else merged[name])
        self.begin()
        return buffers
