"""The whole state of a run as plain values and tensors, and back.

Weights are saved in their best precision (masters where there are any), whatever dtype the model computes in, so a
checkpoint can be continued, or evaluated, in another mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mptrain.engine.parts import Parts, Progress
from mptrain.errors import CheckpointError, out_of_memory
from mptrain.numerics.rounding import saturated
from mptrain.numerics.shards import part, part_for
from mptrain.precision.apply import count_out_of_range, describe_clamped, input_dtype
from mptrain.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from mptrain.engine.step_log import StepLog

SCHEMA = 3


def take_snapshot(
    parts: Parts, step_log: StepLog, progress: Progress, carried: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Everything that a run needs to go on as if nothing had happened. Call after `StepLog.flush`.

    Args:
        parts: The run.
        step_log: Of its steps.
        progress: How far it came.
        carried: The carried buffers with the rows of all ranks; None where this one has all.
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
        "accumulate": parts.plan.asked,
        "ranks": parts.comm.world_size,
        "progress": progress.state_dict(),
        "model": model,
        "tied": tied,
        "carried": dict(carried) if carried is not None else parts.carried(),
        "labels": parts.labels_digest,
        "learners": {learner.name: learner.state_dict() for learner in parts.learners},
        "accounts": {log.name: log.state_dict() for log in step_log.learner_logs},
        "random": random_state(parts.device),
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of parameters that have several, and the first of each."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: own for name, own in names if name != own}


def require_same_schema(saved: Mapping[str, Any]) -> None:
    """Refuse a snapshot of another layout.

    Raises:
        CheckpointError: It was written by an older or newer version of the program.
    """
    if saved.get("schema") != SCHEMA:
        raise CheckpointError(
            f"the checkpoint has schema {saved.get('schema')}, this mptrain reads {SCHEMA}",
            "use the mptrain that wrote it",
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
        f"the checkpoint's state is damaged: {place} is missing or of another kind",
        "restore the folder from a copy, or name another run",
    )


def _require_alike(own: Any, saved: Any, place: str) -> None:
    """Refuse a value of another kind than one of our own; what is missing is the business of whoever reads it.

    Raises:
        CheckpointError: Names the first.
    """
    fine = True
    if isinstance(own, dict):
        fine = isinstance(saved, dict)
        for key in own.keys() & saved.keys() if fine else ():
            _require_alike(own[key], saved[key], f"{place}.{key}")
    elif isinstance(own, torch.Tensor):
        fine = isinstance(saved, torch.Tensor) and saved.shape == own.shape
    elif own is None:  # there is none yet
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
    """Turns what a state of another shape makes of our code into an error for the user; a state is a file of somebody's.

    Raises:
        CheckpointError: Names the error.
    """
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
        if out_of_memory(error):
            raise
        raise CheckpointError(
            f"the checkpoint's state is damaged: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
            "restore the folder from a copy, or name another run",
        ) from error


def require_fit(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Refuse a snapshot of another model or another task, before anything is changed because of it.

    Raises:
        CheckpointError: It does not fit, or is of another schema.
    """
    require_same_schema(saved)
    names = {learner.name for learner in parts.learners}
    if saved["learners"].keys() != names:
        raise CheckpointError(
            f"the checkpoint has learners {sorted(saved['learners'])}, the task has {sorted(names)}",
            "resume with the task it was saved from",
        )
    require_same_labels(parts, saved)  # first: another vocabulary changes shapes as well
    _require_same_tensors(parts.model.state_dict(), saved["model"])
    before, now = saved["batch_size"], parts.loaders["train"].batch_size
    if before != now:
        raise CheckpointError(
            f"train.batch_size was {before} and is now {now}: position, schedule and step count are in batches of {before}",
            f"go on with train.batch_size={before}; train.accumulate may change",
        )
    _require_same_tensors(
        parts.carried(), saved["carried"], "go on with the state it carried: dataset.stream may not change"
    )


def _require_same_tensors(
    own: Mapping[str, Any], saved: Mapping[str, Any], hint: str = "resume with the model it was saved from"
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
        f"its {name} is no tensor"
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and name in saved and not isinstance(saved[name], torch.Tensor)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"the checkpoint does not fit the model: {'; '.join(wrong[:3])}{more}",
            hint,
        )


def require_same_labels(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Refuse weights whose outputs mean something else than this data set's labels.

    Raises:
        CheckpointError: Classes or tokens are not those that were trained on.
    """
    if saved["labels"] != parts.labels_digest:
        raise CheckpointError(
            f"{parts.dataset.name} is not what the run was trained on: its labels (classes, tokens) have changed",
            "restore the data, and the keys of dataset that the run had; data.json in the run has the labels",
        )


def load_weights(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Restore model and master weights from a snapshot, and their averages, or let these begin with the weights.

    Raises:
        CheckpointError: They do not fit the model.
    """
    with _reading():
        _require_same_tensors(parts.model.state_dict(), saved["model"])
        own = parts.model.state_dict(keep_vars=True)
        if parts.blank is None:
            own.update({name: _held(value, own[name]) for name, value in saved["model"].items()})
            parts.model.load_state_dict(own)  # which has the versions of its modules, too
        else:
            with torch.no_grad():
                for name, value in own.items():
                    part(value).copy_(_held(part_for(saved["model"][name], value), value))
        for learner in parts.learners:
            learner.weights.masters.load_full_precision(saved["model"])
            average = saved["learners"].get(learner.name, {}).get("average")
            if learner.average is not None and average:
                learner.average.load(average)
            elif learner.average is not None:
                learner.average.restart()


def _held(saved: Any, own: Any) -> Any:
    """A saved value as a tensor of the model can hold it: what is saved in FP32 may be beyond FP16."""
    both_float = all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in (saved, own))
    return saturated(saved, own.dtype) if both_float else saved


def _clamped(parts: Parts, saved: Mapping[str, Any]) -> list[str]:
    """One sentence about saved values that are beyond the dtype that the model computes with, if there are any."""
    dtype = input_dtype(parts.policy)
    own = {name for name, value in parts.model.state_dict().items() if getattr(value, "dtype", None) == dtype}
    tensors = {name: saved["model"][name] for name in own if saved["model"][name].is_floating_point()}
    counts = {name: count for name, value in tensors.items() if (count := count_out_of_range(value, dtype))}
    return [describe_clamped(counts, dtype)] if counts else []


def restore_snapshot(parts: Parts, step_log: StepLog, saved: Mapping[str, Any]) -> tuple[Progress, list[str]]:
    """Put a run back to where a snapshot was taken.

    Returns:
        The progress, and what could not be restored, as sentences.

    Raises:
        CheckpointError: The snapshot does not fit the model or the task.
    """
    with _reading():
        require_fit(parts, saved)
        load_weights(parts, saved)
        for name, buffer in parts.carried().items():
            buffer.copy_(saved["carried"][name])
        notes = _clamped(parts, saved)
        for learner in parts.learners:
            notes += learner.load_state_dict(saved["learners"][learner.name])
        before, now = saved["ranks"], parts.comm.world_size
        if before != now:
            each = f"{parts.plan.accumulate} micro-batch{'es' if parts.plan.accumulate > 1 else ''} on each"
            notes.append(f"{before} rank{'s' if before != 1 else ''} before, {now} now: the same batches, {each}")
        for log in step_log.learner_logs:
            _require_alike(log.state_dict(), saved["accounts"][log.name], f"accounts.{log.name}")
            log.load_state_dict(saved["accounts"][log.name])
        set_random_state(saved["random"], parts.device)
        return Progress.from_state(saved["progress"]), notes
