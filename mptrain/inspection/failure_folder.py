"""What a run that ended by its refused steps left in its folder ``failure``, read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mptrain.errors import StorageError
from mptrain.files import read_text
from mptrain.runlog.state_files import load_plain
from mptrain.runlog.strict_json import parse_strict
from mptrain.workloads.base.batch import Batch

if TYPE_CHECKING:
    from mptrain.runlog import RunDirectory


@dataclass(frozen=True)
class Ending:
    """The step that ended a run.

    Attributes:
        step: Which attempt.
        learner: Whose steps were refused.
        loss_scale: At which scale.
        cause: `mptrain.engine.failure.Diagnosis.cause`.
        batch: As it was prepared, on the CPU.
        random: The random state before that step; None where it was not kept.
        ranks: How many processes did it, each a part of the batch.
    """

    step: int
    learner: str
    loss_scale: float
    cause: str
    batch: Batch
    random: Mapping[str, Any] | None
    ranks: int = 1


def read_ending(directory: RunDirectory, trust: str = "") -> Ending:
    """The step that ended a run.

    Args:
        directory: Of the run.
        trust: What a line that names it needs behind it (see `mptrain.config.trust.retyped`).

    Raises:
        StorageError: A file of it is missing or damaged; names the command that does without.
    """
    recorded, kept = directory.paths.failure / "diagnosis.json", directory.paths.failure / "step.pt"
    path, why, cause = recorded, "is damaged", Exception()
    try:
        fields = parse_strict(read_text(recorded))
        path = kept
        saved = load_plain(kept)
        return Ending(
            step=int(saved["step"]),
            learner=str(fields["learner"]),
            loss_scale=float(fields["loss_scale"]),
            cause=str(fields["cause"]),
            batch=_batch(saved),
            random=saved["random"],
            ranks=int(saved["ranks"]),
        )
    except OSError as error:
        why, cause = f"cannot be read: {error.strerror or error}", error
    except Exception as error:  # it holds something else than what a run writes there
        cause = error
    hint = f"look at a step by number: mptrain diagnose {directory.root} --step N{trust}"
    raise StorageError(f"{path} {why}", hint) from cause


def _batch(saved: Mapping[str, Any]) -> Batch:
    tensors = saved["batch"]
    more = {name: tensor for name, tensor in tensors.items() if name not in ("inputs", "targets")}
    return Batch(tensors["inputs"], tensors["targets"], tuple(saved["counts"]) if saved["counts"] else None, more)
