"""Conversion of the whole state of a run to plain values and tensors for a checkpoint, and back.

Weights are saved in full precision (master weights where there are any), whatever dtype the model computes in, so a
checkpoint can be resumed or evaluated in another precision mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mptrain.engine.parts import Parts, Progress
from mptrain.engine.weights_io import is_weight, set_extra_states
from mptrain.numerics.rounding import saturated
from mptrain.numerics.shards import part, part_for
from mptrain.numerics.words import listed
from mptrain.precision.apply import count_out_of_range, describe_clamped, input_dtype
from mptrain.system.errors import CheckpointError, error_in_user_code, out_of_memory
from mptrain.system.random_state import random_state, set_random_state
from mptrain.system.torch_private import loads_itself

if TYPE_CHECKING:
    from mptrain.engine.step_log import StepLog

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


def _damaged(place: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's state is damaged: {place} is missing or has a wrong type",
        "restore the folder from a copy, or name another run",
    )


def _require_alike(own: Any, saved: Any, place: str) -> None:
    """Check that saved values have the types and shapes of ours. Missing keys are left to the code that reads them."""
    fine = True
    if isinstance(own, dict):
        fine = isinstance(saved, dict)
        for key in own.keys() & saved.keys() if fine else ():
            _require_alike(own[key], saved[key], f"{place}.{key}")
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
        raise _damaged(place)


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
            own.update({name: None for one in module._buffers if (name := f"{path}.{one}".strip(".")) in own})
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
        raise CheckpointError(
            f"{parts.dataset.name} has other labels (classes, tokens) than the run was trained on",
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
