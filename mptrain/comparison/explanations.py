"""Says why an arm is not faster or not smaller than the reference, and what else about it deserves a sentence.

Only from what is on record: where the records do not show a cause, none is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from mptrain.comparison.configurations import flat_settings
from mptrain.comparison.results import Arm, Interval, RunMeasures
from mptrain.comparison.run_measures import TIMED_STEPS
from mptrain.comparison.verdict import percent
from mptrain.runlog.atomic_files import readable_bytes

#: A speed ratio whose interval reaches down to this is not called faster; its inverse bounds memory in the same way.
FASTER = 1.1

#: Share of training time spent waiting for data that is worth a sentence.
WAITING = 0.2

#: Share of the gradients by which more of them are zero than in the reference that is worth a sentence.
FLUSHED = 0.02

#: Seconds of a step below which a CUDA device is mostly launching kernels.
SHORT_STEP = 0.010

#: Shares of unaligned weights, and of memory that was in use before, that are worth a sentence.
UNALIGNED, BEFORE = 0.1, 0.1

#: Steps from which the mean time of a step says something about a step.
_STEPS = 50


def remarks(
    arm: Arm, reference: Arm, speed: Interval | None, memory: Interval | None, together: int = 1
) -> tuple[str, ...]:
    """Sentences about an arm.

    Speed and memory are explained only where a gain is to be expected: the arm computes in half precision or TF32, and the
    reference does neither.

    Args:
        arm: Its runs.
        reference: The reference's.
        speed: Ratio of throughput to the reference's; None where it is not known.
        memory: Ratio of peak memory to the reference's; None where it is not known.
        together: How many of all compared runs worked on one machine at the same time.
    """
    done = [run for run in arm.runs if run.status == "done"]
    others = [run for run in reference.runs if run.status == "done"]
    found: list[str] = []
    if done and others and _is_light(done[0]) and not _is_light(others[0]):
        if speed is not None and not _low(speed) > FASTER:
            reasons = list(_not_faster(done, others, together)) or [_no_reason(done[0])]
            found += (f"not faster: {reason}" for reason in reasons)
        if memory is not None and not _high(memory) < 1 / FASTER:
            found += (f"not smaller: {reason}" for reason in _not_smaller(done))
    flushed = _flushed(arm.runs, reference.runs)
    return (*found, *_untimed(done), *_skipped(arm.runs), *flushed, *_floor(arm.runs), *_ends(arm.runs))


def max_concurrent_runs(runs: Iterable[RunMeasures]) -> int:
    """Return how many runs worked on the same host at the same time, at the most; as far as attempts ended in order."""
    changes: dict[str, list[tuple[str, int]]] = {}
    for run in runs:
        for host, start, end in run.attempts:
            changes.setdefault(host, []).extend(((start, 1), (end, -1)))
    most = 1
    for times in changes.values():
        running = 0
        for _, change in sorted(times):  # an end sorts before a start of the same moment
            running += change
            most = max(most, running)
    return most


def _is_half(run: RunMeasures) -> bool:
    return flat_settings(run.config).get("precision.compute") in ("float16", "bfloat16")


def _is_light(run: RunMeasures) -> bool:
    """Return whether its products have shorter operands than those of FP32."""
    return _is_half(run) or flat_settings(run.config).get("precision.tf32") is True


def _no_reason(run: RunMeasures) -> str:
    support = run.facts.get("support")
    return "nothing on record says why" + (f"; the device says: {support}" if support else "")


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
            f"a step takes {1e3 * step:.1f} ms{_size(first)}: launching kernels and casting weigh more than arithmetic in so "
            "short a one"
        )
    if cuda and half and first.facts.get("unaligned", 0.0) > UNALIGNED:
        yield (
            f"{percent(first.facts['unaligned'])} of the weights are in matrices or kernels with a dimension that is not a "
            "multiple of 8, which tensor cores take slowly or not at all"
        )
    if cuda and half and first.facts.get("convolutions") and config.get("train.channels_last") is False:
        yield "it has convolutions and train.channels_last=false: tensor cores want the channels last"
    if together > 1:
        yield f"up to {together} runs worked on the machine at the same time, so speeds are those of a busy machine"


def _not_smaller(runs: Sequence[RunMeasures]) -> Iterator[str]:
    first = runs[0]
    config = flat_settings(first.config)
    known = [run for run in runs if run.peak_memory and run.memory_before]
    if known:
        before, peak = fmean(run.memory_before for run in known), fmean(run.peak_memory for run in known)
        if before / peak > BEFORE:
            kind = ", which is the process's resident set," if first.device.startswith("cpu") else ""
            yield f"{percent(before / peak)} of the peak{kind} were in use before the model was built, whatever the precision"
    parameters = first.facts.get("parameters")
    count = f" ({readable_bytes(4 * parameters)} for {parameters:,} parameters)" if parameters else ""
    if config.get("precision.master_weights") is True:
        yield f"FP32 master weights{count} are kept besides those in half precision"
    elif config.get("precision.autocast") is True:
        yield f"under autocast weights, gradients and optimizer state stay FP32{count}: only activations are half as large"


def _untimed(runs: Sequence[RunMeasures]) -> Iterator[str]:
    short = [run.steady_steps for run in runs if run.steady_steps is not None and run.steady_steps < TIMED_STEPS]
    if short:
        yield (
            f"{len(short)} of {len(runs)} runs were too short to time: {max(short)} steps after warm-up at most, and it "
            f"takes {TIMED_STEPS}"
        )


def _skipped(runs: Sequence[RunMeasures]) -> Iterator[str]:
    skipped = sum(run.skipped for run in runs)
    if not skipped:
        return
    phases: dict[str, int] = {}
    for run in runs:
        for phase, count in run.overflows.items():
            phases[phase] = phases.get(phase, 0) + count
    share = 100 * fmean(run.skip_rate for run in runs)
    said = f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"
    said += " of the updates were skipped"
    if set(phases) == {"calibrating"}:
        said += ", all of them while the first loss scales were tried"
    elif phases:
        said += f" ({', '.join(f'{count:,} {phase}' for phase, count in phases.items())})"
    yield said


def _flushed(runs: Sequence[RunMeasures], others: Sequence[RunMeasures]) -> Iterator[str]:
    """Yield how much of the gradients was rounded to zero, where steps of both were looked at (``diagnostics=histograms``)."""
    here = [run.zero_gradients for run in runs if run.zero_gradients is not None]
    there = [run.zero_gradients for run in others if run.zero_gradients is not None]
    if here and there and fmean(here) - fmean(there) > FLUSHED:
        yield (
            f"{percent(fmean(here))} of the activation gradients were zero, and {percent(fmean(there))} of the reference's: "
            "the others were too small for the format at this loss scale"
        )


def _floor(runs: Sequence[RunMeasures]) -> Iterator[str]:
    """Yield where the loss scale fell to the lowest that the configuration allows, and stayed there."""
    config = flat_settings(runs[0].config)
    floor = config.get("scaler.min_scale")
    if floor is None or any(key.startswith("learners.") and ".scaler" in key for key in config):
        return
    stuck = [run for run in runs if run.scale and run.scale["last"] <= floor < run.scale["first"]]
    if stuck:
        yield f"the loss scale ended at its floor of {floor:g} in {len(stuck)} of {len(runs)} runs"


def _ends(runs: Sequence[RunMeasures]) -> Iterator[str]:
    """Yield how runs ended that did not end in order, one sentence for each way."""
    ways: dict[str, list[int]] = {}
    for run in runs:
        if run.status != "done":
            ways.setdefault(run.reason or f"it is {run.status}, or was killed", []).append(run.seed)
    for reason, seeds in ways.items():
        yield f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))} did not end in order: {reason}"


def _size(run: RunMeasures) -> str:
    parameters = run.facts.get("parameters")
    return f" ({parameters:,} parameters)" if parameters else ""


def _mean(runs: Sequence[RunMeasures], value: Callable[[RunMeasures], float]) -> float:
    """Mean of what is on record; NaN where nothing is, which no comparison holds for."""
    known = [found for run in runs if not math.isnan(found := value(run))]
    return fmean(known) if known else math.nan
