"""Early end of a run after a signal, a lost rank or too many overflows, and the diagnosis of its last step."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mptrain.engine.buffer_guard import Thawed
from mptrain.engine.observer import nonfinite_parameters
from mptrain.numerics.tensors import part
from mptrain.parallel.torchrun import RankLost
from mptrain.runlog.atomic_files import storage_errors, temporary, write_atomically
from mptrain.system.device import beside_fp64
from mptrain.system.errors import EXIT_PREEMPTED, NumericsError, Preempted
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.engine.checkpointing import Checkpointing
    from mptrain.engine.parts import Parts
    from mptrain.engine.progress import Progress
    from mptrain.engine.step import Learner
    from mptrain.engine.step_log import LearnerLog
    from mptrain.engine.telemetry import Telemetry
    from mptrain.runlog.run_paths import RunPaths
    from mptrain.scaler.base import Scaler
    from mptrain.system.records import StepRecord
    from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class Diagnosis:
    """Cause of the last overflow of a run that stopped because its gradients overflowed in too many consecutive steps.

    Attributes:
        step: Number of attempted steps, skipped ones included.
        refused: Number of consecutive overflows.
        cause: Earliest part of the step that is not finite: ``input`` (the batch holds inf or NaN), ``cast`` (only
            after the cast to the input dtype of the model), ``weights`` (a parameter or buffer holds inf or NaN that
            did not at the start), ``forward`` (all of these are finite, but the loss is not) or ``backward`` (the loss
            is finite, but gradients are not).
        tensors: Names of the first of ``count`` non-finite inputs, weights or gradients, each with ``inf`` or ``nan``.
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
        """Return the diagnosis as one sentence for the user: number of overflows, last step, cause and tensors."""
        named = ", ".join(f"{name} ({kind})" for name, kind in self.tensors[:3]) or "no tensor"
        more = f" and {self.count - 3} more" if self.count > 3 else ""
        whose = f" of the {self.learner}" if self.learner != "main" else ""
        return (
            f"{self.refused} steps in a row{whose} overflowed, the last at step {self.step} with loss scale "
            f"{scale_in_words(self.loss_scale)}; {_WHAT[self.cause]}: {named}{more}"
        )


_WHAT = {
    "input": "the batch itself is not finite",
    "cast": "the data are finite, the batch is not after the cast to the input dtype of the model",
    "weights": "weights or buffers are not finite",
    "forward": "the loss is not finite, although inputs and weights are; non-finite gradients",
    "backward": "inputs, weights and loss are finite; non-finite gradients",
}
_ADVICE = {
    "input": "the data holds inf or NaN: clean it, or set dataset.on_error=skip",
    "cast": "standardise the inputs in the data set, or choose a mode whose inputs stay FP32 (precision=amp_dynamic)",
    "weights": "weights or buffers are not finite: resume from an earlier checkpoint with scaler.on_overflow=skip",
    "forward": "the loss is not finite, although inputs and weights are: lower optimizer.lr{precision}",
    "backward": "only gradients overflow: {lower}{precision}",
}

#: Multiple of the first loss, that of an untrained network, above which a run has diverged.
FAR = 8.0

#: Advice on precision, by compute dtype.
_PRECISION = {
    "float16": ", name the module in precision.keep_fp32, or use precision=bf16",
    "bfloat16": ", or name the module in precision.keep_fp32",
}


