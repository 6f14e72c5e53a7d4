"""Records that a run writes down: frozen values of plain Python types, no tensors.

Every later command reads these back and nothing else. Numbers that can be non-finite are `float` here and become
``null`` plus an entry under ``nonfinite`` in JSON (see `as_json`).
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mptrain.fields import NonNegativeInt

Phase = Literal["calibrating", "growth probe", "unexpected"]
NonFinite = Literal["inf", "-inf", "nan"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One attempted step of one learner; a line of ``steps.jsonl``.

    Attributes:
        learner: Which of the task's learners (``main`` where there is only one).
        step: Attempts so far, this one included; common to all learners, from 1.
        updates: Updates applied so far, this one included.
        epoch: Passes over the training data that were completed before this step, from 0.
        loss: The unscaled loss of the whole update, mean over its loss terms, FP32.
        loss_scale: The scale that multiplied this loss and unscaled these gradients.
        overflow: A gradient held inf or NaN.
        skipped: The weights did not move.
        grad_norm: Global L2 norm of the unscaled gradients before clipping.
        lr: Learning rate of this step.
    """

    learner: str
    step: NonNegativeInt
    updates: NonNegativeInt
    epoch: NonNegativeInt
    loss: float
    loss_scale: float
    overflow: bool
    skipped: bool
    grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True)
class OverflowRecord:
    """An overflow and what was known about it without waiting for the device.

    Attributes:
        learner: Which learner.
        step: The attempt at which it happened.
        loss_scale: The scale in force.
        phase: ``calibrating`` (the scale descends from its first value), ``growth probe`` (the scale had just grown),
            ``unexpected`` (neither); the rule is in `mptrain.probe.overflow_attribution`.
        loss: ``finite`` or the kind of non-finite value the loss itself was.
        tensors: Parameters with non-finite gradients: name and kind (``inf`` or ``nan``), at most `MAX_TENSORS`.
        count: How many parameters had non-finite gradients.
        skipped: Whether the update was refused.
        restored: How many module buffers were put back.
    """

    learner: str
    step: int
    loss_scale: float
    phase: Phase
    loss: str
    tensors: tuple[tuple[str, str], ...]
    count: int
    skipped: bool
    restored: int


MAX_TENSORS = 20

TensorKind = Literal["activations", "activation_gradients", "weight_gradients", "weights", "updates"]


@dataclass(frozen=True, slots=True)
class ExponentCounts:
    """Counts of the values of a tensor, or of several, by exponent; see `mptrain.numerics.exponents`.

    Attributes:
        dtype: What the values were kept in: ``float16``, ``float32`` ...
        zeros: How many were zero.
        inf: How many were infinite.
        nan: How many were no numbers.
        largest: Largest finite magnitude; 0 where there was none.
        lowest: Exponent that ``counts`` begins with.
        counts: How many nonzero finite values x had floor(log2 |x|) = ``lowest``, ``lowest`` + 1 ...
    """

    dtype: str
    zeros: NonNegativeInt
    inf: NonNegativeInt
    nan: NonNegativeInt
    largest: float
    lowest: int
    counts: tuple[NonNegativeInt, ...]


