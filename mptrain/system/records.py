"""Records of a training run (steps, overflows, evaluations, ...): frozen dataclasses of plain Python types.

They hold no tensors. Later commands read only these records. Numbers that can be non-finite are `float` here and become
``null`` with an entry under ``nonfinite`` in JSON (see `as_json`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from mptrain.system.fields import CountPerExponent, Exponent, NonNegativeFloat, NonNegativeInt, PositiveInt

Phase = Literal["calibrating", "growth probe", "unexpected"]
NonFinite = Literal["inf", "-inf", "nan"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One attempted training step of a learner (a model with its optimizer; a GAN has two); a line of ``steps.jsonl``.

    Attributes:
        learner: Name of the learner (``main`` if there is only one).
        step: Number of this step from 1, counting skipped steps; common to all learners.
        updates: Number of optimizer updates applied so far, this one included.
        epoch: Passes over the training data completed before this step, from 0.
        loss: The unscaled loss of the whole update, mean over its loss terms (samples, tokens), FP32; NaN also if it is
            unknown, as in a watched loop that gives ``backward`` gradients.
        loss_scale: The factor by which the loss was multiplied before the backward pass.
        overflow: Whether a gradient had inf or NaN.
        skipped: Whether the update was skipped.
        grad_norm: Global L2 norm of the unscaled gradients before clipping.
        applied_norm: That of the gradients as the optimizer was given them, after whatever the loop does to them; None
            where they were not looked at, as in runs of mptrain, which only clip.
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
    applied_norm: float | None = None


@dataclass(frozen=True, slots=True)
class OverflowRecord:
    """A training step whose gradients had inf or NaN, with the details that are known without synchronising the device.

    Attributes:
        phase: ``calibrating`` (the scale descends from its initial value), ``growth probe`` (the scale had just grown),
            ``unexpected`` (neither); the rule is in `mptrain.engine.observer`.
        loss: ``finite``, or the kind of the non-finite loss, or ``unknown``.
        tensors: Parameters with non-finite gradients: name and kind (``inf`` or ``nan``), at most `MAX_TENSORS`.
        count: Number of parameters with non-finite gradients.
        skipped: Whether the optimizer update was skipped.
        restored: Number of module buffers (such as BatchNorm statistics) restored to their values before the step.
        boundary: The modules between which the backward pass ceased to be finite: the last module whose gradients are
            not finite, and the first after it, whose are; both empty if they do not part that way.
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
    boundary: tuple[str, str] = ("", "")


MAX_TENSORS = 20

TensorKind = Literal["activations", "activation_gradients", "weight_gradients", "weights", "updates"]


@dataclass(frozen=True, slots=True)
class ExponentCounts:
    """Histogram of the binary exponents of the values in one or several tensors.

    Attributes:
        dtype: Dtype of the values, such as ``float16``.
        zeros: Number of zeros; ``inf`` and ``nan`` are numbers of infinities and NaN.
        largest: Largest finite magnitude; 0 if there is none.
        lowest: Exponent of the first entry of ``counts``.
        counts: Numbers of nonzero finite values x with floor(log2 |x|) = ``lowest``, ``lowest`` + 1 ...
    """

    dtype: str
    zeros: NonNegativeInt
    inf: NonNegativeInt
    nan: NonNegativeInt
    largest: NonNegativeFloat
    lowest: Exponent
    counts: CountPerExponent


#: Updates that are not zero, those that change nothing, the magnitudes of both, and the distance moved.
LostUpdates = tuple[NonNegativeInt, NonNegativeInt, NonNegativeFloat, NonNegativeFloat, float]


