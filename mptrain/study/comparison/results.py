"""Results of a comparison of training runs: frozen dataclasses of plain Python types, shown by terminal and reports.

The other arms of a comparison are compared with the reference. Nothing is computed here. Differences are *arm minus
reference*, in the metric's unit, whichever direction is better. ``comparison.json`` holds the results as strict JSON;
reading it needs neither scipy nor a YAML reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from mptrain.report.notebook import CELL, MOST_ROWS, Shown, dataframe, first_rows
from mptrain.report.page import Block, Bullets, table
from mptrain.runlog.atomic_files import write_atomically
from mptrain.runlog.strict_json import read_object, restore_nonfinite
from mptrain.system.errors import StorageError
from mptrain.system.masking import masked
from mptrain.system.records import as_json
from mptrain.system.validation import build
from mptrain.system.words import KEYBOARD, UNKNOWN, confidence, elided, number, plain, signed

#: Text and digests of a run, which commands leave out of what they print for programs.
_ON_DISK = Field(exclude=True)

#: Verdicts on an arm. The last three answer questions that only logs are asked.
Word = Literal[
    "reference", "better", "equivalent", "worse", "neither has learned", "undecided",
    "not inferior", "beats target", "misses target",
]  # fmt: skip

#: Group of a recipe in which each arm stands with the group, such as a learning rate, that is best for it.
BEST = "best"

#: Claims that a comparison can be asked about; run directories are asked about the first.
Form = Literal["equivalent", "not inferior", "beats target"]

#: What decided a verdict, in the order in which it is asked about.
Reason = Literal[
    "failures", "no spread", "few pairs", "worse difference", "biased selection", "distance from target", "unlearned",
    "equivalence", "better difference", "wide interval",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over several runs or pairs of runs, with its confidence interval; ends and spread are NaN for one value.

    Attributes:
        mean: The mean; for ratios, the geometric mean.
        low: Lower end of the interval, and ``high`` its upper end.
        spread: Observed standard deviation with n - 1 in the denominator (of the logarithms for ratios). The interval
            may be wider than it implies, see `mptrain.study.comparison.statistics.mean_interval`. NaN for the
            difference of two independent samples, as each has its own.
        n: Number of values; of the smaller sample for two.
        level: Confidence level, 0.95.
    """

    mean: float
    low: float
    high: float
    spread: float
    n: int
    level: float = 0.95


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Equivalence test of an arm and the reference: two one-sided tests of their paired differences against a margin.

    With one pair, ``low``, ``high``, ``p`` and ``power`` are NaN, and ``pairs_for_80`` is None.

    Attributes:
        margin: Equivalence margin, in the metric's unit.
        low: Lower end of the 1 - 2 alpha confidence interval of the mean difference, and ``high`` its upper end.
        p: The larger of the two one-sided p values.
        power: Probability of finding equivalence with these pairs and this spread if the true difference is zero.
        pairs_for_80: Number of pairs for a power of 0.8 with this spread; None if it is more than 1,000.
        alpha: Level of each test, 0.05.
        p_bootstrap: The p value of two one-sided bootstrap-t tests, which also has to be below ``alpha`` for
            equivalence; None if the differences are not skewed.
        unseen: Largest share of runs, 0 to 1, that may fail, or differ more than any pair did, although none of these
            runs has: a 95 % confidence bound for any distribution; NaN if it is not recorded.
    """

    margin: float
    low: float
    high: float
    p: float
    power: float
    pairs_for_80: int | None
    alpha: float = 0.05
    p_bootstrap: float | None = None
    unseen: float = math.nan

    @property
    def holds(self) -> bool:
        """True if every test finds the arms equivalent."""
        return self.p < self.alpha and (self.p_bootstrap is None or self.p_bootstrap < self.alpha)


@dataclass(frozen=True, slots=True)
class ArmVerdict:
    """Verdict on an arm against the reference of a comparison, with the reason in one sentence.

    The word is ``better``, ``equivalent``, ``worse``, ``neither has learned`` or ``undecided``; ``reference`` for the
    reference itself.
    """

    word: Word
    why: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A point of a run's learning curve: the work done so far, and the metrics at this point.

    Attributes:
        step: Number of attempted steps, skipped ones included.
        updates: Number of applied updates, the minimum over learners.
        samples: Number of training samples consumed.
        values: ``val_NAME`` for each metric of a validation; ``train_loss``, averaged over the window up to this point.
    """

    step: int
    updates: int
    samples: int
    values: dict[str, float]


