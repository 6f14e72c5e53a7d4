"""Checks that the arms of a comparison differ in precision alone, and remarks that explain their figures.

All checks use the records and assume nothing: each check that holds becomes a sentence, and each that fails or has no
record becomes an objection.

Remarks rest on records only: if the records do not show a cause, none is named.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from statistics import fmean
from typing import Any

from mptrain.config.config_diff import MACHINE, config_differences, flat_settings, is_below
from mptrain.config.value_checks import show
from mptrain.numerics.formats import FLOAT32
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.study.comparison.arms import pair_by_seed, precision_of
from mptrain.study.comparison.results import Arm, Interval, Objection, RunMeasures
from mptrain.study.comparison.run_measures import TIMED_STEPS
from mptrain.system.words import of_seeds, percent, share

#: Keys and sections in which arms may always differ.
PRECISION = ("precision", "scaler")

#: Keys that change the initial weights, or the data, if they are claimed and differ.
_WEIGHTS_FOLLOW = ("model", "task", "dataset", "weights")
_DATA_FOLLOW = ("dataset", "task", "train.batch_size", "train.one_batch")

_LEARNERS_SCALER = re.compile(r"learners\.[^.]+\.scaler(\.|$)")

#: Results of a check: objections, and sentences about what holds.
Found = Iterator[Objection | str]


#: Further advice where the initial weights of a model of the user's own differ, which may be one module.
_IN_PLACE = (
    "; a module that mptrain.train trains in place begins where the last run ended: give its class, or "
    "update_model=False"
)


def check_fairness(
    arms: Sequence[Arm], reference: Arm, claimed: Sequence[str] = ()
) -> tuple[tuple[Objection, ...], tuple[str, ...]]:
    """Check that the arms of a comparison started, were trained and were evaluated alike, except for precision.

    Configurations, initial weights, order of samples, batches, evaluated samples, machines, versions and lengths are
    compared. The arms include the reference. They may differ in precision, scaler and the dotted keys or sections in
    ``claimed``. Return objections, fatal ones first, and one sentence for each check that holds.
    """
    weights, data = (
        {arm.name: _excuses(arm, reference, claimed, follow) for arm in arms}
        for follow in (_WEIGHTS_FOLLOW, _DATA_FOLLOW)
    )
    own = _IN_PLACE if any(run.model_code is not None for arm in arms for run in arm.runs) else ""
    batches = "first batches of the epochs, including augmentation,"
    findings = [
        *_configurations(arms, reference, claimed),
        *_changed_on_the_way(arms),
        *_copies(arms),
        *_codes(arms, claimed),
        *_digests("descriptions of the data (data.json)", lambda run: _known(run.data_card), arms, reference, data),
        *_samples(arms, reference, data),
        *_digests("initial weights", lambda run: _known(run.initial_weights), arms, reference, weights, own),
        *_digests("orders of the training samples", lambda run: _of_epochs(run, 0), arms, reference, data),
        *_digests(batches, lambda run: _of_epochs(run, 1), arms, reference, data),
        *_digests("evaluated samples", lambda run: run.evaluated, arms, reference, data),
        *_tf32(arms, reference),
        *_machines(arms),
        *_baselines(arms),
        *_lengths(arms, reference),
        *_seeds(arms),
    ]
    objections = [finding for finding in findings if isinstance(finding, Objection)]
    checks = tuple(finding for finding in findings if isinstance(finding, str))
    return tuple(sorted(objections, key=lambda objection: not objection.fatal)), checks


def differing_keys(arm: Arm, reference: Arm) -> dict[str, tuple[Any, Any]]:
    """Return the configuration keys that differ between arm and reference: key to (reference's value, arm's value).

    Left out are the seed and keys that do not change the training.
    """
    return config_differences(reference.runs[0].config, arm.runs[0].config)


def is_claimed(key: str, claimed: Sequence[str]) -> bool:
    """Return whether the arms of a comparison may differ in a dotted configuration key.

    Keys of precision and scaler, also of a single learner's scaler, may always differ.
    """
    return is_below(key, (*PRECISION, *claimed)) or bool(_LEARNERS_SCALER.match(key))


def _configurations(arms: Sequence[Arm], reference: Arm, claimed: Sequence[str]) -> Found:
    fair = True
    changed = {arm.name: _without_machine(differing_keys(arm, reference)) for arm in arms}
    for arm in arms:
        inside: dict[str, tuple[Any, Any]] = {}
        for run in arm.runs[1:]:
            inside |= _without_machine(config_differences(arm.runs[0].config, run.config))
        if inside:
            fair = False
            what = f"runs of {arm.name} differ in more than their seed: {_changes(inside, 'one', 'another')}"
            yield Objection(what, True, "make them separate arms: an arm is one configuration with several seeds")
        across = {key: values for key, values in changed[arm.name].items() if not is_claimed(key, claimed)}
        if across:
            fair = False
            about = f"precision and {', '.join(claimed)}" if claimed else "precision"
            what = f"{arm.name} differs from {reference.name} in more than {about}: "
            what += _changes(across, reference.name, arm.name)
            yield Objection(what, True, "train both with the same values, or name these keys with --by")
    if not fair:
        return
    free = dict.fromkeys(key for changes in changed.values() for key in changes)
    same = "runs of an arm differ only in their seed"
    if more := [key for key in free if not is_claimed(key, ())]:
        yield Objection(f"arms also differ in {', '.join(more)}, as claimed", False)
        yield same
    else:
        keys = ", ".join(sorted({key.split(".")[0] for key in free}))
        yield same + (f", and arms only in keys of {keys}" if keys else ", and arms do not differ")


def _changed_on_the_way(arms: Sequence[Arm]) -> Found:
    """Object to runs that were resumed with a changed configuration; such runs belong to no arm."""
    for arm in arms:
        for changes in dict.fromkeys(run.changes for run in arm.runs if run.changes):
            some = [run for run in arm.runs if run.changes == changes]
            fatal = not all(is_below(change.partition(" was ")[0], MACHINE) for change in changes)
            names = ", ".join(PurePath(run.path).name for run in some)
            seeds = of_seeds(run.seed for run in some)
            what = f"{names} of {arm.name} ({seeds}) changed its configuration on resume: {'; '.join(changes)}"
            yield Objection(what, fatal, "train it again with one configuration from the first step")


def _copies(arms: Sequence[Arm]) -> Found:
    """Object to runs of several seeds that the seed has changed nothing of, as copies of one run: they are one."""
    for arm in arms:
        alike: dict[Any, list[int]] = {}
        for run in arm.runs:
            if run.initial_weights and run.data and run.course and len(run.metrics) > 1:
                same = run.initial_weights, tuple(run.data.items()), tuple(run.metrics.items())
                alike.setdefault(same, []).append(run.seed)
        for seeds in alike.values():
            if len(seeds) > 1:
                what = f"{of_seeds(seeds)} of {arm.name} have equal initial weights, samples and metrics"
                yield Objection(what, True, "the seed changes nothing of these runs: they are one, without a spread")


def _codes(arms: Sequence[Arm], claimed: Sequence[str]) -> Found:
    """Object to runs of models of the user's own whose code differs, or may differ."""
    codes = {run.model_code for arm in arms for run in arm.runs if run.model_code is not None}
    if "" in codes:
        yield Objection(
            "it is not known whether the code of the model is the same in all runs: a class has no readable source",
            False,
        )
    elif len(codes) > 1:
        what = "the source of the model's classes, or its structure, is not the same in all runs"
        yield Objection(what, not any(is_below(key, ("model",)) for key in claimed), "train them again with one model")
    elif codes:
        yield "the source of the model's classes, and its structure, are the same in all runs"


