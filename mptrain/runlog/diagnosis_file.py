"""``diagnosis/step-NUMBER.json`` of a run: the diagnosis of one of its steps, in plain values without torch.

`mptrain.inspection` makes the diagnosis; this module only defines its format and writes it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mptrain.masking import masked
from mptrain.runlog.atomic_files import write_atomically
from mptrain.runlog.strict_json import indented_json

SCHEMA = 2

#: Maximum number of characters that overrides contribute to a file name.
_LONGEST = 60

#: Place where a step fails: the batch, the weights, the forward pass, the loss, only the backward pass, an operator
#: that torch refuses, or none.
CauseKind = Literal["input", "weights", "forward", "loss", "backward", "refused", "none"]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Value range of the results of a module's operators, over one whole pass.

    Attributes:
        largest: Largest finite magnitude; gradients include the loss scale.
        subnormal: Fraction of the nonzero values below 2^-14, FP16's smallest normal number.
        zero: Fraction of all values that are zero.
        inf: Number of infinite values.
        nan: Number of NaN values.
    """

    largest: float
    subnormal: float
    zero: float
    inf: int
    nan: int


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Statistics of a module that runs operators of its own.

    Attributes:
        name: Qualified name; empty for the model itself, ``(loss)`` for the operators after the model.
        type: Name of its class.
        calls: Number of calls.
        dtype: Dtype of the largest result of its operators.
        forward: Value range of the forward pass; None if the module had no results there.
        backward: Value range of the backward pass; None if the module had no results there.
        breaks: The pass in which the step fails in this module: ``forward``, ``backward``, or empty.
    """

    name: str
    type: str
    calls: int
    dtype: str
    forward: ValueRange | None
    backward: ValueRange | None
    breaks: str


@dataclass(frozen=True, slots=True)
class Remedy:
    """A possible fix and its effect on the step.

    Attributes:
        words: Overrides for the command line; empty if the fix cannot be written as overrides.
        text: Description of the fix.
        helped: Whether the step succeeded with the fix; None if it could not be tried.
        outcome: Description of the result.
    """

    words: tuple[str, ...]
    text: str
    helped: bool | None
    outcome: str


@dataclass(frozen=True, slots=True)
class FurtherCause:
    """A further cause of failure of a step, independent of the first.

    Attributes:
        cause: The place where the step fails.
        module: Name of the module; None if it is in no module.
        operator: Name of the operator; empty if unknown.
        sentence: Description in one sentence.
    """

    cause: CauseKind
    module: str | None
    operator: str
    sentence: str


@dataclass(frozen=True)
class Examination:
    """Diagnosis of one learner's step.

    Attributes:
        subject: The run, or the overrides of the configuration.
        learner: Name of the learner.
        step: Number of the attempted step.
        loss: Unscaled loss.
        loss_scale: Loss scale of the step.
        precision: Precision mode.
        device: Device that computed the step.
        cause: The place where the step fails.
        module: Name of the module where the step fails; None if it is in no module.
        operator: Name of the operator where the step fails; empty if none.
        verdict: Summary in one sentence.
        notes: Observations that are not failures, one sentence each.
        remarks: Conditions under which the step was repeated, one sentence each.
        modules: Statistics of the modules, in the order of the forward pass.
        remedies: Possible fixes, in the order in which they were tried.
        operators: ``operators`` and ``casts`` of the step, as in the event of that name.
        also: Further causes that do not follow from the first.
    """

    subject: str
    learner: str
    step: int
    loss: float
    loss_scale: float
    precision: str
    device: str
    cause: CauseKind
    module: str | None
    operator: str
    verdict: str
    notes: tuple[str, ...]
    remarks: tuple[str, ...]
    modules: tuple[ModuleRow, ...]
    remedies: tuple[Remedy, ...]
    operators: dict[str, list[dict[str, Any]]]
    also: tuple[FurtherCause, ...] = ()


def file_stem(found: Examination, words: Sequence[str] = ()) -> str:
    """Return the file name of a step's diagnosis, without suffix.

    Args:
        found: The diagnosis. The name contains its step, and its learner unless that is ``main``.
        words: Overrides that differ from the run's. Long ones are truncated and distinguished by a checksum.
    """
    words = masked(tuple(words))
    whose = "" if found.learner == "main" else f"-{found.learner}"
    under = re.sub(r"[^\w.=-]+", "-", "-".join(words))
    if under != "-".join(words) or len(under) > _LONGEST:
        under = f"{under[:_LONGEST]}-{zlib.crc32(' '.join(words).encode()):08x}"
    return f"step-{found.step:06d}{whose}{f'-under-{under}' if words else ''}"


def write_examination(path: Path, found: Examination) -> None:
    """Write a diagnosis atomically, as indented strict JSON.

    Raises:
        StorageError: The file cannot be written.
    """
    write_atomically(path, indented_json({"schema": SCHEMA, **asdict(found)}), durable=False)