@dataclass(frozen=True)
class RunMeasures:
    """All that a comparison reads of one run: its configuration, metrics, speed, memory and digests of its data.

    Digests are SHA-256 in hexadecimal, and empty if not recorded.

    Attributes:
        path: The run directory, as given.
        status: ``done``, ``failed``, ``preempted`` or ``running`` (also for a killed run).
        exit_code: Exit code of the last attempt that was not killed.
        reason: Why the run ended; empty if it is done.
        config: The resolved configuration, YAML text.
        chosen: Config group to chosen option, such as ``precision`` to ``fp16_dynamic``.
        metrics: Metrics of the last evaluation on `split` (``test`` if there is one, else ``val``), by name.
        metric_name: The task's own metric; None if it has none.
        higher_is_better: Direction of that metric; None if unknown.
        samples: Number of samples evaluated in that split.
        steps: Number of attempted steps, skipped ones included.
        updates: Number of applied updates, the minimum over learners.
        skipped: Number of skipped updates, summed over learners.
        skip_rate: Share of skipped updates in all attempts, 0 to 1.
        overflows: Phase of the loss scaler (calibrating, growth probe, unexpected) to number of overflows,
            summed over learners.
        scale: ``first``, ``min``, ``max``, ``last`` of the first learner's loss scale.
        terms_per_second: Steady throughput (without warm-up) in ``term``, ``samples`` or ``tokens``, per second; None
            if too few steps were timed.
        train_seconds: Wall time of all training steps in seconds, including warm-up; NaN if not recorded.
        peak_memory: Peak memory in bytes; 0 if not recorded.
        memory_before: Bytes in use before the model was built; 0 if not recorded.
        memory_by_use: Bytes of a step by use, counted: ``weights``, ``master_weights``, ``gradients``,
            ``optimizer_state``, ``activations`` saved for the backward pass; empty if not recorded.
        energy: Energy of the device during training in joules; None if the device does not report it.
        data_wait: Share of training time spent waiting for data, 0 to 1; NaN if not recorded.
        threads: Number of CPU threads; 0 if not recorded.
        versions: Versions of python, torch, mptrain and CUDA.
        facts: Facts about model and device, such as the number of parameters; see `mptrain.engine.telemetry`.
        initial_weights: Digest of the FP32 initial weights.
        model_code: Digest of the code of a model of the user's own; None for other models.
        data: Epoch to (digest of the order of the samples, digest of the first batch).
        attempts: Host, start and end (UTC) of each attempt that was not killed.
        changes: Changes of the configuration on resume: ``KEY was A, now B``.
        data_card: Digest of ``data.json``, see `mptrain.study.comparison.run_measures`.
        evaluated: Split to the digest of the data in its last evaluation.
        unusable: Split to the number of samples left out.
        steady_steps: Number of steps over which the throughput was measured; None if not recorded.
        zero_gradients: Mean share of zero activation gradients over the steps with histograms, 0 to 1;
            None without histograms.
        lost_updates: Share of the updates in these steps that changed no weight, of half-precision weights without a
            master copy that are rounded to nearest, 0 to 1; None for others and without histograms.
        course: The learning curve, in order; not stored with a comparison.
        losses: Mean training loss of the first ten steps, and at the end; NaN if unknown, or with several learners.
    """

    path: str
    seed: int
    status: str
    exit_code: int | None
    reason: str
    config: Annotated[str, _ON_DISK]
    overrides: tuple[str, ...]
    chosen: dict[str, str]
    metrics: dict[str, float]
    metric_name: str | None
    higher_is_better: bool | None
    split: str
    samples: int
    steps: int
    updates: int
    skipped: int
    skip_rate: float
    overflows: dict[str, int]
    scale: dict[str, float]
    terms_per_second: float | None
    term: str
    train_seconds: float
    peak_memory: int
    memory_before: int
    energy: float | None
    data_wait: float
    device: str
    threads: int
    versions: dict[str, str]
    facts: dict[str, Any]
    initial_weights: Annotated[str, _ON_DISK]
    data: Annotated[dict[int, tuple[str, str]], _ON_DISK]
    attempts: Annotated[tuple[tuple[str, str, str], ...], _ON_DISK] = ()
    changes: tuple[str, ...] = ()
    data_card: Annotated[str, _ON_DISK] = ""
    evaluated: Annotated[dict[str, str], _ON_DISK] = field(default_factory=dict)
    unusable: dict[str, int] = field(default_factory=dict)
    steady_steps: int | None = None
    zero_gradients: float | None = None
    lost_updates: float | None = None
    memory_by_use: dict[str, int] = field(default_factory=dict)
    model_code: Annotated[str | None, _ON_DISK] = None
    course: Annotated[tuple[CurvePoint, ...], _ON_DISK] = ()
    losses: tuple[float, float] = (math.nan, math.nan)


