"""Remarks on an arm of a comparison, such as the reasons why FP16 runs are not faster or smaller than FP32 runs.

Remarks rest on records only: if the records do not show a cause, none is named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from mptrain.config.config_diff import flat_settings
from mptrain.numerics.formats import FLOAT32
from mptrain.numerics.words import of_seeds, percent, share
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.study.comparison.results import Arm, Interval, RunMeasures
from mptrain.study.comparison.run_measures import TIMED_STEPS

#: An arm is faster if the lower end of its speed ratio's CI is above this; the inverse is the limit for memory.
FASTER = 1.1

#: Smallest reported share of training time spent waiting for data.
WAITING = 0.2

#: Smallest reported excess over the reference in the share of zero gradients.
FLUSHED = 0.02

#: Step time in seconds below which a CUDA device mostly launches kernels.
SHORT_STEP = 0.010

#: Smallest reported shares of unaligned weights, and of memory: in use before the model was built, or of FP32 weights.
UNALIGNED, BEFORE = 0.1, 0.1

#: Fewest steps for a meaningful mean step time.
_STEPS = 50


def remarks(
    arm: Arm, reference: Arm, speed: Interval | None, memory: Interval | None, together: int = 1
) -> tuple[str, ...]:
    """Return remarks on an arm of a comparison, one sentence each.

    They explain missing gains in speed and memory, and report skipped updates, underflow and unfinished runs. Speed and
    memory are explained only if a gain is expected: the arm computes in half precision or TF32, and the reference does
    neither. ``speed`` and ``memory`` are ratios of the arm to the reference; None if unknown. ``together`` is the
    largest number of compared runs that shared one machine at the same time.
    """
    done = [run for run in arm.runs if run.status == "done"]
    others = [run for run in reference.runs if run.status == "done"]
    found: list[str] = []
    if done and others and _is_light(done[0]) and not _is_light(others[0]):
        if speed is not None and not _low(speed) > FASTER:
            reasons = list(_not_faster(done, others, together)) or [_no_reason(done[0])]
            found += (f"not faster: {reason}" for reason in reasons)
        if memory is not None and not _high(memory) < 1 / FASTER:
            reasons = list(_not_smaller(done)) or [_no_reason(done[0])]
            found += (f"not smaller: {reason}" for reason in reasons)
    flushed = _flushed(arm.runs, reference.runs)
    return (*found, *_untimed(done), *_skipped(arm.runs), *flushed, *_floor(arm.runs), *_ends(arm.runs))


def max_concurrent_runs(runs: Iterable[RunMeasures]) -> int:
    """Return the largest number of runs on one host at the same time, which makes their speeds unreliable; at least 1.

    Attempts that were killed are not counted, because their end is unknown.
    """
    changes: dict[str, list[tuple[str, int]]] = {}
    for run in runs:
        for host, start, end in run.attempts:
            changes.setdefault(host, []).extend(((start, 1), (end, -1)))
    most = 1
    for times in changes.values():
        running = 0
        for _, change in sorted(times):  # at equal times, an end (-1) sorts before a start (+1)
            running += change
            most = max(most, running)
    return most


def _is_half(run: RunMeasures) -> bool:
    return flat_settings(run.config).get("precision.compute") in ("float16", "bfloat16")


def _is_light(run: RunMeasures) -> bool:
    """Return whether matrix products have operands with fewer bits than FP32: half precision or TF32."""
    return _is_half(run) or flat_settings(run.config).get("precision.tf32") is True


def _no_reason(run: RunMeasures) -> str:
    support = run.facts.get("support")
    return "the records show no cause" + (f"; support of the device: {support}" if support else "")


def _low(interval: Interval) -> float:
    return interval.mean if math.isnan(interval.low) else interval.low


def _high(interval: Interval) -> float:
    return interval.mean if math.isnan(interval.high) else interval.high


def _not_faster(runs: Sequence[RunMeasures], others: Sequence[RunMeasures], together: int) -> Iterator[str]:
    first = runs[0]
    config, cuda, half = flat_settings(first.config), first.device.startswith("cuda"), _is_half(first)
    support = str(first.facts.get("support", ""))
    if first.facts.get("upcast") or " no " in support:
        yield support or "this CPU has no half-precision arithmetic; products compute in FP32"
    waits, before = _mean(runs, lambda run: run.data_wait), _mean(others, lambda run: run.data_wait)
    if waits > WAITING:
        than = "" if math.isnan(before) else f" (the reference for {percent(before)})"
        yield f"it waited for data for {percent(waits)} of the training time{than}"
    step = _mean(runs, lambda run: run.train_seconds / run.steps if run.steps >= _STEPS else math.nan)
    if cuda and step < SHORT_STEP:
        yield (
            f"a step takes {1e3 * step:.1f} ms{_size(first)}: in such a short step, kernel launches and casts take "
            "longer than the arithmetic"
        )
    if cuda and half and first.facts.get("unaligned", 0.0) > UNALIGNED:
        yield (
            f"{percent(first.facts['unaligned'])} of the weights are in matrices or kernels with a dimension that is "
            "not a multiple of 8, for which tensor cores are slow or unused"
        )
    if cuda and half and first.facts.get("convolutions") and config.get("train.channels_last") is False:
        yield "it has convolutions and train.channels_last=false: tensor cores are faster with channels last"
    if together > 1:
        yield f"up to {together} runs ran on the machine at the same time, so speeds are those of a busy machine"


def _not_smaller(runs: Sequence[RunMeasures]) -> Iterator[str]:
    first = runs[0]
    config = flat_settings(first.config)
    if first.facts.get("upcast"):
        yield f"{first.facts.get('support')}: the FP32 copies of their operands take memory that a GPU does not need"
    known = [run for run in runs if run.peak_memory and run.memory_before]
    if known:
        before, peak = fmean(run.memory_before for run in known), fmean(run.peak_memory for run in known)
        if before / peak > BEFORE:
            kind = ", which is the process's resident set," if first.device.startswith("cpu") else ""
            yield f"{percent(before / peak)} of the peak{kind} was in use before the model was built, in any precision"
    parameters = first.facts.get("parameters")
    count = f" ({readable_bytes(4 * parameters)} for {parameters:,} parameters)" if parameters else ""
    if parameters and first.peak_memory and 4 * parameters < BEFORE * first.peak_memory:
        return  # too small to explain it
    if config.get("precision.master_weights") is True:
        yield f"FP32 master weights{count} are stored in addition to the half-precision weights"
    elif config.get("precision.autocast") is True:
        yield f"under autocast, weights, gradients and optimizer state stay FP32{count}: only activations are smaller"


def _untimed(runs: Sequence[RunMeasures]) -> Iterator[str]:
    short = [run.steady_steps for run in runs if run.steady_steps is not None and run.steady_steps < TIMED_STEPS]
    if short:
        yield (
            f"{len(short)} of {len(runs)} runs were too short to time: at most {max(short)} steps after warm-up, and "
            f"{TIMED_STEPS} are needed"
        )


def _skipped(runs: Sequence[RunMeasures]) -> Iterator[str]:
    skipped = sum(run.skipped for run in runs)
    if not skipped:
        return
    phases: Counter[str] = Counter()
    for run in runs:
        phases.update(run.overflows)
    said = f"{share(fmean(run.skip_rate for run in runs))} of the updates were skipped"
    if set(phases) == {"calibrating"}:
        said += ", all of them during calibration of the initial loss scale"
    elif phases:
        said += f" ({', '.join(f'{count:,} {phase}' for phase, count in phases.items())})"
    yield said


def _flushed(runs: Sequence[RunMeasures], others: Sequence[RunMeasures]) -> Iterator[str]:
    """Yield a remark if more activation gradients are zero than in the reference: the excess underflowed.

    Both arms must have histograms (``diagnostics=histograms``).
    """
    here = [run.zero_gradients for run in runs if run.zero_gradients is not None]
    there = [run.zero_gradients for run in others if run.zero_gradients is not None]
    if here and there and fmean(here) - fmean(there) > FLUSHED:
        yield (
            f"{percent(fmean(here))} of the activation gradients were zero, against {percent(fmean(there))} in the "
            "reference: the difference is underflow at this loss scale"
        )


def _floor(runs: Sequence[RunMeasures]) -> Iterator[str]:
    config = flat_settings(runs[0].config)
    floor = config.get("scaler.min_scale")
    if floor is None or any(key.startswith("learners.") and ".scaler" in key for key in config):
        return
    stuck = [
        run for run in runs if run.scale and run.scale["last"] <= floor * (1 + FLOAT32.epsilon) < run.scale["first"]
    ]
    if stuck:
        yield f"the loss scale ended at its minimum of {floor:g} in {len(stuck)} of {len(runs)} runs"


def _ends(runs: Sequence[RunMeasures]) -> Iterator[str]:
    ways: dict[str, list[int]] = {}
    for run in runs:
        if run.status != "done":
            ways.setdefault(run.reason or f"it is {run.status}, or was killed", []).append(run.seed)
    for reason, stopped in ways.items():
        yield f"{of_seeds(stopped)} did not finish: {reason}"


def _size(run: RunMeasures) -> str:
    parameters = run.facts.get("parameters")
    return f" ({parameters:,} parameters)" if parameters else ""


def _mean(runs: Sequence[RunMeasures], value: Callable[[RunMeasures], float]) -> float:
    """Return the mean over the runs with a recorded value, or NaN, for which every comparison is false."""
    known = [found for run in runs if not math.isnan(found := value(run))]
    return fmean(known) if known else math.nan