def _diagnose(parts: Parts, learner: Learner, last: StepRecord, refused: int, batch: Batch) -> Diagnosis:
    """Diagnose the last step from its tensors; its gradients must still be there."""
    buffers = {name for name, _ in parts.model.named_buffers()}
    gradients = learner.judge().norms.tolist()
    nonfinite = {
        "input": _non_finite({name: t for name, t in batch.tensors().items() if t.is_floating_point()}),
        "weights": _non_finite(
            {
                f"{'buffer' if name in buffers else 'parameter'} {name}": value
                for name, value in parts.must_be_finite().items()
            }
        ),
        "gradients": nonfinite_parameters(learner.weights.names, gradients),
    }
    if nonfinite["input"][0]:
        cause, (count, tensors) = "input", nonfinite["input"]
    elif nonfinite["weights"][0]:
        cause, (count, tensors) = "weights", nonfinite["weights"]
    else:
        cause = "backward" if last.loss - last.loss == 0 else "forward"
        count, tensors = nonfinite["gradients"]
    keys = _scale_keys(learner.scaler)
    follow = ", or let it follow the gradients (scaler=dynamic)" if hasattr(learner.scaler, "scale") else ""
    lower = f"lower the scale{keys}{follow}" if keys else "lower optimizer.lr"
    if getattr(learner.scaler, "min_scale", None) and last.loss_scale <= learner.scaler.floor:
        lower = _below(last.loss_scale)
    advice = _ADVICE[cause].format(lower=lower, precision=_PRECISION.get(parts.policy.compute, ""))
    if learner.name != "main":
        advice = advice.replace("scaler.", f"learners.{learner.name}.scaler.")
    return Diagnosis(learner.name, last.step, last.loss_scale, refused, cause, tensors, count, advice)


def _below(floor: float) -> str:
    return f"set scaler.init_scale and scaler.min_scale below {scale_in_words(floor)}"


def diagnose_overflows(
    parts: Parts,
    log: LearnerLog,
    progress: Progress,
    batch: Batch,
    given: Batch,
    random: Mapping[str, Any],
    folder: Path,
) -> Diagnosis:
    """Diagnose why a learner's gradients overflow in every step. All ranks must call this together.

    Rank 0 saves ``diagnosis.json`` and ``step.pt``, from which the last step can be replayed, in ``folder``. The
    gradients of that step must still be there. ``batch`` is this rank's part as prepared; ``given`` differs from it if
    a fault was injected. ``random`` is the random state of rank 0 before the step. Returns the diagnosis of the rank
    with the earliest cause. Raises StorageError if a file cannot be written.
    """
    learner = next(learner for learner in parts.learners if learner.name == log.name)
    assert log.last is not None
    diagnoses = parts.comm.all_gather_object(_diagnose(parts, learner, log.last, log.history.consecutive, given))
    diagnosis = min(diagnoses, key=lambda candidate: list(_WHAT).index(candidate.cause))  # the earliest cause
    if diagnosis.cause == "forward" and _diverged(log):
        diagnosis = replace(diagnosis, advice="the run diverged: lower optimizer.lr, or clip with train.clip_norm")
    if parts.fault.is_at(diagnosis.step):
        first = "a fault was injected on purpose (inject.*): remove it first"
        diagnosis = replace(diagnosis, advice=f"{first}; {diagnosis.advice}")
    if parts.comm.is_rank_zero:
        whole, world_size, wide = batch, 1, False
        if parts.comm.world_size > 1 or diagnosis.cause == "input":
            with contextlib.suppress(Exception):  # out of memory or file missing: keep this rank's part
                fetched = parts.loaders["train"].whole_batch(progress.epoch, progress.batch - 1)
                unrounded = parts.prepare_float32(fetched)
                finite = all(bool(tensor.isfinite().all()) for tensor in unrounded.tensors().values())
                if diagnosis.cause == "input" and finite and not parts.fault.is_at(diagnosis.step):
                    diagnosis = replace(diagnosis, cause="cast", advice=_ADVICE["cast"])
                if finite or parts.comm.world_size > 1:
                    whole, world_size, wide = unrounded, parts.comm.world_size, True
        _keep(folder, diagnosis, whole, random, world_size, wide=wide)
    return parts.comm.broadcast_object(diagnosis)


def _scale_keys(scaler: Scaler) -> str:
    keys = [f"scaler.{key}" for key in ("scale", "init_scale", "min_scale") if hasattr(scaler, key)]
    return f" ({' or '.join(keys)})" if keys else ""


def is_finite(parts: Parts) -> bool:
    """Return whether all weights and buffers are finite, except buffers that held inf from the start, such as masks."""
    return _non_finite(parts.must_be_finite())[0] == 0


