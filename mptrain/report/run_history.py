"""Curves and short lists for a report from the records of a run, read in one pass and in bounded memory.

Extremes are kept, so the curve of a long run still shows every spike. This module reads no files and draws nothing.

Reading stops at a damaged record and adds a note instead of raising, because reports matter most for broken runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from typing_extensions import TypedDict

from mptrain.runlog.lost_updates import IN_WORDS, in_words
from mptrain.runlog.run_reader import Run
from mptrain.system.errors import StorageError
from mptrain.system.fields import NonNegativeInt
from mptrain.system.records import Phase, StepRecord
from mptrain.system.validation import build
from mptrain.system.words import counted

#: Buckets of a curve at most. Each gives up to two points: its lowest and its highest value.
MOST_BUCKETS: Final = 1000

#: Maximum buckets of a curve in figures with many curves.
BUCKETS: Final = 300

#: Largest magnitude that a figure shows. Larger values count as not finite.
LARGEST: Final = 1e100

_INDEX, _COUNT, _TOTAL, _LOW, _LOW_STEP, _HIGH, _HIGH_STEP, _LOST = range(8)

Points = tuple[list[float], list[float]]


class Curve:
    """A quantity over the steps of a run, such as the loss, reduced to at most ``most`` buckets of steps.

    Add values in ascending order of steps. Each bucket keeps the mean, the lowest and the highest of its values.
    Steps fall into buckets of equal width. Once a step needs more than ``most`` buckets, neighbours are merged and
    the width doubles. One pass over a record of unknown length is therefore enough, and curves over the same steps
    have the same buckets.

    Attributes:
        width: Number of steps in a bucket.
        count: Number of values added, non-finite ones included.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.width = 1
        self.count = 0
        self._most = most
        self._buckets: list[list[float]] = []

    def __len__(self) -> int:
        """Return the number of buckets, which is the number of points of the curve's mean."""
        return len(self._buckets)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step, from 1 (or 0) and not below that of the step before.

        A value that is not finite, or of a magnitude of `LARGEST` or more, is counted but not drawn.
        """
        index = max(step - 1, 0) // self.width
        buckets = self._buckets
        if not buckets or buckets[-1][_INDEX] != index:
            if len(buckets) >= self._most:
                self._coarsen(2 * self.width)
                return self.add(step, value)
            buckets.append([index, 0, 0.0, math.inf, 0, -math.inf, 0, 0])
        bucket = buckets[-1]
        self.count += 1
        if not -LARGEST < value < LARGEST:
            bucket[_LOST] += 1
            return None
        bucket[_COUNT] += 1
        bucket[_TOTAL] += value
        if value < bucket[_LOW]:
            bucket[_LOW], bucket[_LOW_STEP] = value, step
        if value > bucket[_HIGH]:
            bucket[_HIGH], bucket[_HIGH_STEP] = value, step
        return None

    def means(self) -> Points:
        """Return the points to draw as a line: the middle step of each bucket, and the mean of its finite values.

        The mean is NaN without a finite value, which breaks the line.
        """
        middles = [self._middle(bucket) for bucket in self._buckets]
        return middles, [b[_TOTAL] / b[_COUNT] if b[_COUNT] else math.nan for b in self._buckets]

    def extremes(self) -> Points:
        """Return the lowest and the highest value of each bucket with their steps, in ascending order of steps.

        A bucket without a finite value gives one point with the value NaN.
        """
        steps: list[float] = []
        values: list[float] = []
        for bucket in self._buckets:
            pair = {(bucket[_LOW_STEP], bucket[_LOW]), (bucket[_HIGH_STEP], bucket[_HIGH])} if bucket[_COUNT] else set()
            for step, value in sorted(pair) or [(self._middle(bucket), math.nan)]:
                steps.append(step)
                values.append(value)
        return steps, values

    def smooth(self, over: float = 0.02) -> Points:
        """Return a centred moving mean of the bucket means; its window is the fraction ``over`` of the whole range."""
        steps, values = self.means()
        reach = max(round(len(values) * over / 2), 1)
        return steps, [_mean(values[max(at - reach, 0) : at + reach + 1]) for at in range(len(values))]

    def lost(self) -> list[float]:
        """Return the middle steps of the buckets with non-finite values, such as losses of steps that overflowed."""
        return [self._middle(bucket) for bucket in self._buckets if bucket[_LOST]]

    def finite(self) -> list[float]:
        """Return the lowest and highest value of every bucket with a finite value, to find the range of the curve."""
        return [value for bucket in self._buckets if bucket[_COUNT] for value in (bucket[_LOW], bucket[_HIGH])]

    def last(self) -> tuple[float, float] | None:
        """Return the last point of the curve: middle step and mean of the last bucket with a finite value, or None."""
        steps, values = self.means()
        points = [(step, value) for step, value in zip(steps, values, strict=True) if not math.isnan(value)]
        return points[-1] if points else None

    def by_bucket(self, width: int) -> dict[int, float]:
        """Return the mean of each bucket by its index, after widening the buckets to a multiple of the current width.

        Curves of one width can be combined.
        """
        if width > self.width:
            self._coarsen(width)
        return {int(b[_INDEX]): b[_TOTAL] / b[_COUNT] for b in self._buckets if b[_COUNT]}

    def _middle(self, bucket: list[float]) -> float:
        return bucket[_INDEX] * self.width + (self.width + 1) / 2

    def _coarsen(self, width: int) -> None:
        factor = width // self.width
        merged: list[list[float]] = []
        for bucket in self._buckets:
            index = bucket[_INDEX] // factor
            if merged and merged[-1][_INDEX] == index:
                _merge(merged[-1], bucket)
            else:
                bucket[_INDEX] = index
                merged.append(bucket)
        self._buckets, self.width = merged, width


def mean_over_runs(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Combine the curves of several runs, such as the seeds of a configuration, to a mean curve with a band.

    Return the middle steps of the buckets, and the mean, lowest and highest of the runs' bucket means. Buckets that
    fewer than half of the curves reached are left out, so that the line does not end with a single run.
    """
    present = [curve for curve in curves if len(curve)]
    width = max((curve.width for curve in present), default=1)
    tables = [curve.by_bucket(width) for curve in present]
    steps, means, lows, highs = [], [], [], []
    for index in sorted({index for each in tables for index in each}):
        values = [each[index] for each in tables if index in each]
        if 2 * len(values) >= len(tables):
            steps.append(index * width + (width + 1) / 2)
            means.append(math.fsum(values) / len(values))
            lows.append(min(values))
            highs.append(max(values))
    return steps, means, lows, highs