@dataclass(frozen=True)
class Arm:
    """An arm of a comparison, such as ``fp16_static``: all runs of one configuration, one per seed, by seed."""

    name: str
    runs: tuple[RunMeasures, ...]


@dataclass(frozen=True)
class Aligned:
    """Values of an arm and of the reference after equal work, so that skipped updates do not distort their comparison.

    Attributes:
        by: Measure of the work: ``updates`` (applied) or ``samples`` (of the training data).
        at: Number of updates or samples; the largest that every run of both arms reached.
        quantity: Compared quantity: ``val_NAME``, the validation metric, or ``train_loss`` if that is unknown.
        value: Mean of the quantity over the arm's runs at that point.
        difference: Mean of the paired differences, arm minus reference; None for the reference.
    """

    by: Literal["updates", "samples"]
    at: int
    quantity: str
    value: Interval
    difference: Interval | None


def value_and_error(interval: Interval | None) -> str:
    """Format the mean of an arm's runs with half its 95 % CI: ``0.9184 ± 0.0021``; the value alone for one run."""
    if interval is None:
        return UNKNOWN
    error = (interval.high - interval.low) / 2
    if not math.isfinite(error):
        return number(interval.mean)
    return f"{number(interval.mean, error)} ± {number(error, error)}"


def difference_and_interval(interval: Interval | None) -> str:
    """Format a mean difference with its CI: ``+0.0005 [+0.0001, +0.0009]``; alone if there is one pair."""
    if interval is None:
        return UNKNOWN
    error = (interval.high - interval.low) / 2
    if not math.isfinite(error):
        return signed(interval.mean)
    return f"{signed(interval.mean, error)} [{signed(interval.low, error)}, {signed(interval.high, error)}]"


def arm_in_words(arm: Any) -> tuple[str, str, str, str, str]:
    """Return an arm of run directories or logs in a table's words: name, runs, mean, difference and verdict.

    The mean is that of the runs that end at a finite value: ``2 of 3``.
    """
    runs, used = len(arm.runs), arm.mean.n if arm.mean else 0
    of_all = f"{runs}" if used == runs else f"{used} of {runs}"
    return arm.name, of_all, value_and_error(arm.mean), difference_and_interval(arm.difference), arm.word


class JudgedArm:
    """Mixin of an arm, of run directories or of logs, which Python prints on one line."""

    @override
    def __repr__(self) -> str:
        text = "<{:.40}: runs {}, mean {}, difference {}, {}>"
        return plain(masked(text.format(*arm_in_words(self)))).translate(KEYBOARD)


