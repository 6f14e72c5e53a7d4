"""Finding: a problem of a training step or of a network, as shown to the user; and the words that findings share."""

from __future__ import annotations

from dataclasses import dataclass

from mptrain.engine.module_trail import LOSS
from mptrain.engine.observer import Operation

#: Share of FP16's range above which a value counts as close to its end: at most two doublings are left.
CLOSE = 0.25


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem of a training step, or of training a network in a precision, as shown to the user.

    Attributes:
        kind: Kind of problem: `mptrain.runlog.diagnosis_file.CauseKind` for a step, otherwise a kind of
            `mptrain.lab.doctor.findings.findings`.
        where: Names of the affected modules, parameters or buffers in order; empty if there are none.
        what: Description of the problem in one sentence, with its measured value.
        hint: Advice; empty if remedies are tried instead.
        keep: Modules to keep in FP32 to fix the problem; empty if that does not fix it.
        operator: Name of the operator in which the problem arises; empty if unknown.
        phase: Pass in which the problem arises, ``forward`` or ``backward``; empty if it arises in none.
        minor: Whether it does not keep the network from training as it does in FP32, so that it is only a note.
    """

    kind: str
    where: tuple[str, ...]
    what: str
    hint: str = ""
    keep: tuple[str, ...] = ()
    operator: str = ""
    phase: str = ""
    minor: bool = False

    @property
    def module(self) -> str | None:
        """First affected module, parameter or buffer in ``where``; None if there is none."""
        return self.where[0] if self.where else None


def label(name: str) -> str:
    """Return the display name of a module: its qualified name, or ``the model itself`` for the empty name."""
    return name or "the model itself"


def operator_name(operation: Operation) -> str:
    """Return the display name of an operator call: ``a cast`` for a dtype conversion, otherwise its name in torch."""
    return "a cast" if operation.operator == "_to_copy" else operation.operator


def describe_operator(operation: Operation) -> str:
    """Return a clause on an operator call that returns inf or NaN: its name, module, result and inputs."""
    where = "the task" if operation.module == LOSS else label(operation.module)
    return f"{operator_name(operation)} in {where} returns {operation.kind} for {operation.given}"


def precise_percent(share: float) -> str:
    """Format a share in [0, 1] as a percentage with three digits, such as ``12.5 %``."""
    # `mptrain.system.words.share` makes 100 % of 99.7 %, which would say that all gradients are below 2^-14, or that a
    # value has reached the end of FP16's range.
    return f"{100 * share:.3g} %"
