"""Ranking of a sweep's settings by validation metrics; names the best and worst if their 95 % CIs are disjoint.

Settings are chosen by validation data, because the best of many figures on the data that it is chosen by is too good.
The figure of the chosen one on test data stands beside it.

A sweep trains one run for each combination of values of its keys. A setting is a combination without the seed. The 95 %
confidence interval (CI) of a setting with one run is over samples, as the run recorded it. That of a setting with
several seeds is over seeds.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mptrain.config.config_diff import short_label
from mptrain.runlog.run_state import lower_is_better
from mptrain.runlog.sweeps import Sweep, SweepJob, interval_of, overrides_of, varied_keys
from mptrain.system.errors import UsageError
from mptrain.system.words import listed

SEED: Final = "seed"

#: Largest number of settings that one sentence names.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class RankedSetting:
    """Final metric of a setting (one combination of a sweep's values, without the seed), with its confidence interval.

    Attributes:
        name: Label that distinguishes the setting from the others.
        value: The metric, averaged over seeds.
        low: Lower end of the 95 % confidence interval (CI), and ``high`` its upper end; NaN if unknown.
        seeds: Number of runs, one for each seed.
        over_seeds: Whether the 95 % CI is over seeds; otherwise it is over samples.
    """

    name: str
    value: float
    low: float
    high: float
    seeds: int = 1
    over_seeds: bool = False

    @property
    def has_interval(self) -> bool:
        """True if the 95 % confidence interval of the setting's metric is known."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def overlaps(self, other: RankedSetting) -> bool:
        """Return whether both settings have a 95 % confidence interval and the two intervals overlap."""
        both = self.has_interval and other.has_interval
        return both and self.low <= other.high and other.low <= self.high

    def widened(self, factor: float) -> RankedSetting:
        """Return a copy whose 95 % confidence interval reaches further from the value on each side, by a factor."""
        low, high = (self.value + factor * (end - self.value) for end in (self.low, self.high))
        return replace(self, low=low, high=high)


def selected(sweep: Sweep, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``summary.json`` of a job as settings of its sweep are chosen: its metric is that on validation data.

    ``test_metric`` is the figure on test data. The sweep may name another metric than the task's (``--objective``).
    Without validation data, and of a comparison, which is planned and chooses nothing, the summary is as it is.
    """
    objective = sweep.plan.get("objective") if sweep.kind == "sweep" else None
    name = str(objective or summary.get("metric_name"))
    on_val, on_test = summary.get("val") or {}, summary.get("test") or {}
    split, figures = ("val", on_val) if on_val else ("test", on_test)
    if sweep.kind != "sweep" or not summary or (name not in on_val and not objective):
        return dict(summary)
    higher = summary.get("higher_is_better")
    if name != summary.get("metric_name"):
        with contextlib.suppress(UsageError):
            higher = not lower_is_better(name)
    return {
        **summary,
        "metric": figures.get(name),
        "metric_name": name,
        "metric_split": split,
        "higher_is_better": higher,
        "intervals": summary.get("val_intervals" if on_val else "intervals") or {},
        **({"test_metric": on_test[name]} if on_val and name in on_test else {}),
    }


def rank(name: str, summaries: Sequence[dict[str, Any]]) -> RankedSetting:
    """Return the final metric of a setting of a sweep: the mean over its runs, with a 95 % confidence interval.

    With several different values, the interval is over seeds; else it is over samples, as recorded. There is at
    least one summary (``summary.json``), and all have a finite metric.
    """
    values = [float(summary["metric"]) for summary in summaries]
    if len(set(values)) > 1:
        from mptrain.study.comparison.statistics import mean_interval  # scipy takes a second to import

        interval = mean_interval(values)
        return RankedSetting(name, interval.mean, interval.low, interval.high, len(values), over_seeds=True)
    # One run, or seeds with exactly equal metrics, from which no spread can be estimated.
    ends = [interval for interval in map(interval_of, summaries) if interval]
    low, high = (statistics.fmean(side) for side in zip(*ends, strict=True)) if ends else (math.nan, math.nan)
    return RankedSetting(name, values[0], low, high, len(values))


def ranking(ranked: Sequence[RankedSetting], *, higher_is_better: bool | None, number: Callable[[float], str]) -> str:
    """Describe the best and the worst setting of a sweep in one sentence, without the metric's name.

    A best setting is named only if its 95 % CI does not overlap that of the worst, together with the settings whose CIs
    overlap its own. With more than five settings the CIs are widened, because best and worst are selected among many.
    There are at least two settings, not all with the same value. ``higher_is_better`` is None if unknown. ``number``
    formats a value of the metric.
    """
    factor = _for_a_choice_among(len(ranked))
    ranked = [setting.widened(factor) for setting in ranked]
    low, high = (pick(ranked, key=lambda setting: setting.value) for pick in (min, max))
    wider = f"(widened x{factor:.2f} for {len(ranked)} settings) " if factor > 1 else ""
    span = f"{number(low.value)} at {_named(low, ranked)} to {number(high.value)} at {_named(high, ranked)}"
    if low.overlaps(high):
        few = any(setting.over_seeds and setting.seeds < 3 for setting in (low, high))
        add = "; two seeds are too few to tell settings apart: add seeds" if few else ""
        return f"{span}, within noise of each other: their 95 % CIs {_of_what((low, high))}{wider}overlap{add}"
    doubt = "" if low.has_interval and high.has_interval else "; without 95 % CIs, this may be noise"
    if higher_is_better is None:
        return f"from {span}{doubt}"
    best, worst = (high, low) if higher_is_better else (low, high)
    near = sorted(
        (setting for setting in ranked if setting is not best and setting.overlaps(best)),
        key=lambda setting: abs(setting.value - best.value),
    )
    beside = ""
    if near:
        names = listed([setting.name for setting in near], _MOST_NAMED)
        beside = f", within noise of {names} (95 % CIs {_of_what((best, *near))}{wider}overlap)"
    lowest = _named(worst, ranked)
    return f"best {number(best.value)} at {best.name}{beside}, worst {number(worst.value)} at {lowest}{doubt}"


def _chosen(
    settings: Mapping[str, Sequence[Mapping[str, Any]]],
    ranked: Sequence[RankedSetting],
    number: Callable[[float], str],
    *,
    higher_is_better: bool | None,
) -> str:
    """Return the test figure of the best setting as a sentence; empty if there is none, or no direction."""
    summaries = [summary for some in settings.values() for summary in some]
    if {summary.get("metric_split") for summary in summaries} == {"test"}:
        return " There is no validation data: what is best here was chosen by test data, and looks better than it is."
    if higher_is_better is None:
        return ""
    best = (max if higher_is_better else min)(ranked, key=lambda setting: setting.value)
    on_test = [summary.get("test_metric") for summary in settings[best.name]]
    known = [value for value in on_test if value is not None]
    return f" On test data, {best.name} has {number(statistics.fmean(known))}." if known else ""


def _named(setting: RankedSetting, ranked: Sequence[RankedSetting]) -> str:
    """Return the names of all settings with the value of one of them."""
    return listed([other.name for other in ranked if other.value == setting.value], _MOST_NAMED)


def _for_a_choice_among(count: int) -> float:
    """Return the factor for 95 % CIs with which the best and the worst of several settings differ at 95 % confidence.

    The largest difference between several equal settings follows the studentised range distribution (Tukey). For up to
    five settings, two 95 % CIs that just do not overlap are far enough apart.
    """
    if count <= 5:
        return 1.0
    from scipy.stats import norm, studentized_range  # scipy takes a second to import

    return max(1.0, float(studentized_range.ppf(0.95, count, math.inf) / (2 * norm.ppf(0.975))))


def sweep_lead(
    jobs: Sequence[SweepJob], summaries: Mapping[int, Mapping[str, Any]], number: Callable[[float], str]
) -> str:
    """Summarise the metrics of a sweep in a few sentences: the best and the worst setting, as far as 95 % CIs tell.

    ``summaries`` has the summaries of runs as `selected`, by job number, and ``number`` formats a value of the metric.
    """
    finished = {job.number: dict(summaries.get(job.number, {})) for job in jobs if job.status == "done"}
    valued = {at: summary for at, summary in finished.items() if _is_finite(summary.get("metric"))}
    if not valued:
        for own in finished.values():
            if own and (name := own.get("metric_name")) and "val" in own and "metric" in own and own["metric"] is None:
                on, there = ("validation", own["val"]) if own["val"] else ("test", own.get("test") or ())
                return f"No point has {name} on {on} data; recorded: {', '.join(there) or 'none'}."
        return "No point has a final metric yet."
    names = list(dict.fromkeys(map(metric_in_words, valued.values())))
    if len(names) > 1:
        return f"Points have {listed(names, _MOST_NAMED)}: figures of different metrics or data are not ranked."
    name = names[0]
    keys = [key for key in varied_keys(jobs) if key != SEED]
    settings: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        if job.number in valued:
            words = overrides_of(job)
            varied = {key: words[key] for key in keys if key in words}
            setting = short_label(varied, whole_keys=True) or (job.label if keys else "")
            settings.setdefault(setting, []).append(valued[job.number])
    values = {summary["metric"] for summary in valued.values()}
    if len(values) == 1:
        everywhere = len(valued) == len(jobs)
        where = (
            "at every point" if everywhere else f"at the {len(valued):,} finished point{'s' if len(valued) > 1 else ''}"
        )
        return f"{name}: {number(values.pop())} {where}."
    ranked = [rank(setting, some) for setting, some in settings.items()]
    if len(ranked) == 1:
        single, ends = ranked[0], (min(values), max(values))
        reach = f"95 % CI {number(single.low)} to {number(single.high)}"
        return (
            f"{name}: mean {number(single.value)} over {single.seeds} seeds, {reach}; "
            f"from {number(ends[0])} to {number(ends[1])}."
        )
    lost = sum("metric" in summary for summary in finished.values()) - len(valued)
    more = f" {lost:,} more point{'s' if lost > 1 else ''} ended with a non-finite metric." if lost else ""
    directions = {summary.get("higher_is_better") for summary in valued.values()}
    direction = directions.pop() if len(directions) == 1 else None
    chosen = _chosen(settings, ranked, number, higher_is_better=direction)
    return f"{name}: {ranking(ranked, higher_is_better=direction, number=number)}.{chosen}{more}"


def metric_in_words(summary: Mapping[str, Any]) -> str:
    """Return the name of a run's final metric with the evaluated split, as text: ``top1 (test)``."""
    return f"{summary.get('metric_name') or 'metric'} ({summary.get('metric_split', 'test')})"


def _of_what(ranked: Iterable[RankedSetting]) -> str:
    """Return over what the CIs of settings are taken, seeds or test samples, as a phrase; empty if this differs."""
    several = {setting.over_seeds for setting in ranked}
    if len(several) > 1:
        return ""
    return "over seeds " if several == {True} else "over samples "


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