def require_success(
    progress: Progress, learner_logs: Sequence[LearnerLog], metric: str | None, root: Path, *, half: bool
) -> list[str]:
    """Raise an error if a finished run trained nothing because of its numerics; return warnings for the user.

    Raises NumericsError if a learner applied no update, and not only because its initial loss scale was still
    decreasing, for which there is a warning; or if a loss or the task's ``metric`` is not finite in the last
    evaluation. ``half`` says that it computes in less than FP32. ``root``, the run directory, is for a command.
    """
    warnings, examine = [], f"mptrain diagnose {root}"
    for log in learner_logs:
        if not progress.step or log.updates:
            continue
        whose = "" if len(learner_logs) == 1 else f" of the {log.name}"
        what = f"none of {progress.step} updates{whose} was applied: every step overflowed"
        if not log.finite_losses:
            raise NumericsError(f"{what}, and no loss was finite", f"{examine} names the module and the operator")
        first, *_, scale = progress.learners[log.name].scale_path or (0.0, 0.0)
        if log.history.floor >= scale < first:
            raise NumericsError(f"{what}, at the lowest loss scale too", f"{_below(scale)}; {examine} tries a scale")
        if log.history.counts.keys() != {"calibrating"}:
            raise NumericsError(what, f"{examine} names the module and the operator, and tests fixes")
        warnings.append(f"{what}, because the loss scale was still decreasing; train for more steps")
    if not progress.last and any(log.skipped == log.history.consecutive > 0 and _diverged(log) for log in learner_logs):
        what = "no update was applied any more until its end, and nothing was evaluated"
        raise NumericsError(f"the run diverged: {what}", "lower optimizer.lr, or clip with train.clip_norm")
    for split, metrics in progress.last.items():
        for name, value in nonfinite_metrics(metrics, metric).items():
            what = f"the last {name.replace('_', ' ')} on {split} is {value}"
            if any(map(_diverged, learner_logs)):
                compare = ", or compare with precision=fp32" if half else ""
                raise NumericsError(
                    f"the run diverged: {what}", f"lower optimizer.lr, or clip with train.clip_norm{compare}"
                )
            if unexpected := sum(log.history.counts.get("unexpected", 0) for log in learner_logs):
                steps = "1 training step" if unexpected == 1 else f"{unexpected} training steps"
                raise NumericsError(f"{what}, and {steps} overflowed unexpectedly", f"{examine} examines them")
            wide = "evaluate in FP32 (precision.eval=fp32); if that is not finite either, " if half else ""
            raise NumericsError(
                f"{what}, although no training step overflowed unexpectedly",
                f"{wide}{examine} examines an evaluation of this model too",
            )
    return warnings


def nonfinite_metrics(metrics: Mapping[str, float], metric: str | None) -> dict[str, float]:
    """Return the losses and the main metric of an evaluation that are not finite, by name."""
    judged = {name: value for name, value in metrics.items() if name == metric or name.endswith("loss")}
    return {name: value for name, value in judged.items() if not math.isfinite(value)}


def _diverged(log: LearnerLog) -> bool:
    rose = bool(log.finite_losses) and log.finite_losses[-1] > FAR * log.finite_losses[0] > 0
    broken = log.last is not None and not math.isfinite(log.last.loss)
    return rose or (broken and log.updates > 0 and 0 < log.skipped == log.history.consecutive)


