"""Format and writer of ``diagnosis/step-NUMBER.json`` in a run directory: the diagnosis of one failed or chosen step.

The file has plain values, and this module does not import torch. The lab makes the diagnosis.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mptrain.runlog.atomic_files import write_atomically
from mptrain.runlog.strict_json import indented_json
from mptrain.system.masking import masked

SCHEMA = 2

#: Maximum number of characters that overrides contribute to a file name.
_LONGEST = 60

#: Place where a step fails: the batch, the weights, the forward pass, the loss, only the backward pass, an operator
#: that torch refuses, the updates before it (the run diverged), an evaluation of its weights, or none.
CauseKind = Literal["input", "weights", "forward", "loss", "backward", "refused", "updates", "evaluation", "none"]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Range of the values that a module's own operators return in one pass, forward or backward, of a diagnosed step.

    Attributes:
        largest: Largest finite magnitude; gradients include the loss scale.
        subnormal: Fraction of the nonzero values with a magnitude below 2^-14, FP16's smallest normal number.
        zero: Fraction of all values that are zero.
        inf: Number of infinite values; ``nan`` is that of NaN values.
    """

    largest: float
    subnormal: float
    zero: float
    inf: int
    nan: int


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Statistics of one module of the model in a diagnosed step, for modules that run operators of their own.

    Attributes:
        name: Qualified name as in ``named_modules()``; empty for the model itself, ``(loss)`` for the operators
            after the model.
        type: Name of the module's class.
        dtype: Dtype of the operator result with the most elements, such as ``float16``.
        forward: Value range of the forward pass; None if the module had no results there. Likewise ``backward``.
        breaks: Pass in which the step fails in this module: ``forward``, ``backward``, or empty.
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
    """Possible fix for a diagnosed step, and its effect when the step was repeated with it.

    Attributes:
        words: ``KEY=VALUE`` overrides that apply the fix; empty if it cannot be written as overrides.
        text: Description of the fix.
        helped: Whether the step succeeded with the fix; None if it could not be tried.
        outcome: Description of the result, or the reason why it was not tried.
    """

    words: tuple[str, ...]
    text: str
    helped: bool | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Fix:
    """First remedy with which a diagnosed step succeeded, as the words and commands that train with it.

    Attributes:
        overrides: Overrides to train with.
        command: Command that resumes the run with them; empty if it cannot be resumed, or there is no run.
        why_not: Reason why the run cannot be resumed; empty otherwise.
        dynamic_command: Command that resumes it with a loss scale that follows later gradients; empty if not needed.
    """

    overrides: tuple[str, ...]
    command: str = ""
    why_not: str = ""
    dynamic_command: str = ""


@dataclass(frozen=True, slots=True)
class FurtherCause:
    """Further cause of failure of a diagnosed step, independent of the first.

    Attributes:
        module: Qualified name of the module; None if the cause is in no module.
        operator: Name of the operator; empty if unknown.
        sentence: Description of the cause in one sentence.
    """

    cause: CauseKind
    module: str | None
    operator: str
    sentence: str


@dataclass(frozen=True)
class Examination:
    """Diagnosis of one learner in one training step.

    Attributes:
        subject: The run, or the overrides of the configuration, whose step it is.
        learner: Name of the learner; ``main`` if there is only one.
        step: Number of the step, counted from 1 with skipped steps included.
        loss: Unscaled loss of the step.
        precision: Name of the precision mode, such as ``fp16_dynamic``.
        cause: Place where the step fails; ``none`` if it does not.
        module: Qualified name of the module where the step fails; None if it is in no module.
        operator: Name of the operator where the step fails; empty if none.
        verdict: Summary of the diagnosis in one sentence.
        notes: Observations that are not failures, one sentence each.
        remarks: Conditions under which the step was repeated, one sentence each.
        modules: Statistics of the modules, in the order of the forward pass.
        remedies: Possible fixes, in the order in which they were tried.
        operators: Counts of operators by dtype and of casts: ``operators`` and ``casts`` of the event
            ``operators`` in ``events.jsonl``.
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


def file_stem(examination: Examination, words: Sequence[str] = ()) -> str:
    """Return the file name of a step's diagnosis in the run directory, without suffix, such as ``step-000005``.

    The name contains the learner unless that is ``main``, and ``words``, the overrides under which the step was
    repeated if they differ from the run's. Long ones are truncated and distinguished by a checksum.
    """
    words = masked(tuple(words))
    whose = "" if examination.learner == "main" else f"-{examination.learner}"
    under = re.sub(r"[^\w.=-]+", "-", "-".join(words))
    if under != "-".join(words) or len(under) > _LONGEST:
        under = f"{under[:_LONGEST]}-{zlib.crc32(' '.join(words).encode()):08x}"
    return f"step-{examination.step:06d}{whose}{f'-under-{under}' if words else ''}"


def write_examination(path: Path, examination: Examination) -> None:
    """Write the diagnosis of a step to a JSON file atomically, as indented strict JSON with a schema number."""
    write_atomically(path, indented_json({"schema": SCHEMA, **asdict(examination)}), durable=False)