@dataclass(frozen=True, repr=False)
class ArmResult(JudgedArm):
    """Results of an arm of a comparison, against the reference.

    Ratios are arm / reference for runs with the same seed, as geometric means; None without such a pair.

    Attributes:
        metric: Mean of the compared metric over its finished runs; None if no run has a finite metric.
        difference: Mean difference of the metric, arm minus reference, paired by seed; None for the reference and if no
            pair is complete.
        equivalence: Equivalence test of these differences; None with fewer than two complete pairs.
        failed: Number of runs that failed numerically or have a non-finite metric.
        missing: Number of runs that did not finish for another reason (interruption, data, disk).
        throughput: Mean steady throughput in loss terms (samples or tokens) per second; None if no run has recorded it.
        speed: Paired ratio of throughput to the reference's; above 1 is faster.
        time: Paired ratio of the wall time of training, including warm-up; below 1 is faster.
        memory: Paired ratio of peak memory; below 1 is less memory.
        peak: Mean peak memory in bytes; None if no run has recorded it.
        energy: Paired ratio of energy; None if the device does not report it.
        skip_rate: Mean share of skipped updates over all runs, 0 to 1.
        aligned: Values at equal updates and at equal samples.
        differs: Configuration keys that differ from the reference: key to (reference's value, arm's value).
        remarks: Reasons for no gain in speed or memory, and other remarks, one sentence each.
    """

    arm: Arm
    metric: Interval | None
    difference: Interval | None
    equivalence: Equivalence | None
    verdict: ArmVerdict
    failed: int
    missing: int
    throughput: Interval | None
    speed: Interval | None
    time: Interval | None
    memory: Interval | None
    peak: Interval | None
    energy: Interval | None
    skip_rate: float
    aligned: tuple[Aligned, ...] = ()
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the arm."""
        return self.arm.name

    @property
    def runs(self) -> tuple[RunMeasures, ...]:
        """Runs of the arm, by seed."""
        return self.arm.runs

    @property
    def mean(self) -> Interval | None:
        """Mean of the compared metric, by the name that it has in a comparison of logs too."""
        return self.metric

    @property
    def word(self) -> Word:
        """The verdict in one word."""
        return self.verdict.word

    @property
    def why(self) -> str:
        """The reason of the verdict."""
        return self.verdict.why


@dataclass(frozen=True)
class Objection:
    """An objection to the fairness of a comparison, such as arms that differ in more than their precision.

    Attributes:
        what: The fact, naming the keys or runs.
        fatal: Whether it prevents verdicts unless the user insists.
        hint: Advice for the user; empty if there is none.
    """

    what: str
    fatal: bool
    hint: str = ""


class Judged(Shown):
    """Mixin of a comparison, of run directories or of logs, with its table of arms for notebooks, and as numbers.

    The reasons of the verdicts stand with it, and all that qualifies them.
    """

    arms: tuple[Any, ...]
    _INTERVALS: ClassVar[tuple[str, ...]] = ("mean", "difference")
    _NUMBERS: ClassVar[tuple[str, ...]] = ()

    def _question(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the metric, and all that limits the meaning of the verdicts."""
        raise NotImplementedError

    @override
    def blocks(self) -> Sequence[Block]:
        metric, limits = self._question()
        level = next((f"{confidence(arm.difference.level)} CI" for arm in self.arms if arm.difference), "CI")
        head = ("arm", "runs", f"{metric} ± 95 % CI", f"difference [{level}]", "verdict")
        reasons = (f"{elided(arm.name, CELL)}: {arm.why}" for arm in self.arms[:MOST_ROWS] if arm.word != "reference")
        arms = first_rows(table(head, map(arm_in_words, self.arms)), "arms")
        return arms, Bullets(tuple(reasons)), Bullets(limits, "warn")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values.

        Numbers that are not finite become None, and ``nonfinite`` maps their paths (``arms.0.mean.low``) to ``inf``,
        ``-inf`` or ``nan``. Learning curves of runs are left out.
        """
        fields = asdict(self)  # type: ignore[call-overload]
        for arm in fields["arms"]:
            for run in arm.get("arm", {}).get("runs", ()):
                del run["course"]
        return dict(json.loads(as_json(fields)))

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each arm.

        Its columns are ``arm``; ``runs``, and ``finite``, the number of those that the mean contains; each interval of
        an arm as its mean and its ends (``difference``, ``difference_low``, ``difference_high``); other numbers of an
        arm; ``verdict`` and ``why``; and ``limits``, the objections to the comparison and its notes, which are
        the same in each row. Unknown numbers are NaN.

        Raises:
            EnvironmentRefused: pandas is not installed.
        """
        ends, limits, rows = {"": "mean", "_low": "low", "_high": "high"}, "; ".join(self._question()[1]), []
        for arm in self.arms:
            row = {"arm": arm.name, "runs": len(arm.runs), "finite": arm.mean.n if arm.mean else 0}
            for name in self._INTERVALS:
                row |= {f"{name}{end}": getattr(getattr(arm, name), own, math.nan) for end, own in ends.items()}
            row |= {name: getattr(arm, name) for name in self._NUMBERS} | {"verdict": arm.word, "why": arm.why}
            rows.append(row | {"limits": limits})
        return dataframe(rows)