def _keep(
    folder: Path, diagnosis: Diagnosis, batch: Batch, random: Mapping[str, Any], world_size: int, *, wide: bool
) -> None:
    """Write ``diagnosis.json`` and ``step.pt``, loadable with ``weights_only=True``.

    ``world_size`` is 1 if the batch is only one rank's part; ``wide`` says that it has the dtype of the data set.
    """
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        saved = {
            "step": diagnosis.step,
            "batch": {name: tensor.cpu() for name, tensor in batch.tensors().items()},
            "counts": list(batch.counts) if batch.counts else None,
            "random": random,
            "ranks": world_size,
            "wide": wide,
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


#: What distributed=fsdp2 needs, and a cause of ranks that end without a word.
SAME_MODULES = (
    "distributed=fsdp2 needs all ranks to run the same modules in every pass, so draw what is left out alike on all "
    "ranks, or choose distributed=ddp"
)


class Termination:
    """Early end of a run: saves what can be saved and raises an error that says how to continue."""

    def __init__(
        self,
        parts: Parts,
        paths: RunPaths,
        progress: Progress,
        planned: int,
        telemetry: Telemetry,
        checkpointing: Checkpointing,
    ) -> None:
        self._parts, self._paths = parts, paths
        self._progress, self._planned = progress, planned
        self._telemetry, self._checkpointing = telemetry, checkpointing

    def by_signal(self, name: str, exit_code: int) -> NoReturn:
        """Save the run after a signal, then raise Preempted, which says how to resume."""
        self._telemetry.step_log.flush()
        self._telemetry.event("signal", signal=name)
        self._checkpointing.save(wait=True)
        raise Preempted(
            f"{'Ctrl-C' if name == 'SIGINT' else name}, {self._saved()}",
            f"continue with: mptrain resume {self._paths.root}",
            exit_code,
        )

    def by_lost_rank(self, error: BaseException, *, within_step: bool) -> NoReturn:
        """Save the run after another rank was lost, if this rank has the whole state; then raise an error.

        Within a step, every exchange between ranks precedes all changes, so only buffers may have changed. Raises the
        error that the lost rank reported, or else Preempted, which says how to resume.
        """
        comm, saver = self._parts.comm, self._checkpointing.saver
        why = comm.why()
        saved = comm.is_rank_zero and self._complete_here()
        if saved:
            if within_step:
                self._parts.plan.guard.restore(torch.ones(1, device=self._parts.device))
            self._checkpointing.save(wait=True)
        else:
            with contextlib.suppress(RankLost):  # a copy from the device may never complete
                saver.wait()
        if why is not None:
            raise why from error
        raise Preempted(
            f"{comm.who_ended()}; {self._saved() if saved else 'not saved; resuming starts from the last checkpoint'}",
            f"continue with: mptrain resume {self._paths.root}"
            + (f"; if it ends again: {SAME_MODULES}" if self._parts.blank is not None else ""),
            EXIT_PREEMPTED,
            saved=saved,
            asked=False,
        ) from error

    def by_thawed(self, error: Thawed) -> NoReturn:
        """Save the run as it was before the step in which a frozen parameter began to learn, then raise the error."""
        self._parts.plan.guard.restore(torch.ones(1, device=self._parts.device))
        self._checkpointing.save(wait=True)
        raise Thawed(f"{error}; {self._saved()}", error.hint) from error

    def by_overflows(self, log: LearnerLog, batch: Batch, given: Batch, random: Mapping[str, Any]) -> NoReturn:
        """Diagnose a run whose gradients overflow in every step, save its last batch, and its weights if finite.

        ``given`` is the batch with an injected fault, if there is one; ``random`` is the random state before that step.
        Raises NumericsError with the cause and a suggested fix.
        """
        failure: Path = self._paths.failure
        diagnosis = diagnose_overflows(self._parts, log, self._progress, batch, given, random, failure)
        sound = self._parts.comm.all_reduce_ints([not is_finite(self._parts)]) == [0]
        self._telemetry.event("failure", cause=diagnosis.cause)
        if sound:
            self._checkpointing.save(wait=True)
            kept = f"; weights and batch are saved in {self._paths.root}"
        else:
            kept = f"; the batch is saved in {failure}"
        closer = f"{diagnosis.advice}; mptrain diagnose {self._paths.root} tries this"
        raise NumericsError(diagnosis.describe() + kept, closer)

    def _saved(self) -> str:
        return f"saved after step {self._progress.step} of {self._planned}"

    def _complete_here(self) -> bool:
        """Return whether this rank alone has the whole state and its current step has changed none of it."""
        parts = self._parts
        sharded = any(learner.weights.sharded for learner in parts.learners)
        return parts.device.type == "cpu" and len(parts.learners) == 1 and not sharded and not parts.carried()