#: Beginnings of sentences for `in_groups`.
EXTREMES: Final = "Lines join the lowest and the highest value of every"
MEAN: Final = "A point is the mean of"
MARK: Final = "A mark stands for all overflows of"


def in_groups(curves: Iterable[Curve], what: str) -> str:
    """Return a sentence for a caption, with a space before it, ``what`` and a number of steps; empty for one step.

    The number is that of the steps in a bucket, for which the curves have a point or two.
    """
    width = max((curve.width for curve in curves), default=1)
    return f" {what} {width:,} steps." if width > 1 else ""


def _merge(into: list[float], other: list[float]) -> None:
    for index in (_COUNT, _TOTAL, _LOST):
        into[index] += other[index]
    if other[_LOW] < into[_LOW]:
        into[_LOW], into[_LOW_STEP] = other[_LOW], other[_LOW_STEP]
    if other[_HIGH] > into[_HIGH]:
        into[_HIGH], into[_HIGH_STEP] = other[_HIGH], other[_HIGH_STEP]


def _mean(values: list[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


PHASES: Final[tuple[str, ...]] = get_args(Phase)

#: Maximum overflow marks of each phase in a figure, and maximum first and last rows of a table.
MOST_MARKS: Final = 200
MOST_ROWS: Final = 12

#: Events that every healthy run has.
_USUAL: Final = frozenset(
    {"overflow", "scale", "evaluation", "checkpoint", "samples", "start", "data_order", "operators", "summary"}
)


@dataclass
class LearnerHistory:
    """Step records of one learner of a run, as curves and counts.

    Attributes:
        loss: Unscaled loss over steps.
        grad_norm: L2 norm of the unscaled gradients before clipping, over steps without overflow.
        skipped: 1 at steps whose update was skipped, else 0.
        refused: Number of skipped updates.
        scale_ends: First and last finite loss scale, which buckets of ``loss_scale`` do not tell; None without any.
    """

    loss: Curve
    loss_scale: Curve
    grad_norm: Curve
    lr: Curve
    skipped: Curve
    attempts: int = 0
    updates: int = 0
    refused: int = 0
    scale_ends: tuple[float, float] | None = None

    @classmethod
    def empty(cls, most: int) -> LearnerHistory:
        """Return the history of a learner without steps, with curves of at most ``most`` buckets."""
        return cls(Curve(most), Curve(most), Curve(most), Curve(most), Curve(most))

    def add(self, record: StepRecord) -> None:
        """Add the record of the learner's next step."""
        self.loss.add(record.step, record.loss)
        self.loss_scale.add(record.step, record.loss_scale)
        if not record.overflow:  # the norm is meaningless after an overflow
            self.grad_norm.add(record.step, record.grad_norm)
        self.lr.add(record.step, record.lr)
        self.skipped.add(record.step, float(record.skipped))
        self.attempts += 1
        self.updates = record.updates
        self.refused += record.skipped
        if math.isfinite(record.loss_scale):
            first, _ = self.scale_ends or (record.loss_scale, 0.0)
            self.scale_ends = first, record.loss_scale

    def scale_path(self) -> dict[str, float]:
        """Return the ``first``, ``min``, ``max`` and ``last`` finite loss scale; empty if there is none."""
        if self.scale_ends is None:
            return {}
        first, last = self.scale_ends
        extremes = (first, last, *self.loss_scale.finite())
        return {"first": first, "min": min(extremes), "max": max(extremes), "last": last}


@dataclass
class FirstAndLast:
    """Bounded list that keeps the first and the last `MOST_ROWS` items and counts all, for a table of a report."""

    first: list[Any] = field(default_factory=list)
    last: deque[Any] = field(default_factory=lambda: deque(maxlen=MOST_ROWS))
    count: int = 0

    def add(self, item: Any) -> None:
        """Add an item. If the list is full, the oldest of the last items is dropped."""
        self.count += 1
        if len(self.first) < MOST_ROWS:
            self.first.append(item)
        else:
            self.last.append(item)

    @property
    def between(self) -> int:
        """Number of dropped items, between the first and the last ones."""
        return self.count - len(self.first) - len(self.last)

    def kept(self) -> list[Any]:
        """Return the kept items in the order in which they were added."""
        return [*self.first, *self.last]


@dataclass
class Offender:
    """A parameter whose gradient was inf or NaN in overflowing steps, with counts and steps.

    Attributes:
        first: The first step that overflowed there, and ``last`` the last one.
        kinds: ``inf`` and ``nan`` to number of overflows.
        marks: Phase of the loss scaler to a curve with the value 1 at each such step.
    """

    first: int
    last: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    marks: dict[str, Curve] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of overflows that name this parameter."""
        return sum(self.kinds.values())

    def add(self, kind: str, phase: str, step: int) -> None:
        """Add one overflow (``inf`` or ``nan``) of this parameter's gradient, in a phase of the loss scaler."""
        self.last = step
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.marks.setdefault(phase, Curve(MOST_MARKS)).add(step, 1.0)


@dataclass
class Overflows:
    """Overflows of one learner of a run, by phase of the loss scaler and by parameter.

    Attributes:
        counts: Phase to number of overflows.
        marks: Phase to a curve of the loss scales at which steps overflowed.
        offenders: Name of each parameter with non-finite gradients to its overflows.
    """

    counts: dict[str, int] = field(default_factory=dict)
    marks: dict[str, Curve] = field(default_factory=dict)
    offenders: dict[str, Offender] = field(default_factory=dict)

    def add(self, phase: str, step: int, scale: float, tensors: Iterable[tuple[str, str]] = ()) -> None:
        """Add one overflow of the learner; ``tensors`` are pairs of parameter name and kind (inf or nan)."""
        self.counts[phase] = self.counts.get(phase, 0) + 1
        self.marks.setdefault(phase, Curve(MOST_MARKS)).add(step, scale)
        for name, kind in tensors:
            self.offenders.setdefault(name, Offender(step)).add(kind, phase, step)

    def worst(self, most: int) -> list[tuple[str, Offender]]:
        """Return at most ``most`` parameters whose gradients overflowed most often, most frequent first.

        Ties keep the order in which parameters first overflowed.
        """
        return sorted(self.offenders.items(), key=lambda item: -item[1].count)[:most]


@dataclass
class History:
    """Records of a run for a report, reduced to curves, counts and short lists.

    Attributes:
        learners: Step records of each learner by name, in stepping order.
        overflows: Overflows by name of the learner.
        overflow_rows: The first and last overflow events.
        evaluations: Curves of metrics by split and name of the metric.
        operators: Operators and casts with their dtypes, as found by the newest rehearsal.
        occurrences: Step, kind and description of each unusual event, the first and last ones.
        passes: Number of backward passes on record that no update followed and whose gradients were not finite.
        left_out: Number of backward passes on record that no update followed, by learner.
        not_looked_at: What a watch says that it could not look at.
        lost_updates: What is known of updates that rounding to half precision loses, one sentence each.
        of_ranks: Learner and step of each time that a single rank's gradients were not finite.
        overflowed: Learner and step of each overflow.
        notes: One sentence for each problem when reading the records.
    """

    learners: dict[str, LearnerHistory] = field(default_factory=dict)
    overflows: dict[str, Overflows] = field(default_factory=dict)
    overflow_rows: FirstAndLast = field(default_factory=FirstAndLast)
    evaluations: dict[str, dict[str, Curve]] = field(default_factory=dict)
    operators: dict[str, Any] = field(default_factory=dict)
    occurrences: FirstAndLast = field(default_factory=FirstAndLast)
    notes: list[str] = field(default_factory=list)
    passes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    not_looked_at: dict[str, None] = field(default_factory=dict)
    lost_updates: dict[str, None] = field(default_factory=dict)
    of_ranks: set[tuple[str, int]] = field(default_factory=set)
    overflowed: set[tuple[str, int]] = field(default_factory=set)

    @property
    def not_finite_elsewhere(self) -> str:
        """Sentence on gradients that were not finite although no update overflowed; empty if there are none."""
        steps = len(self.of_ranks - self.overflowed)
        phrases = (
            [f"in {counted(self.passes, 'backward pass', 'backward passes')} without an update"] if self.passes else []
        )
        phrases += [f"on single ranks in {counted(steps, 'step')}"] if steps else []
        return f"Gradients were not finite {' and '.join(phrases)}, which the events name." if phrases else ""

    @property
    def steps(self) -> int:
        """Largest number of steps that any learner attempted."""
        return max((learner.attempts for learner in self.learners.values()), default=0)

    @property
    def scaled(self) -> bool:
        """True if the loss scale of any step differs from 1."""
        return any(
            value != 1 for learner in self.learners.values() for value in (learner.loss_scale.finite() or [1.0])
        ) or any(len(learner.loss_scale.lost()) for learner in self.learners.values())


def read_history(run: Run, most: int = MOST_BUCKETS) -> History:
    """Read the step and event records of a run for a report, up to the first damaged record of each file.

    Curves have at most ``most`` buckets (points).
    """
    history = History()
    for record in _as_far_as_possible(run.steps(), history.notes, "steps"):
        learner = history.learners.get(record.learner)
        if learner is None:
            learner = history.learners[record.learner] = LearnerHistory.empty(most)
        learner.add(record)
    for event in _as_far_as_possible(run.events(), history.notes, "events"):
        try:
            _take(history, event, most)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            history.notes.append(
                f"an event of the kind {event['event']!r} has missing or invalid fields and is left out"
            )
    history.notes = list(dict.fromkeys(history.notes))
    return history


class _Event(TypedDict, total=False):
    """Types of the event fields that are shown without further checks."""

    step: NonNegativeInt | None
    count: NonNegativeInt | None
    loss_scale: float
    metrics: dict[str, float | None]
    tensors: list[list[str]] | None


def _take(history: History, event: dict[str, Any], most: int) -> None:
    kind = event["event"]
    build(_Event, event, lenient=True)
    if kind == "overflow":
        phase, learner, step = str(event["phase"]), str(event["learner"]), int(event["step"])
        named = [(str(name), str(what)) for name, what in event.get("tensors") or ()]
        history.overflows.setdefault(learner, Overflows()).add(phase, step, float(event["loss_scale"]), named)
        history.overflow_rows.add(event)
        history.overflowed.add((learner, step))
    elif kind == "evaluation":
        curves = history.evaluations.setdefault(str(event["split"]), {})
        for name, value in event["metrics"].items():
            curves.setdefault(str(name), Curve(most)).add(int(event["step"]), float("nan") if value is None else value)
    elif kind == "operators":
        history.operators = {name: _counted(event[name], words) for name, words in _OPERATORS.items()}
    elif kind not in _USUAL:
        fields = {key: value for key, value in event.items() if key not in ("event", "step")}
        if kind == "groups":  # names of all parameters, by rate and decay
            fields = {group: counted(len(names), "parameter") for group, names in fields.items()}
        text = _NOT_FINITE[kind](event) if kind in _NOT_FINITE else describe(fields)
        if kind in IN_WORDS:
            text = in_words(kind, event)
            history.lost_updates[text] = None
        history.passes += kind == "abandoned" and bool(event.get("tensors"))
        if kind in ("abandoned", "abandoned_passes"):  # the second, at the end, has the number of all
            learner = str(event["learner"])
            history.left_out[learner] = (
                int(event.get("count") or 0) if kind == "abandoned_passes" else history.left_out.get(learner, 0) + 1
            )
        if kind == "not_looked_at":
            whose = f" (rank {event['rank']})" if event.get("rank") else ""
            history.not_looked_at[f"{event['what']}{whose}"] = None
        if kind == "rank_overflow":
            history.of_ranks.add((str(event["learner"]), int(event["step"])))
        history.occurrences.add((int(event.get("step") or 0), kind, text))


def _pass_in_words(event: dict[str, Any]) -> str:
    whose = f" of rank {event['rank']}" if event.get("rank") else ""
    named = _gradients_in_words(event)
    return (
        f"no update of the optimizer followed a backward pass{whose} for step {event['step']:,}{named and f': {named}'}"
    )


def _gradients_in_words(event: dict[str, Any]) -> str:
    """Name the gradients that were not finite; empty if all were."""
    names = [str(name) for name, _ in event.get("tensors") or ()]
    left = max(int(event.get("count") or 0), len(names)) - len(names[:MOST_ROWS])
    more = f" and {left:,} more" if left else ""
    learner = "" if event.get("learner", "main") == "main" else f" ({event['learner']})"
    return f"gradients of {', '.join(names[:MOST_ROWS])}{more} not finite{learner}" if names else ""


#: How to put events into words that name gradients apart from an overflow of an update.
_NOT_FINITE: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "abandoned": _pass_in_words,
    "rank_overflow": lambda event: f"on rank {event['rank']}: {_gradients_in_words(event)}",
}


#: Text fields of each operator and each cast, besides the number of calls.
_OPERATORS: Final = {"operators": ("phase", "operator", "inputs", "outputs"), "casts": ("phase", "from", "to")}


def _counted(rows: Any, words: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{**{word: str(row[word]) for word in words}, "calls": int(row["calls"])} for row in rows]


def describe(fields: dict[str, Any]) -> str:
    """Format the fields of an event of a run as one line: the message if it is the only field, else ``key: value``."""
    if set(fields) == {"message"}:
        return str(fields["message"])
    return "; ".join(f"{key}: {_value(value)}" for key, value in fields.items() if value not in ([], {}, "", None))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items())
    return str(value)


def _as_far_as_possible(records: Iterator[Any], notes: list[str], what: str) -> Iterator[Any]:
    try:
        yield from records
    except StorageError as error:
        notes.append(f"{error}; later {what} are not in this report")
