"""Training step that ended a run after too many skipped steps, as saved in the run's folder ``failure``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mptrain.config.trust import command_with
from mptrain.engine.parts import Parts
from mptrain.lab.step_replay import SavedStep
from mptrain.runlog import RunDirectory
from mptrain.runlog.checkpoint_data import load_plain
from mptrain.runlog.strict_json import parse_strict
from mptrain.system.errors import StorageError
from mptrain.system.files import read_text
from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class FailedStep:
    """Training step that ended a run.

    Attributes:
        step: Number of the step.
        learner: Name of the learner whose updates were skipped.
        loss_scale: Loss scale of that learner in the step.
        cause: Recorded cause, as in `mptrain.engine.failure_diagnosis.Diagnosis.cause`.
        batch: The prepared batch of the step, on the CPU.
        random: State of all random generators before the step; None if it was not saved.
        ranks: Number of ranks, each of which had a part of the batch.
        wide: As `SavedStep.wide`.
    """

    step: int
    learner: str
    loss_scale: float
    cause: str
    batch: Batch
    random: Mapping[str, Any] | None
    ranks: int = 1
    wide: bool = False

    def with_state(self, state: Mapping[str, Any], parts: Parts, *, done: bool) -> SavedStep:
        """Return the step with the state of a checkpoint, saved after the step (``done``) or after an earlier one."""
        logs = {one.name: state["accounts"][one.name]["last"] for one in parts.learners}
        scales = {name: float(last["loss_scale"]) if last else 1.0 for name, last in logs.items()}
        scales[self.learner] = self.loss_scale
        random, batch = self.random or state["random"], self.batch.to(parts.device)
        return SavedStep(self.step, state, batch, self.wide, scales, random, done=done)


def read_failed_step(directory: RunDirectory, packages: Sequence[str] = ()) -> FailedStep:
    """Read the step that ended a run, which allows ``packages``.

    Raises StorageError if a file is unusable, with a command that does not need it as hint.
    """
    path = directory.paths.failure / "diagnosis.json"
    try:
        fields = parse_strict(read_text(path))
        learner, loss_scale, cause = str(fields["learner"]), float(fields["loss_scale"]), str(fields["cause"])
        path = directory.paths.failure / "step.pt"
        saved = load_plain(path)
        tensors, counts = dict(saved["batch"]), saved["counts"]
        batch = Batch(tensors.pop("inputs"), tensors.pop("targets"), tuple(counts) if counts else None, tensors)
        step, ranks, wide = int(saved["step"]), int(saved["ranks"]), bool(saved.get("wide", False))
        return FailedStep(step, learner, loss_scale, cause, batch, saved["random"], ranks, wide)
    except Exception as error:  # the content may be anything
        why = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else "is damaged"
        line = command_with(f"mptrain diagnose {directory.root} --step N", packages)
        raise StorageError(f"{path} {why}", f"diagnose a step by number: {line}") from error