def _without_machine(changes: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {key: values for key, values in changes.items() if not is_below(key, MACHINE)}


def _changes(changes: Mapping[str, tuple[Any, Any]], name: str, other: str) -> str:
    return "; ".join(f"{key} is {show(a)} in {name}, {show(b)} in {other}" for key, (a, b) in changes.items())


def _known(digest: str) -> dict[int, str]:
    return {0: digest} if digest else {}


def _of_epochs(run: RunMeasures, which: int) -> dict[int, str]:
    return {epoch: digests[which] for epoch, digests in run.data.items()}


def _digests(
    what: str,
    digests: Callable[[RunMeasures], Mapping[Any, str]],
    arms: Sequence[Arm],
    reference: Arm,
    excuses: Mapping[str, list[str]],
    more: str = "",
) -> Found:
    """Compare digests, by epoch or split, of pairs of runs with the same seed; ignore those that only one run has."""
    unknown: set[str] = set()
    equal = compared = 0
    for arm in arms:
        bad: list[int] = []
        for run, other in pair_by_seed(arm, reference) if arm is not reference else ():
            own, others = digests(run), digests(other)
            both = own.keys() & others.keys()
            if not both:
                unknown.add(arm.name)
                continue
            compared += 1
            if any(own[epoch] != others[epoch] for epoch in both):
                bad.append(run.seed)
            else:
                equal += 1
        if bad:
            yield _unlike(
                f"the {what} of {arm.name} and {reference.name} differ for {of_seeds(bad)}", excuses[arm.name], more
            )
    if unknown:
        names = ", ".join(sorted(unknown))
        what_of = f"the {what} could not be checked for all runs of {names}: a digest is missing"
        hint = "watched loops and runs that were killed early have none; train the latter again to check"
        yield Objection(what_of, False, hint)
    if equal and equal == compared:
        number = f"the {equal} recorded pairs" if unknown else "all pairs"
        yield f"the {what} have the same digest in {number} of runs with equal seeds"


def _unlike(what: str, excuses: list[str], more: str) -> Objection:
    if excuses:
        hint = "paired runs are then less correlated, and their differences vary more"
        return Objection(f"{what}, because of {', '.join(excuses)}", False, hint)
    hint = f"pairing by seed needs equal ones: train all arms with one version, on the same data{more}"
    return Objection(what, True, hint)


def _excuses(arm: Arm, reference: Arm, claimed: Sequence[str], follow: Sequence[str]) -> list[str]:
    """Return the claimed keys that differ and that change weights or data."""
    return [key for key in differing_keys(arm, reference) if is_below(key, claimed) and is_below(key, follow)]


def _samples(arms: Sequence[Arm], reference: Arm, excuses: Mapping[str, list[str]]) -> Found:
    """Check that finished runs of the same seed have equal numbers of evaluated and of unusable samples per split."""
    compared = 0
    unequal = False
    for arm in arms:
        unlike: dict[str, list[int]] = {}
        for run, other in pair_by_seed(arm, reference) if arm is not reference else ():
            if "done" == run.status == other.status:
                compared += 1
                for what in _unlike_samples(run, other, arm.name, reference.name):
                    unlike.setdefault(what, []).append(run.seed)
        known = excuses[arm.name]
        for what, seeds in unlike.items():
            unequal = True
            follows = f", because of {', '.join(known)}" if known else ""
            yield Objection(f"{what} for {of_seeds(seeds)}{follows}", not known, "evaluate all arms on the same data")
    if compared and not unequal:
        yield "in all finished pairs, both runs evaluated the same number of samples and left out the same number"


def _unlike_samples(run: RunMeasures, other: RunMeasures, name: str, reference: str) -> Iterator[str]:
    if run.split == other.split and 0 < run.samples != other.samples > 0:
        yield f"{name} was evaluated on {run.samples:,} samples of {run.split}, {reference} on {other.samples:,},"
    for split in run.unusable.keys() & other.unusable.keys():
        if run.unusable[split] != other.unusable[split]:
            left_out = f"{run.unusable[split]:,} samples of {split}, {reference} {other.unusable[split]:,},"
            yield f"{name} left out {left_out}"


def _tf32(arms: Sequence[Arm], reference: Arm) -> Found:
    wrong = False
    for arm in arms:
        config = flat_settings(arm.runs[0].config)
        called = precision_of(arm.runs[0]) == "fp32" or arm.name == "fp32"
        if config.get("precision.tf32") is True and (called or arm is reference):
            wrong = True
            role = "is called FP32" if called else "is the reference"
            what = (
                f"{arm.name} {role} and has precision.tf32=true: with TF32, products have 10 mantissa bits, FP32 has 23"
            )
            yield Objection(what, False, "compare with precision=fp32, which turns TF32 off")
    settings = flat_settings(reference.runs[0].config)
    if not wrong and settings.get("precision.compute") == "float32" and not settings.get("precision.emulate"):
        yield f"the reference {reference.name} computes in FP32 with TF32 off"


def _machines(arms: Sequence[Arm]) -> Found:
    differ = False
    for what in ("device", "CPU threads", "mptrain", "torch", "cuda"):
        where: dict[str, list[str]] = {}
        for arm in arms:
            for run in arm.runs:
                facts = {"device": run.device, "CPU threads": str(run.threads or ""), **run.versions}
                if value := facts.get(what):
                    where.setdefault(value, []).append(arm.name)
        if len(where) > 1:
            differ = True
            fact = what if what in ("device", "CPU threads") else f"version of {what}"
            description = "; ".join(f"{value} ({', '.join(dict.fromkeys(names))})" for value, names in where.items())
            hint = "do not compare speeds; results also differ in the last bits for this reason"
            yield Objection(f"not all runs had the same {fact}: {description}", False, hint)
    if not differ:
        yield "all runs had the same device, number of threads, and versions of mptrain and torch"


#: Largest ratio of memory use before the model was built, up to which peak memory is comparable between runs.
_BASELINE = 1.1


def _baselines(arms: Sequence[Arm]) -> Found:
    """Check that all processes used about the same memory before their models were built."""
    before = [run.memory_before for arm in arms for run in arm.runs if run.memory_before]
    if before and max(before) > _BASELINE * min(before):
        what = (
            f"before the model was built, processes used from {readable_bytes(min(before))} to "
            f"{readable_bytes(max(before))}, so peak memory also differs between processes of the same arm"
        )
        yield Objection(
            what, False, "for a meaningful memory ratio, start all runs alone, or all in one sweep or comparison"
        )


def _lengths(arms: Sequence[Arm], reference: Arm) -> Found:
    wanted = {run.steps for run in reference.runs if run.status == "done"}
    for arm in arms:
        steps = {run.steps for run in arm.runs if run.status == "done"}
        if wanted and steps and steps != wanted:
            what = f"{arm.name} ran for {_span(steps)} steps, {reference.name} for {_span(wanted)}"
            yield Objection(what, False, "see the values at equal updates and at equal samples")


def _span(values: set[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _seeds(arms: Sequence[Arm]) -> Found:
    every = {run.seed for arm in arms for run in arm.runs}
    for arm in arms:
        if missing := sorted(every - {run.seed for run in arm.runs}):
            yield Objection(
                f"{arm.name} has no run with {of_seeds(missing)}",
                False,
                "train it: only seeds of both arms are paired",
            )


#: An arm is faster if the lower end of its speed ratio's CI is above this; the inverse is the limit for memory.
FASTER = 1.1

#: Smallest reported share of training time spent waiting for data.
WAITING = 0.2

#: Smallest reported excess over the reference in the share of zero gradients.
FLUSHED = 0.02

#: Smallest reported share of updates that changed no weight.
LOST = 0.01

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
    missing_gains: list[str] = []
    if done and others and _is_light(done[0]) and not _is_light(others[0]):
        if speed is not None and not _low(speed) > FASTER:
            reasons = list(_not_faster(done, others, together)) or [_no_reason(done[0])]
            missing_gains += (f"not faster: {reason}" for reason in reasons)
        if memory is not None and not _high(memory) < 1 / FASTER:
            reasons = list(_not_smaller(done)) or [_no_reason(done[0])]
            missing_gains += (f"not smaller: {reason}" for reason in reasons)
    rounded = (*_flushed(arm.runs, reference.runs), *_lost(arm.runs))
    return (
        *missing_gains,
        *_emulated(arm.runs),
        *_untimed(done),
        *_skipped(arm.runs),
        *rounded,
        *_floor(arm.runs),
        *_ends(arm.runs),
    )


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


def _emulated(runs: Sequence[RunMeasures]) -> Iterator[str]:
    if rule := flat_settings(runs[0].config).get("precision.emulate"):
        yield f"operands in {rule} are emulated: its speed and memory are not those of hardware with such a format"


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
    remark = f"{share(fmean(run.skip_rate for run in runs))} of the updates were skipped"
    if set(phases) == {"calibrating"}:
        remark += ", all of them during calibration of the initial loss scale"
    elif phases:
        remark += f" ({', '.join(f'{count:,} {phase}' for phase, count in phases.items())})"
    yield remark


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


def _lost(runs: Sequence[RunMeasures]) -> Iterator[str]:
    lost = [run.lost_updates for run in runs if run.lost_updates is not None]
    if lost and fmean(lost) >= LOST:
        yield (
            f"{percent(fmean(lost))} of the updates in the steps with histograms changed no weight: they are smaller "
            "than half the spacing of numbers in the format of the weights, of which there is no FP32 copy"
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
    known = [measured for run in runs if not math.isnan(measured := value(run))]
    return fmean(known) if known else math.nan
