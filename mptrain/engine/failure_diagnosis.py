"""What is kept of a run that cannot go on, and what can be said about why.

Called once, at the end, so it may wait for the device.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mptrain.device import beside_fp64
from mptrain.errors import NumericsError
from mptrain.numerics.formats import scale_in_words
from mptrain.numerics.shards import part
from mptrain.probe.overflow_attribution import nonfinite_parameters
from mptrain.runlog.atomic_files import storage_errors, temporary, write_atomically

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts, Progress
    from mptrain.engine.step import Learner
    from mptrain.engine.step_log import LearnerLog
    from mptrain.records import StepRecord
    from mptrain.scaler.base import Scaler
    from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class Diagnosis:
    """What the last refused step looked like.

    Attributes:
        learner: Whose step it was.
        step: Attempts so far.
        loss_scale: The scale in force.
        refused: Overflowed steps in a row.
        cause: ``input`` (the batch holds inf or NaN), ``weights`` (a parameter or buffer does that did not from the start), ``forward`` (all of
            those are finite, the loss is not), ``backward`` (the loss is finite, gradients are not).
        tensors: The first non-finite tensors: inputs, weights, or gradients by parameter name, with their kind.
        count: How many there are.
        advice: What to try.
    """

    learner: str
    step: int
    loss_scale: float
    refused: int
    cause: str
    tensors: tuple[tuple[str, str], ...]
    count: int
    advice: str

    def describe(self) -> str:
        """One sentence for the person at the terminal."""
        named = ", ".join(f"{name} ({kind})" for name, kind in self.tensors[:3]) or "no tensor"
        more = f" and {self.count - 3} more" if self.count > 3 else ""
        whose = f" of the {self.learner}" if self.learner != "main" else ""
        return (
            f"{self.refused} steps in a row{whose} overflowed, the last at step {self.step} with loss scale "
            f"{scale_in_words(self.loss_scale)}; {_WHAT[self.cause]}: {named}{more}"
        )


_WHAT = {
    "input": "the batch itself is not finite",
    "weights": "weights or buffers are not finite",
    "forward": "the loss is not finite though inputs and weights are; gradients that are not",
    "backward": "inputs, weights and loss are finite; gradients that are not",
}
_ADVICE = {
    "input": "the data holds inf or NaN: clean it, or set dataset.on_error=skip",
    "weights": "weights or buffers themselves are not finite: resume from an earlier checkpoint, with scaler.on_overflow=skip",
    "forward": "the loss is not finite though inputs and weights are: lower optimizer.lr{precision}",
    "backward": "only gradients overflow: {lower}{precision}",
}

#: Another precision, as advice about one that computes in a format.
_PRECISION = {
    "float16": ", name the module in precision.keep_fp32, or use precision=bf16",
    "bfloat16": ", or name the module in precision.keep_fp32",
}


def _diagnose(parts: Parts, learner: Learner, last: StepRecord, refused: int, batch: Batch) -> Diagnosis:
    """Look at the tensors of the last step, whose gradients are still there.

    Args:
        parts: The run.
        learner: The one that only overflows.
        last: Its newest record.
        refused: Overflowed steps in a row.
        batch: The prepared batch of that step.
    """
    buffers = {name for name, _ in parts.model.named_buffers()}
    gradients = learner.judge().norms.tolist()
    found = {
        "input": _non_finite({name: t for name, t in batch.tensors().items() if t.is_floating_point()}),
        "weights": _non_finite(
            {
                f"{'buffer' if name in buffers else 'parameter'} {name}": value
                for name, value in parts.must_be_finite().items()
            }
        ),
        "gradients": nonfinite_parameters(learner.weights.names, gradients),
    }
    if found["input"][0]:
        cause, (count, tensors) = "input", found["input"]
    elif found["weights"][0]:
        cause, (count, tensors) = "weights", found["weights"]
    else:
        cause = "backward" if last.loss - last.loss == 0 else "forward"
        count, tensors = found["gradients"]
    keys = _scale_keys(learner.scaler)
    advice = _ADVICE[cause].format(
        lower=f"lower the scale{keys}" if keys else "lower optimizer.lr",
        precision=_PRECISION.get(parts.policy.compute, ""),
    )
    if learner.name != "main":
        advice = advice.replace("scaler.", f"learners.{learner.name}.scaler.")
    return Diagnosis(learner.name, last.step, last.loss_scale, refused, cause, tensors, count, advice)


def diagnose_overflows(
    parts: Parts,
    log: LearnerLog,
    progress: Progress,
    batch: Batch,
    given: Batch,
    random: Mapping[str, Any],
    folder: Path,
) -> Diagnosis:
    """Find out on all ranks why a learner only overflows, and keep on the first what its last step can be done again from.

    Args:
        parts: The run.
        log: Of that learner.
        progress: Just behind that step.
        batch: Of that step, prepared; this rank's part.
        given: What was trained on; another one where a fault was put into it.
        random: The first rank's random state before that step.
        folder: Where it is kept; made if missing.

    Raises:
        StorageError: The disk refuses.
    """
    learner = next(learner for learner in parts.learners if learner.name == log.name)
    assert log.last is not None
    found = parts.comm.all_gather_object(_diagnose(parts, learner, log.last, log.history.consecutive, given))
    diagnosis = min(found, key=lambda one: list(_WHAT).index(one.cause))  # nearest to the data
    if parts.fault.is_at(diagnosis.step):
        first = "a fault was put in on purpose (inject.*), so leave that out first"
        diagnosis = replace(diagnosis, advice=f"{first}; {diagnosis.advice}")
    if parts.comm.is_rank_zero:
        whole, world_size = batch, 1
        if parts.comm.world_size > 1:
            with contextlib.suppress(Exception):  # no memory, no file: then there is this rank's part
                fetched = parts.loaders["train"].whole_batch(progress.epoch, progress.batch - 1)
                whole, world_size = parts.prepare(fetched), parts.comm.world_size
        _keep(folder, diagnosis, whole, random, world_size)
    return diagnosis


def _scale_keys(scaler: Scaler) -> str:
    """The keys of a scaler that lower its scale, in brackets; empty where it has none."""
    keys = [f"scaler.{key}" for key in ("scale", "init_scale", "min_scale") if hasattr(scaler, key)]
    return f" ({' or '.join(keys)})" if keys else ""


def is_finite(parts: Parts) -> bool:
    """Whether all weights and buffers are finite, so that the state is worth saving."""
    return _non_finite(parts.must_be_finite())[0] == 0


def require_success(
    progress: Progress, learner_logs: Sequence[LearnerLog], metric: str | None, *, half: bool
) -> list[str]:
    """Refuse to call a run done that learned nothing because of its numerics.

    Returns:
        Warnings, one sentence each: a short run that ended while its first loss scales were still coming down.

    Raises:
        NumericsError: A learner never applied an update though its scale could fall no further, or a loss of the last
            evaluation, or the task's metric, is not finite.
    """
    warnings = []
    for log in learner_logs:
        if not progress.step or log.updates:
            continue
        whose = "" if len(learner_logs) == 1 else f" of the {log.name}"
        what = f"not one of {progress.step} updates{whose} was applied: every step overflowed"
        if log.history.counts.keys() != {"calibrating"}:
            raise NumericsError(
                what, "lower the scale (scaler.scale, scaler.init_scale) or train for longer than it takes to come down"
            )
        warnings.append(f"{what}, because the loss scale was still coming down; train for longer")
    for split, metrics in progress.last.items():
        for name, value in metrics.items():
            if (name == metric or name.endswith("loss")) and not math.isfinite(value):
                trained = all(log.last is not None and math.isfinite(log.last.loss) for log in learner_logs)
                what = f"its last {name.replace('_', ' ')} on {split} is {value}"
                if half and trained:
                    raise NumericsError(
                        f"{what}, though its last training loss is finite",
                        "evaluate in FP32 (precision.eval=fp32), or lower optimizer.lr",
                    )
                raise NumericsError(
                    f"the run diverged: {what}",
                    "lower optimizer.lr, clip with train.clip_norm, or compare with precision=fp32",
                )
    return warnings


def _keep(folder: Path, diagnosis: Diagnosis, batch: Batch, random: Mapping[str, Any], world_size: int) -> None:
    """Write ``diagnosis.json`` and ``step.pt``, from which the last step can be done again.

    Args:
        folder: Made if missing.
        diagnosis: What was found.
        batch: The prepared batch of the last step, of all ranks.
        random: The random state before that step, the first rank's. ``step.pt`` is loadable with ``weights_only=True``.
        world_size: Number of ranks that did it, if ``batch`` is that of all.
    """
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        saved = {
            "step": diagnosis.step,
            "batch": {name: tensor.cpu() for name, tensor in batch.tensors().items()},
            "counts": list(batch.counts) if batch.counts else None,
            "random": random,
            "ranks": world_size,
        }
        draft = temporary(folder / "step.pt")
        torch.save(saved, draft)
        draft.replace(folder / "step.pt")
    write_atomically(folder / "diagnosis.json", json.dumps(asdict(diagnosis), indent=2) + "\n")


def _non_finite(tensors: dict[str, torch.Tensor]) -> tuple[int, tuple[tuple[str, str], ...]]:
    names = list(tensors)
    if not names:
        return 0, ()
    norms = [torch.linalg.vector_norm(beside_fp64(part(tensors[name].detach())), dtype=torch.float64) for name in names]
    return nonfinite_parameters(names, torch.stack(norms).tolist())
