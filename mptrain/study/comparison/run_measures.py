"""Measures of a run for a comparison, read from its run directory, their resolution, and its learning curve.

A learning curve consists of the run's validations, plus its training loss if there are fewer than two validations. Arms
are compared at equal updates and at equal samples, which differ because a skipped update consumes samples without
changing the weights. Runs that have not converged, or learned nothing, get a warning, because untrained arms agree too.

Only recorded values are used; what an unfinished run has not recorded stays unknown. A share of N samples changes in
steps of 1 / N, which `mptrain.study.comparison.statistics` takes into account in intervals. The digest of a run's
``data.json`` is taken with file names without folders, so that the same data in another folder has the same digest.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from mptrain.config.config_diff import chosen_options, flat_settings
from mptrain.numerics.exponents import merged, total
from mptrain.runlog.lost_updates import lost_shares
from mptrain.runlog.run_reader import Run
from mptrain.runlog.strict_json import read_object
from mptrain.study.comparison.results import Aligned, Arm, CurvePoint, RunMeasures
from mptrain.study.comparison.statistics import improved, mean_interval
from mptrain.system.errors import ConfigError, StorageError
from mptrain.system.words import percent

#: Number of windows over which the training loss is averaged, and the fewest steps in one.
_WINDOWS, _FEWEST = 50, 10


def learning_curve(run: Run, steps: int, samples_per_step: float) -> tuple[CurvePoint, ...]:
    """Return the learning curve of a run, in order of steps: its validations, and if they are few its training loss.

    The run's steps are read, as a stream, only if it has fewer than two validations, because interpolation needs two.
    The training loss is then averaged over windows of steps. ``steps`` counts attempted steps, and ``samples_per_step``
    is an average over the run.
    """
    validations = list(_validations(run, samples_per_step))
    losses = list(_losses(run, steps, samples_per_step)) if len(validations) < 2 else []
    return tuple(sorted((*validations, *losses), key=lambda moment: moment.step))


def _validations(run: Run, samples_per_step: float) -> Iterator[CurvePoint]:
    """Yield one point per validation; a validation has one row per learner."""
    validations: dict[int, tuple[int, dict[str, float]]] = {}
    for record in run.epochs():
        before, _ = validations.get(record.step, (record.updates, {}))
        validations[record.step] = (min(before, record.updates), record.val)
    for step, (updates, metrics) in sorted(validations.items()):
        if metrics:
            values = {f"val_{name}": value for name, value in metrics.items()}
            yield CurvePoint(step, updates, round(step * samples_per_step), values)


def _losses(run: Run, steps: int, samples_per_step: float) -> Iterator[CurvePoint]:
    """Yield the mean finite loss of the first learner's applied steps, one point per window."""
    width = max(_FEWEST, steps // _WINDOWS)
    learner, total, count = "", 0.0, 0
    for record in run.steps():
        learner = learner or record.learner
        if record.learner != learner:
            continue
        if not record.skipped and math.isfinite(record.loss):
            total, count = total + record.loss, count + 1
        if record.step % width == 0 or record.step == steps:
            if count:
                samples = round(record.step * samples_per_step)
                yield CurvePoint(record.step, record.updates, samples, {"train_loss": total / count})
            total, count = 0.0, 0


def losses_at_ends(run: Run, course: Sequence[CurvePoint]) -> tuple[float, float]:
    """Return the mean training loss of the first ten steps, and of the last epoch, or else at the end of the course.

    NaN stands for what is not recorded, and for the losses of several learners, which compete.
    """
    rows = list(itertools.islice(run.steps(), _FEWEST))
    first = [row.loss for row in rows if not row.skipped and math.isfinite(row.loss)]
    if len({row.learner for row in rows}) != 1 or not first:
        return math.nan, math.nan
    windows = [moment.values["train_loss"] for moment in course if "train_loss" in moment.values]
    last = windows or [epoch.train_loss for epoch in run.epochs()]
    return sum(first) / len(first), last[-1] if last else math.nan


By = Literal["updates", "samples"]

_BOTH: tuple[By, By] = ("updates", "samples")


def align(pairs: Sequence[tuple[RunMeasures, RunMeasures]], metric: str) -> tuple[Aligned, ...]:
    """Compare the learning curves of an arm and the reference after equal updates, and after equal samples.

    The pairs (run of the arm, run of the reference) are finished runs with the same seed. If a run has no value of the
    validation metric at that point, the training loss is compared. Each result exists only if all runs have a value.
    """
    own, others = [run for run, _ in pairs], [other for _, other in pairs]
    return tuple(aligned for by in _BOTH if (aligned := _at_equal(own, others, metric, by)) is not None)


def align_reference(runs: Sequence[RunMeasures], metric: str) -> tuple[Aligned, ...]:
    """Return the values of the reference as `align` does, after the most work that all its runs reached."""
    return tuple(aligned for by in _BOTH if (aligned := _at_equal(runs, [], metric, by)) is not None)


def value_at(run: RunMeasures, quantity: str, at: int, by: By) -> float:
    """Return a quantity of a run's learning curve after an amount of work, interpolated linearly between its points.

    The quantity is ``val_NAME`` for a validation metric, or ``train_loss``. ``by`` is the unit of ``at``: applied
    updates, or training samples. The result is NaN outside the recorded range.
    """
    known = [
        (moment.updates if by == "updates" else moment.samples, moment.values[quantity])
        for moment in run.course
        if quantity in moment.values
    ]
    work = [done for done, _ in known]
    above = bisect.bisect(work, at)
    if above and work[above - 1] == at:
        return known[above - 1][1]  # the last of several points with equally many updates
    if not 0 < above < len(work):
        return math.nan
    share = (at - work[above - 1]) / (work[above] - work[above - 1])
    return (1 - share) * known[above - 1][1] + share * known[above][1]


def _at_equal(own: Sequence[RunMeasures], others: Sequence[RunMeasures], metric: str, by: By) -> Aligned | None:
    runs = (*own, *others)
    if not all(run.course for run in runs) or not runs:
        return None
    at = min(run.course[-1].updates if by == "updates" else run.course[-1].samples for run in runs)
    for quantity in (f"val_{metric}", "train_loss"):
        values = [value_at(run, quantity, at, by) for run in own]
        references = [value_at(run, quantity, at, by) for run in others]
        if at > 0 and all(map(math.isfinite, (*values, *references))):
            difference = [value - reference for value, reference in zip(values, references, strict=bool(others))]
            return Aligned(by, at, quantity, mean_interval(values), mean_interval(difference) if difference else None)
    return None


#: Smallest relative fall of the training loss that counts as learning.
_LEAST_FALL = 0.05


def convergence_warnings(reference: Arm, metric: str, margin: float) -> list[str]:
    """Return at most one warning, if the finished runs of the reference had not converged, or do not show it.

    Runs have not converged if the metric still changed by more than the margin between the last two validations, on
    average.
    """
    runs = [run for run in reference.runs if run.status == "done" and run.course]
    moves = [abs(values[-1] - values[-2]) for run in runs if len(values := _course(run, f"val_{metric}")) > 1]
    if moves:
        mean = sum(moves) / len(moves)
        return (
            [
                f"{metric} of {reference.name} still changed by {mean:.2g} between the last two validations, more than "
                f"the margin of {margin:g}: the runs had not converged, and verdicts hold for runs of this length"
            ]
            if mean > margin
            else []
        )
    losses = [_course(run, "train_loss") for run in runs]
    if any(len(values) < 2 for values in losses):
        return [f"the records do not show whether {reference.name} learned: it was validated once, after few steps"]
    return []


def _course(run: RunMeasures, name: str) -> list[float]:
    values = (moment.values.get(name, math.nan) for moment in run.course)
    return [value for value in values if math.isfinite(value)]


def neither_learned(
    arm: Sequence[RunMeasures], reference: Sequence[RunMeasures], metric: str, margin: float, *, higher_is_better: bool
) -> str:
    """Return why no finished run of an arm and of the reference has learned; empty if one has, or if it is unknown."""
    arms = [[run for run in some if math.isfinite(run.metrics.get(metric, math.nan))] for some in (arm, reference)]
    runs = [run for some in arms for run in some]
    if runs and higher_is_better and all(run.metrics[metric] == 0 for run in runs):
        return f"{metric} is 0 in every run"
    falls = [1 - run.losses[1] / run.losses[0] if run.losses[0] > 0 else math.nan for run in runs]
    if not falls or not all(fall < _LEAST_FALL for fall in falls):
        return ""
    sign = 1 if higher_is_better else -1
    for some in arms:
        courses = [values for run in some if len(values := _course(run, f"val_{metric}")) > 1]
        gains = [sign * (values[-1] - values[0]) for values in courses]
        if gains and (improved(gains) or max(gains) > margin):
            return ""
    return f"the training loss of no run fell by {percent(_LEAST_FALL)}, nor is {metric} better than at the start"


#: Fewest timed steps after warm-up for a throughput.
TIMED_STEPS = 20

_RESTORE = "restore the file from a copy, or start the run again"


@dataclass
class _Events:
    """Values from a run's events, of which later ones replace earlier ones: metrics and samples by split, digests."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)
    initial_weights: str = ""
    model_code: str | None = None
    data: dict[int, tuple[str, str]] = field(default_factory=dict)
    evaluated: dict[str, str] = field(default_factory=dict)


def measure(run: Run) -> RunMeasures:
    """Read all that a comparison needs of a run, finished or not: metrics, speed, memory, skipped updates, digests.

    The run's events are read once, as a stream; its steps only if summary or validations are missing. Raise
    StorageError if it has no configuration yet, or a record is damaged.
    """
    if not run.config:
        raise StorageError(f"{run.paths.root} has no config.yaml", "it was killed before it started: start it again")
    seen = _read_events(run)
    try:
        return _measured(run, seen)
    except ConfigError as error:
        raise StorageError(f"{run.paths.config} is damaged: {error}", _RESTORE) from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        names = f"{run.paths.summary.name} and {run.paths.config.name}"
        raise StorageError(f"{run.paths.root}: {names} are damaged: {error!r}", _RESTORE) from error


_PROCS = re.compile(r"^(distributed:\n(?:  .*\n)*?  procs:).*$", re.MULTILINE)


def _with_ranks(run: Run) -> str:
    """Return the configuration with the run's number of ranks (null for one), which torchrun's runs do not save."""
    ranks = run.state.ranks
    return _PROCS.sub(rf"\g<1> {ranks if ranks > 1 else 'null'}", run.config, count=1)


def _measured(run: Run, seen: _Events) -> RunMeasures:
    config = flat_settings(run.config)
    summary = _summary_of_its_end(run, seen) or _summary_of_steps(run, seen)
    learners: list[dict[str, Any]] = list(summary["learners"].values())
    steps, skipped = int(summary["steps"]), sum(learner["skipped"] for learner in learners)
    split = summary.get("metric_split") or next((name for name in ("test", "val") if name in seen.metrics), "")
    samples = (
        summary["samples"] / steps if steps and summary.get("samples") else float(config.get("train.batch_size", 1))
    )
    return RunMeasures(
        path=str(run.paths.root),
        seed=int(config.get("seed", 0)),
        status=run.state.status,
        exit_code=run.state.exit_code,
        reason=run.state.reason,
        config=_with_ranks(run),
        overrides=run.overrides,
        chosen=chosen_options(run.config),
        metrics=_numbers(summary.get(split) or seen.metrics.get(split, {})),
        metric_name=summary.get("metric_name"),
        higher_is_better=summary.get("higher_is_better"),
        split=split,
        samples=seen.samples.get(split, 0),
        steps=steps,
        updates=min((learner["updates"] for learner in learners), default=0),
        skipped=skipped,
        skip_rate=skipped / (steps * len(learners)) if steps and learners else 0.0,
        overflows=_overflows(learners),
        zero_gradients=_zero_gradients(run),
        lost_updates=_lost_updates(run, config),
        scale=dict(learners[0]["scale"]) if learners else {},
        terms_per_second=_steady(summary),
        term=summary.get("term", "samples"),
        train_seconds=_number(summary.get("train_seconds")),
        peak_memory=int(summary.get("peak_memory") or 0),
        memory_before=int(summary.get("memory_before") or 0),
        memory_by_use=dict(summary.get("memory_by_use") or {}),
        energy=summary.get("energy_joules"),
        data_wait=_number(summary.get("data_wait")),
        device=run.state.device,
        threads=int(summary.get("threads") or config.get("threads") or 0),
        versions=dict(run.state.versions),
        facts=dict(summary.get("facts") or {}),
        initial_weights=seen.initial_weights,
        model_code=seen.model_code,
        data=seen.data,
        evaluated=seen.evaluated,
        attempts=tuple(
            (attempt.host, attempt.started, attempt.ended)
            for attempt in run.state.attempts
            if attempt.ended is not None
        ),
        changes=tuple(change for attempt in run.state.attempts for change in attempt.changes),
        data_card=_digest_of_data(run),
        unusable=dict(summary.get("unusable_samples") or {}),
        steady_steps=summary.get("steady_steps"),
        course=(course := learning_curve(run, steps, samples)),
        losses=losses_at_ends(run, course),
    )


def _zero_gradients(run: Run) -> float | None:
    """Return the mean share of zero activation gradients in the recorded steps, including true zeros behind a ReLU."""
    looked_at = [
        merged(record.tensors["activation_gradients"].values())
        for record in run.histograms()
        if not record.overflow and "activation_gradients" in record.tensors
    ]
    return sum(counts.zeros / total(counts) for counts in looked_at) / len(looked_at) if looked_at else None


def _lost_updates(run: Run, config: Mapping[str, Any]) -> float | None:
    """Return the share of updates that changed no half-precision weight, if nothing keeps what rounding takes."""
    if config.get("precision.master_weights") or config.get("precision.rounding", "nearest") != "nearest":
        return None
    count, _ = lost_shares(
        sums
        for record in run.histograms()
        for name, sums in record.lost.items()
        if (weight := record.tensors.get("weights", {}).get(name)) and weight.dtype in ("float16", "bfloat16")
    )
    return None if math.isnan(count) else count


def _read_events(run: Run) -> _Events:
    seen = _Events()
    for number, event in enumerate(run.events(), 1):
        try:
            _take(seen, event)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            raise StorageError(
                f"{run.paths.events}, line {number} is damaged: not a valid {event['event']} event", _RESTORE
            ) from None
    return seen


def _take(seen: _Events, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "evaluation":
        seen.metrics[event["split"]] = _numbers(event["metrics"])
        seen.samples[event["split"]] = event["samples"]
        if event.get("data"):
            seen.evaluated[event["split"]] = event["data"]
    elif kind == "overflow":
        seen.overflows[event["phase"]] = seen.overflows.get(event["phase"], 0) + 1
    elif kind == "start":
        seen.initial_weights, seen.model_code = event.get("initial_weights", ""), event.get("model_code")
    elif kind == "data_order":
        seen.data[event["epoch"]] = (event["order"], event["first_batch"])


def _overflows(learners: Sequence[dict[str, Any]]) -> dict[str, int]:
    overflows: Counter[str] = Counter()
    for learner in learners:
        overflows.update(learner["overflows"])
    return dict(overflows)


def _steady(summary: dict[str, Any]) -> float | None:
    throughput: float | None = summary.get("steady_terms_per_second")
    return throughput if summary.get("steady_steps", 0) >= TIMED_STEPS else None


def _digest_of_data(run: Run) -> str:
    """Return the SHA-256 of ``data.json``, with file names without folders; empty if there is no such file.

    Facts that follow from others are left out, because earlier versions did not write them.
    """
    if not run.paths.data.exists():
        return ""
    card = read_object(run.paths.data)
    if isinstance(files := card.get("files"), dict):
        card["files"] = {part: [PurePath(file).name for file in some] for part, some in files.items()}
    for follows, known in (("input_shape", "image_size"), ("num_outputs", "num_classes")):
        card.pop(follows if known in card else "", None)
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def _summary_of_its_end(run: Run, seen: _Events) -> dict[str, Any]:
    """Return the summary if the last attempt wrote it, else empty: a failed attempt keeps the one before it.

    Without counts, as of sharded watched loops, they are taken from the steps.
    """
    last = run.state.attempts[-1].to_step if run.state.attempts else None
    if run.state.status != "done" and last != run.summary.get("steps"):
        return {}
    return (
        run.summary if "learners" in run.summary or not run.summary else {**_summary_of_steps(run, seen), **run.summary}
    )


def _summary_of_steps(run: Run, seen: _Events) -> dict[str, Any]:
    learners: dict[str, dict[str, Any]] = {}
    steps = 0
    for record in run.steps():
        steps = record.step
        learner = learners.setdefault(
            record.learner, {"updates": 0, "skipped": 0, "overflows": {}, "scale": {"first": record.loss_scale}}
        )
        learner["updates"] = record.updates
        learner["skipped"] += record.skipped
        path, scale = learner["scale"], record.loss_scale
        path |= {"min": min(path.get("min", scale), scale), "max": max(path.get("max", scale), scale), "last": scale}
    if learners:
        next(iter(learners.values()))["overflows"] = seen.overflows
    return {"steps": steps, "learners": learners, "train_seconds": _seconds_of_epochs(run)}


def _seconds_of_epochs(run: Run) -> float:
    by_epoch = {record.epoch: record.seconds for record in run.epochs()}
    return sum(by_epoch.values()) if by_epoch else math.nan


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: _number(value) for name, value in dict(values).items()}


_SHARE = re.compile(r"top\d+|accuracy|exact_match")


def is_share(metric: str) -> bool:
    """Return whether a metric, judged by its name, is a share of samples for which higher is better: ``top1``."""
    return bool(_SHARE.search(metric))


def step_of(metric: str, runs: Iterable[RunMeasures]) -> float:
    """Return the smallest amount by which a metric of an evaluation can change: one sample of its split.

    This is 1 / N for a share of N samples, of the run with the fewest; 0 if the metric is not a share of samples (a
    loss) or the number of samples is not recorded.
    """
    sizes = [run.samples for run in runs if run.samples and run.term == "samples"]
    return 1 / min(sizes) if sizes and is_share(metric) else 0.0