@dataclass(frozen=True, repr=False)
class Comparison(Judged):
    """A comparison of arms with a reference: results of each arm, and all that limits their meaning.

    Attributes:
        split: Name of the split on which the metric was evaluated.
        margin: Equivalence margin, in the metric's unit: smaller differences count as none.
        reference: Name of the reference arm.
        arms: Results of all arms, the reference first.
        objections: Objections to the comparison; verdicts despite a fatal one were requested by the user.
        checks: Checks that hold for all arms, one sentence each (initial weights, order, augmentation ...).
        notes: Notes for the reader, one sentence each: resolution of the test set, multiple
            comparisons, concurrent runs.
    """

    metric: str
    higher_is_better: bool
    split: str
    margin: float
    reference: str
    arms: tuple[ArmResult, ...]
    objections: tuple[Objection, ...] = ()
    checks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    _INTERVALS = (*Judged._INTERVALS, "throughput", "speed", "time", "memory", "peak", "energy")
    _NUMBERS = ("failed", "missing", "skip_rate")

    @override
    def _question(self) -> tuple[str, tuple[str, ...]]:
        objections = (f"{'Not comparable' if one.fatal else 'Caveat'}: {one.what}" for one in self.objections)
        return f"{self.metric} ({self.split})", (*objections, *self.notes)


#: Version of the JSON layout.
SCHEMA = 2


def write_comparisons(path: Path, groups: Mapping[str, Comparison]) -> None:
    """Write the results of one or more comparisons, by name, to ``comparison.json``, as strict JSON.

    A recipe repeats its arms in several groups and has one comparison for each; a single comparison has
    the name ``""``.
    """
    kept = [{"name": name, "comparison": comparison.to_dict()} for name, comparison in groups.items()]
    write_atomically(path, json.dumps({"schema": SCHEMA, "groups": kept}, indent=1, allow_nan=False) + "\n")


def read_comparisons(path: Path) -> dict[str, Comparison]:
    """Read the comparisons that `write_comparisons` wrote, by name and without learning curves.

    Raise StorageError if the file is missing, damaged or of another version.
    """
    fields = read_object(path, SCHEMA)
    try:
        return {str(group["name"]): from_json(group["comparison"]) for group in fields["groups"]}
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is damaged: {error}", "repeat the comparison") from error


def from_json(fields: dict[str, Any]) -> Comparison:
    """Restore a comparison, without learning curves, from the JSON values of `Comparison.to_dict`.

    Raise StorageError if they are damaged.
    """
    try:
        comparison = build(Comparison, restore_nonfinite(fields))
        if not comparison.arms:
            raise ValueError("it has no arms")
        return comparison
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"the comparison is damaged: {error}", "repeat the comparison") from error