@dataclass(frozen=True, slots=True)
class HistogramRecord:
    """Exponent histograms of a learner's activations, gradients, weights and updates at one training step.

    The record is a line of ``histograms.jsonl``.

    Attributes:
        loss_scale: The loss scale of the step; the gradients in the histograms are scaled by it.
        overflow: Whether a parameter's gradient had inf or NaN.
        tensors: Histograms by kind and name. Activations and their gradients have module names (the empty name is the
            whole model), all others parameter names.
        unchanged: For each parameter, the number of elements with a nonzero update, and how many of those would not
            have changed as FP16 weights without master weights; for half-precision weights without master weights, the
            number of elements with a nonzero gradient, and how many of those did not change. Empty if the update was
            skipped.
        lost: For each parameter, what rounding did to the updates of weights stored in FP16 or BF16, or would have done
            to those of FP32 weights if they were BF16: the number of updates that are not zero, and of those that
            change nothing; the sums of the magnitudes of both; and by how much the weights have moved in the direction
            of their updates. The last three are 0 where only the optimizer knows its updates. Empty if the update was
            skipped.
        sampled: Number of elements of a parameter whose updates were looked at, where that is not all: the counts of
            ``updates``, ``unchanged`` and ``lost`` are then multiplied up to all elements. 0 for a parameter or module
            of which nothing could be counted.
    """

    learner: str
    step: PositiveInt
    loss_scale: float
    overflow: bool
    tensors: dict[TensorKind, dict[str, ExponentCounts]]
    unchanged: dict[str, tuple[NonNegativeInt, NonNegativeInt]]
    sampled: dict[str, NonNegativeInt] = field(default_factory=dict)
    lost: dict[str, LostUpdates] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """A change of the loss scale of one learner after a training step.

    ``why`` is ``overflow``, ``growth``, ``measured`` if a measurement of finite gradients lowered the scale, or ``set``
    if a watched loop set it between two updates.
    """

    learner: str
    step: int
    from_scale: float
    to_scale: float
    why: str


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Metrics of a model on one split of the data, from one evaluation during or after training.

    Attributes:
        split: ``val`` or ``test``.
        step: Training steps attempted before the evaluation.
        epoch: Epochs completed before the evaluation.
        samples: Number of samples evaluated.
        metrics: Values by metric name.
        intervals: Lower and upper bound of the 95 % confidence interval over the choice of samples, by metric name;
            empty unless requested.
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
    """One epoch of one learner and the evaluation after it; a row of ``epochs.csv``.

    Attributes:
        learner: Name of the learner; values of the whole epoch are repeated in the row of each learner.
        epoch: Completed epochs, from 1.
        step: Training steps attempted so far.
        updates: Optimizer updates applied so far.
        skipped: Updates skipped in this epoch.
        train_loss: Mean of the finite losses of this epoch's steps.
        loss_scale: Loss scale at the end of the epoch.
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
    """An event of a run without a record type of its own, such as a saved checkpoint; a line of ``events.jsonl``.

    Attributes:
        kind: ``start``, ``resume``, ``checkpoint``, ``storage`` (a disk operation failed), ``stalled``, ``signal``,
            ``warning``, ``failure``, ``data``, ``rate_reduced``, ``stopped_early`` ...
        step: Training steps completed at the event.
        fields: Details by name, JSON values only.
    """

    kind: str
    step: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Current progress of a training run; displayed but never written, because it depends on the clock.

    Attributes:
        step: Training steps attempted so far, of the planned ``steps``.
        epoch: Completed epochs, of the planned ``epochs``.
        terms_per_second: Recent training throughput, in loss terms.
        term: Plural name of the loss terms, over which the loss is averaged: ``samples``, ``tokens``.
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
    """Classify a number for JSON: ``"inf"``, ``"-inf"`` or ``"nan"``; None if it is finite."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None


def as_json(fields: dict[str, Any]) -> str:
    """Serialise the fields of a record as one line of strict JSON, without NaN or Infinity.

    Non-finite numbers become null, and the entry ``nonfinite`` maps their paths to ``inf``, ``-inf`` or ``nan``. The
    path of a number inside mappings and sequences is joined by dots (``metrics.loss``, ``scales.3``).
    """
    kinds: dict[str, str] = {}
    clean = _without_nonfinite(fields, "", kinds)
    if kinds:
        clean["nonfinite"] = kinds
    return json.dumps(clean, allow_nan=False, separators=(", ", ": "))


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
