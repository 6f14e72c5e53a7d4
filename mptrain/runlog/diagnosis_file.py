"""``diagnosis/step-NUMBER.json`` of a run: what a look at one of its steps found. Plain values; knows no torch.

What there is to find is the business of `mptrain.inspection`; this module only says how it is kept.
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

#: Letters of the words in a file's name at most.
_LONGEST = 60

#: Place in which a step goes wrong: in the batch, in the weights, in the forward pass, in the loss, in the backward pass alone, in an
#: operator that torch refuses; or nowhere.
CauseKind = Literal["input", "weights", "forward", "loss", "backward", "refused", "none"]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Range that the results of a module's operators reach, all of one pass together.

    Attributes:
        largest: Largest finite magnitude; gradients carry the loss scale.
        subnormal: Share of the nonzero values below 2^-14, FP16's smallest normal number.
        zero: Share of all values that are zero.
        inf: How many are infinite.
        nan: How many are no numbers.
    """

    largest: float
    subnormal: float
    zero: float
    inf: int
    nan: int


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module whose own operators were seen.

    Attributes:
        name: Its qualified name; empty for the model itself, ``(loss)`` for what is done with its output.
        type: Its class.
        calls: How often it was called.
        dtype: Of the largest of its operators' results.
        forward: Results of the forward pass, None where it had none.
        backward: Likewise.
        breaks: The pass in which a step goes wrong in it: ``forward``, ``backward``, or empty.
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
    """Something to try, and what it did to this step.

    Attributes:
        words: What to write, as on the command line; empty where it is nothing that can be written there.
        text: The same in words.
        helped: Whether the step was then in order; None where it could not be tried.
        outcome: What was seen.
    """

    words: tuple[str, ...]
    text: str
    helped: bool | None
    outcome: str


@dataclass(frozen=True, slots=True)
class FurtherCause:
    """Something that is wrong with a step, beside the first.

    Attributes:
        cause: Where it goes wrong.
        module: In which module; None where in none.
        operator: In which operator; empty where that is not known.
        sentence: The same in one sentence.
    """

    cause: CauseKind
    module: str | None
    operator: str
    sentence: str


@dataclass(frozen=True)
class Examination:
    """Findings of a look at one learner's step.

    Attributes:
        subject: The run, or the words of the configuration.
        learner: Whose step.
        step: Which attempt.
        loss: Unscaled.
        loss_scale: What it was multiplied by.
        precision: The mode.
        device: Where it was computed.
        cause: Where it goes wrong.
        module: In which module; None where in none.
        operator: In which operator; empty where in none.
        verdict: The one sentence to read.
        notes: What is no failure but worth knowing, one sentence each.
        remarks: How the step was done again, one sentence each.
        modules: In the order of the forward pass.
        remedies: In the order in which they were tried.
        operators: ``operators`` and ``casts`` of the step, as in the event of that name.
        also: What else is wrong and does not follow from that.
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
    """Return the name of the files about a step, without their ending.

    Args:
        found: The step: its number, and its learner where that has a name.
        words: Those that differ from the run's; long ones are cut off, and told apart by a checksum.
    """
    words = masked(tuple(words))
    whose = "" if found.learner == "main" else f"-{found.learner}"
    under = re.sub(r"[^\w.=-]+", "-", "-".join(words))
    if under != "-".join(words) or len(under) > _LONGEST:
        under = f"{under[:_LONGEST]}-{zlib.crc32(' '.join(words).encode()):08x}"
    return f"step-{found.step:06d}{whose}{f'-under-{under}' if words else ''}"


def write_examination(path: Path, found: Examination) -> None:
    """Write it atomically, as indented strict JSON.

    Raises:
        StorageError: The file cannot be written.
    """
    write_atomically(path, indented_json({"schema": SCHEMA, **asdict(found)}), durable=False)
