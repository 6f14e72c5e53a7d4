"""The outcome of a comparison: frozen values of plain Python types, which the terminal, the reports and recipes show.

Nothing is computed here. Differences are *arm minus reference*, in the metric's own unit, whichever direction is better.
``comparison.json`` holds them as strict JSON; reading it back needs neither scipy nor a YAML reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mptrain.errors import StorageError
from mptrain.records import as_json
from mptrain.runlog.atomic_files import write_atomically
from mptrain.runlog.schema_checks import build
from mptrain.runlog.strict_json import read_object, restore_nonfinite

Word = Literal["reference", "better", "equivalent", "worse", "undecided"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval.

    Attributes:
        mean: The mean; of a ratio, the geometric mean.
        low: Lower end; NaN where there is one value only.
        high: Upper end; NaN where there is one value only.
        spread: Standard deviation of the values as they are, with n - 1 in the denominator (of the logarithms for a ratio);
            NaN for one value. The ends may lie wider apart than it says, see `mptrain.comparison.statistics.mean_interval`.
        n: How many values.
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
    """Two one-sided tests of a paired difference against a margin.

    Attributes:
        margin: Largest difference that counts as none, in the metric's unit.
        low: Lower end of the 1 - 2 alpha interval of the difference.
        high: Upper end of it.
        p: The larger of the two one-sided p values; NaN for one pair.
        power: Probability that so many pairs with this spread are called equivalent if there is no difference at all.
        pairs_for_80: Pairs that would reach a power of 0.8 with this spread; None where more than 1,000 would be needed.
        alpha: Level of each test, 0.05.
    """

    margin: float
    low: float
    high: float
    p: float
    power: float
    pairs_for_80: int | None
    alpha: float = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer that the numbers of an arm give against the reference: one word, and why, in one sentence."""

    word: Word
    why: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The state of a run at one moment, as far as it is on record.

    Attributes:
        step: Attempted steps.
        updates: Applied updates, the fewest of its learners.
        samples: Training samples consumed.
        values: ``val_NAME`` for each metric of a validation; ``train_loss``, the mean over the steps before.
    """

    step: int
    updates: int
    samples: int
    values: dict[str, float]


@dataclass(frozen=True)
class RunMeasures:
    """The content of one run directory, as numbers.

    Attributes:
        path: The run directory, as it was named.
        seed: Of its configuration.
        status: ``done``, ``failed``, ``preempted`` or ``running`` (or killed).
        exit_code: Of the last attempt that ended in order.
        reason: Why it ended; empty where it is done.
        config: The resolved configuration, YAML text.
        overrides: The words that led to it.
        chosen: Group to option.
        metrics: The last evaluation of the record's split (``test`` where there is one, else ``val``), name to value.
        metric_name: The task's own metric; None where it has none.
        higher_is_better: Of that metric.
        split: Which split `metrics` are of.
        samples: Samples of that split.
        steps: Attempted steps.
        updates: Applied updates, the fewest of its learners.
        skipped: Refused updates of all learners.
        skip_rate: Their share of all attempts, 0 to 1.
        overflows: Phase to count, over all learners.
        scale: ``first``, ``min``, ``max``, ``last`` of the first learner's loss scale.
        terms_per_second: Steady throughput (without warm-up); None where too few steps were timed.
        term: What is counted: ``samples``, ``tokens``.
        train_seconds: Wall time of all training steps, warm-up included; NaN where it is not on record.
        peak_memory: Bytes; 0 where it is not on record.
        memory_before: Bytes in use before the model was built; 0 where it is not on record.
        energy: Joules of the device during training; None where it does not say.
        data_wait: Share of training time spent waiting for data, 0 to 1; NaN where it is not on record.
        device: In words.
        threads: CPU threads; 0 where it is not on record.
        versions: Of what computes.
        facts: Of the model and the device; see `mptrain.engine.summary`.
        initial_weights: SHA-256 of the FP32 initial weights; empty where it is not on record.
        data: Epoch to (order digest, first batch digest).
        evaluated: Split to the digest of the data of its last evaluation.
        attempts: Host, start and end (UTC) of each process that worked on it and ended in order.
        changes: How its configuration was changed when it went on: ``KEY was A, now B``.
        data_card: SHA-256 of what it says of its data, see `mptrain.comparison.run_measures`; empty where it is not on record.
        unusable: Split to how many of its samples were left out.
        steady_steps: Over how many steps the throughput was measured; None where it is not on record.
        zero_gradients: Mean share of activation gradients that were zero in the steps that were looked at; None without any.
        course: How it went, in order; not kept with a comparison.
    """

    path: str
    seed: int
    status: str
    exit_code: int | None
    reason: str
    config: str
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
    initial_weights: str
    data: dict[int, tuple[str, str]]
    attempts: tuple[tuple[str, str, str], ...] = ()
    changes: tuple[str, ...] = ()
    data_card: str = ""
    evaluated: dict[str, str] = field(default_factory=dict)
    unusable: dict[str, int] = field(default_factory=dict)
    steady_steps: int | None = None
    zero_gradients: float | None = None
    course: tuple[CurvePoint, ...] = ()


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed only: ``name`` and the runs in the order of their seeds."""

    name: str
    runs: tuple[RunMeasures, ...]