@dataclass(frozen=True, slots=True)
class HistogramRecord:
    """The exponents of one learner's tensors at one step; a line of ``histograms.jsonl``.

    Attributes:
        learner: Which learner.
        step: The attempt that was looked at.
        loss_scale: The scale in force. Gradients carry it, as on the device.
        overflow: A gradient of a parameter held inf or NaN.
        tensors: By kind and name. Names of activations and of their gradients are those of modules (the empty name is the
            whole model), all others those of parameters.
        unchanged: By parameter: how many elements had an update that was not zero, and of how many of those the weight,
            kept in FP16 without a master copy, would have stayed what it was. Empty where the update was refused.
    """

    learner: str
    step: NonNegativeInt
    loss_scale: float
    overflow: bool
    tensors: dict[TensorKind, dict[str, ExponentCounts]]
    unchanged: dict[str, tuple[NonNegativeInt, NonNegativeInt]]


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """The scale changed after a step: from, to, and why.

    ``why`` is ``overflow``, ``growth``, or ``measured`` where it fell by what was measured of finite gradients.
    """

    learner: str
    step: int
    from_scale: float
    to_scale: float
    why: str


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """The outcome of one evaluation.

    Attributes:
        split: ``val`` or ``test``.
        step: Attempts at that moment.
        epoch: Completed epochs at that moment.
        samples: How many samples were evaluated.
        metrics: Name to value.
        intervals: Name to the ends of a 95 % interval over the choice of the samples, where it was asked for.
        data: Digest of what was evaluated (see `mptrain.engine.fingerprints.sample_digests`); empty where it is not known.
    """

    split: str
    step: int
    epoch: int
    samples: int
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    data: str = ""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """A row of ``epochs.csv``: one learner's side of one epoch and the evaluation that followed it.

    Attributes:
        learner: Which learner; what belongs to the epoch as a whole stands in the row of each.
        epoch: Completed epochs, from 1.
        step: Attempts so far.
        updates: Applied updates so far.
        skipped: Refused updates in this epoch.
        train_loss: Mean of the finite losses of this epoch's steps.
        loss_scale: The scale at the end of the epoch.
        lr: Learning rate of the last step.
        val: Validation metrics, name to value; empty where there is no validation data.
        seconds: Wall time of this epoch's training steps.
        terms_per_second: Training throughput of this epoch, in loss terms (samples, tokens).
    """

    learner: str
    epoch: int
    step: int
    updates: int
    skipped: int
    train_loss: float
    loss_scale: float
    lr: float
    val: dict[str, float]
    seconds: float
    terms_per_second: float


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Anything else worth keeping: a line of ``events.jsonl``.

    Attributes:
        kind: ``start``, ``resume``, ``checkpoint``, ``storage`` (the disk refused something), ``stalled``, ``signal``, ``warning``, ``failure``, ``data`` ...
        step: Attempts at that moment.
        fields: What is known, JSON values only.
    """

    kind: str
    step: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Progress of the run right now; shown, never written, because it depends on the clock.

    Attributes:
        step: Attempts so far.
        steps: Attempts planned.
        epoch: Completed epochs.
        epochs: Planned epochs.
        terms_per_second: Recent training throughput, in loss terms.
        term: What one of them is, in the plural: ``samples``, ``tokens``.
        data_wait: Share of recent time spent waiting for data, 0 to 1.
        memory: Bytes in use: peak allocated on a CUDA device, resident set on the CPU.
        eta: Estimated seconds to the end.
        doing: ``training``, ``evaluating`` or ``saving``.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    terms_per_second: float
    term: str
    data_wait: float
    memory: int
    eta: float
    doing: str


Record = (
    StepRecord
    | OverflowRecord
    | HistogramRecord
    | ScaleRecord
    | EvalRecord
    | EpochRecord
    | EventRecord
    | ProgressRecord
)


def nonfinite_kind(value: float) -> NonFinite | None:
    """``"inf"``, ``"-inf"`` or ``"nan"`` for a value that JSON cannot hold, else None."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None


def as_json(fields: dict[str, Any]) -> str:
    """One line of strict JSON.

    Non-finite numbers become null, and their kinds are listed under ``nonfinite``: path to ``inf``, ``-inf``, ``nan``,
    where the path of a number inside mappings and sequences is joined by dots (``metrics.loss``, ``scales.3``).
    """
    kinds: dict[str, str] = {}
    clean = _without_nonfinite(fields, "", kinds)
    if kinds:
        clean["nonfinite"] = kinds
    return json.dumps(clean, allow_nan=False, separators=(", ", ": "))


def step_json(record: StepRecord) -> str:
    """The line that stands for a step record in ``steps.jsonl``: what `as_json` would give, in a tenth of the time."""
    r = record
    if not math.isfinite(
        r.loss + r.loss_scale + r.grad_norm + r.lr
    ):  # a sum may overflow: then the long way, for nothing
        return as_json(asdict(record))
    return (
        f'{{"learner": {_quoted(r.learner)}, "step": {r.step}, "updates": {r.updates}, "epoch": {r.epoch}, '
        f'"loss": {r.loss!r}, "loss_scale": {r.loss_scale!r}, "overflow": {_BOOLEANS[r.overflow]}, '
        f'"skipped": {_BOOLEANS[r.skipped]}, "grad_norm": {r.grad_norm!r}, "lr": {r.lr!r}}}'
    )


_BOOLEANS = ("false", "true")
_quoted = functools.lru_cache(json.dumps)


def _without_nonfinite(value: Any, path: str, kinds: dict[str, str]) -> Any:
    if isinstance(value, float):
        kind = nonfinite_kind(value)
        if kind is None:
            return value
        kinds[path] = kind
        return None
    below = f"{path}." if path else ""
    if isinstance(value, dict):
        return {key: _without_nonfinite(item, f"{below}{key}", kinds) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(item, f"{below}{index}", kinds) for index, item in enumerate(value)]
    return value
