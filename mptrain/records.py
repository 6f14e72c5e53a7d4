"""Records of a run: frozen dataclasses of plain Python types, without tensors.

Later commands read only these records. Numbers that can be non-finite are `float` here and become ``null`` with an
entry under ``nonfinite`` in JSON (see `as_json`).
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
        learner: Name of the learner (``main`` if there is only one).
        step: Number of this step from 1, counting skipped steps; common to all learners.
        updates: Updates applied so far, this one included.
        epoch: Passes over the training data completed before this step, from 0.
        loss: The unscaled loss of the whole update, mean over its loss terms, FP32.
        loss_scale: The loss scale of this step.
        overflow: Whether a gradient had inf or NaN.
        skipped: Whether the update was skipped.
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
    """An overflow, with the details that are known without synchronising.

    Attributes:
        learner: Name of the learner.
        step: The step that overflowed.
        loss_scale: The loss scale of the step.
        phase: ``calibrating`` (the scale descends from its initial value), ``growth probe`` (the scale had just grown),
            ``unexpected`` (neither); the rule is in `mptrain.probe.overflow_attribution`.
        loss: ``finite``, or the kind of the non-finite loss.
        tensors: Parameters with non-finite gradients: name and kind (``inf`` or ``nan``), at most `MAX_TENSORS`.
        count: Number of parameters with non-finite gradients.
        skipped: Whether the update was skipped.
        restored: Number of module buffers restored.
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
    """Exponent histogram of one or several tensors; see `mptrain.numerics.exponents`.

    Attributes:
        dtype: Dtype of the values, such as ``float16``.
        zeros: Number of zeros.
        inf: Number of infinities.
        nan: Number of NaN.
        largest: Largest finite magnitude; 0 if there is none.
        lowest: Exponent of the first entry of ``counts``.
        counts: Numbers of nonzero finite values x with floor(log2 |x|) = ``lowest``, ``lowest`` + 1 ...
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
    """Exponent histograms of one learner's tensors at one step; a line of ``histograms.jsonl``.

    Attributes:
        learner: Name of the learner.
        step: The sampled step.
        loss_scale: The loss scale of the step; the gradients in the histograms are scaled by it.
        overflow: Whether a parameter's gradient had inf or NaN.
        tensors: Histograms by kind and name. Activations and their gradients have module names (the empty name is the
            whole model), all others parameter names.
        unchanged: For each parameter, the number of elements with a nonzero update, and how many of those would not
            have changed as FP16 weights without master weights. Empty if the update was skipped.
    """

    learner: str
    step: NonNegativeInt
    loss_scale: float
    overflow: bool
    tensors: dict[TensorKind, dict[str, ExponentCounts]]
    unchanged: dict[str, tuple[NonNegativeInt, NonNegativeInt]]


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """A change of the loss scale after a step.

    ``why`` is ``overflow``, ``growth``, or ``measured`` if a measurement of finite gradients lowered the scale.
    """

    learner: str
    step: int
    from_scale: float
    to_scale: float
    why: str


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """The result of one evaluation.

    Attributes:
        split: ``val`` or ``test``.
        step: Steps completed at the evaluation.
        epoch: Epochs completed at the evaluation.
        samples: Number of samples evaluated.
        metrics: Values by metric name.
        intervals: Bounds of the 95 % CI over the choice of samples, by metric name, if requested.
        data: Digest of the evaluated samples (see `mptrain.engine.fingerprints.sample_digests`); empty if unknown.
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
    """A row of ``epochs.csv``: one epoch of one learner, with the evaluation after it.

    Attributes:
        learner: Name of the learner; values of the whole epoch are repeated in the row of each learner.
        epoch: Completed epochs, from 1.
        step: Steps so far.
        updates: Applied updates so far.
        skipped: Skipped updates in this epoch.
        train_loss: Mean of the finite losses of this epoch's steps.
        loss_scale: The scale at the end of the epoch.
        lr: Learning rate of the last step.
        val: Validation metrics by name; empty without validation data.
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
    """Any other event; a line of ``events.jsonl``.

    Attributes:
        kind: ``start``, ``resume``, ``checkpoint``, ``storage`` (a disk operation failed), ``stalled``, ``signal``,
            ``warning``, ``failure``, ``data`` ...
        step: Steps completed at the event.
        fields: Details, JSON values only.
    """

    kind: str
    step: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Current progress of the run; displayed but never written, because it depends on the clock.

    Attributes:
        step: Steps so far.
        steps: Planned steps.
        epoch: Completed epochs.
        epochs: Planned epochs.
        terms_per_second: Recent training throughput, in loss terms.
        term: Plural name of the loss terms: ``samples``, ``tokens``.
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
    """Return ``"inf"``, ``"-inf"`` or ``"nan"`` for a non-finite value, else None."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None


def as_json(fields: dict[str, Any]) -> str:
    """Serialise fields as one line of strict JSON.

    Non-finite numbers become null, and ``nonfinite`` maps their paths to ``inf``, ``-inf`` or ``nan``. The path of a
    number inside mappings and sequences is joined by dots (``metrics.loss``, ``scales.3``).
    """
    kinds: dict[str, str] = {}
    clean = _without_nonfinite(fields, "", kinds)
    if kinds:
        clean["nonfinite"] = kinds
    return json.dumps(clean, allow_nan=False, separators=(", ", ": "))


def step_json(record: StepRecord) -> str:
    """Return the line of a step record in ``steps.jsonl``, equal to that of `as_json` in a tenth of the time."""
    r = record
    # The sum of finite numbers may overflow; the slow path is then taken unnecessarily.
    if not math.isfinite(r.loss + r.loss_scale + r.grad_norm + r.lr):
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