@dataclass(frozen=True)
class Aligned:
    """An arm and the reference at the same amount of work, so that skipped updates can neither hide nor count twice.

    Attributes:
        by: ``updates`` or ``samples``.
        at: How many; the most that every run of both arms reached.
        quantity: What is compared: ``val_NAME``, the metric in validation, or ``train_loss`` where that is not known.
        value: Of the arm at that point.
        difference: Paired, arm minus reference; None for the reference.
    """

    by: Literal["updates", "samples"]
    at: int
    quantity: str
    value: Interval
    difference: Interval | None


@dataclass(frozen=True)
class ArmResult:
    """An arm against the reference.

    Attributes:
        arm: Its runs.
        metric: Mean over its finished runs; None where none has a finite metric.
        difference: Paired by seed; None for the reference and where no pair is complete.
        equivalence: None where there is no difference with a spread.
        verdict: In one word, and why.
        failed: Runs that ended in numerical failure, or whose metric is not finite.
        missing: Runs that did not end for any other reason (interrupted, data, disk).
        throughput: Loss terms a second, steady; None where no run says so.
        speed: Ratio of throughput to the reference's, paired; above 1 is faster.
        time: Ratio of the wall time of training, warm-up included, paired; below 1 is faster.
        memory: Ratio of peak memory; below 1 is smaller.
        peak: Peak memory in bytes.
        energy: Ratio of energy; None where the device does not say.
        skip_rate: Mean share of skipped updates.
        aligned: At equal updates and at equal samples.
        differs: Configuration keys in which the arm differs from the reference: key to (reference's value, its own).
        remarks: Why it is not faster or smaller, and what else deserves a sentence.
    """

    arm: Arm
    metric: Interval | None
    difference: Interval | None
    equivalence: Equivalence | None
    verdict: Verdict
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


@dataclass(frozen=True)
class Objection:
    """Something that makes a comparison unfair.

    Attributes:
        what: The fact, naming the keys or runs.
        fatal: The comparison is refused unless the user insists.
        hint: What to do.
    """

    what: str
    fatal: bool
    hint: str = ""


@dataclass(frozen=True)
class Comparison:
    """A whole comparison.

    Attributes:
        metric: What is compared.
        higher_is_better: Its direction.
        split: Of which split.
        margin: Of equivalence, in the metric's unit.
        reference: Name of the reference arm.
        arms: The reference first.
        objections: What makes it less than fair; those that were fatal were insisted upon.
        checks: What was found to be the same in all arms, one sentence each (initial weights, order, augmentation ...).
        notes: What the reader should know: resolution of the test set, several comparisons at once, jobs in parallel.
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


#: Version of the layout.
SCHEMA = 2


def write_comparisons(path: Path, groups: Mapping[str, Comparison]) -> None:
    """Write ``comparison.json``.

    Args:
        path: `mptrain.runlog.sweeps.SweepPaths.comparison`.
        groups: Group to its comparison; ``""`` is the group of arms that have none.

    Raises:
        StorageError: The disk refuses.
    """
    kept = [{"name": name, "comparison": to_json(comparison)} for name, comparison in groups.items()]
    write_atomically(path, json.dumps({"schema": SCHEMA, "groups": kept}, indent=1, allow_nan=False) + "\n")


def read_comparisons(path: Path) -> dict[str, Comparison]:
    """Return what `write_comparisons` wrote.

    Raises:
        StorageError: It is missing, damaged or of another version.
    """
    fields = read_object(path, SCHEMA)
    try:
        return {str(group["name"]): from_json(group["comparison"]) for group in fields["groups"]}
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is damaged: {error}", "compare the runs again") from error


def to_json(comparison: Comparison) -> dict[str, Any]:
    """JSON values only; non-finite numbers are null, and listed as in every record (`mptrain.records.as_json`).

    The courses of the runs are left out: they stand in the run directories.
    """
    fields = asdict(comparison)
    for result in fields["arms"]:
        for run in result["arm"]["runs"]:
            del run["course"]
    found: dict[str, Any] = json.loads(as_json(fields))
    return found


def from_json(fields: dict[str, Any]) -> Comparison:
    """The comparison that `to_json` was given, but for the courses of its runs.

    Raises:
        StorageError: It is damaged.
    """
    try:
        found = build(Comparison, restore_nonfinite(fields))
        if not found.arms:
            raise ValueError("it has no arms")
        return found
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"the comparison is damaged: {error}", "compare the runs again") from error
