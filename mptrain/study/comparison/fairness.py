"""Checks that the arms of a comparison differ only in precision and in the settings that the user claims.

All checks use the records and assume nothing: each check that holds becomes a sentence, and each that fails or has no
record becomes an objection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from mptrain.config.config_diff import MACHINE, config_differences, flat_settings, is_below
from mptrain.config.value_checks import show
from mptrain.numerics.words import of_seeds
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.study.comparison.arms import pair_by_seed, precision_of
from mptrain.study.comparison.results import Arm, Objection, RunMeasures

#: Keys and sections in which arms may always differ.
PRECISION = ("precision", "scaler")

#: Keys that change the initial weights, or the data, if they are claimed and differ.
_WEIGHTS_FOLLOW = ("model", "task", "dataset", "weights")
_DATA_FOLLOW = ("dataset", "task", "train.batch_size", "train.one_batch")

_LEARNERS_SCALER = re.compile(r"learners\.[^.]+\.scaler(\.|$)")

#: Results of a check: objections, and sentences about what holds.
Found = Iterator[Objection | str]


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
    batches = "first batches of the epochs, including augmentation,"
    found = [
        *_configurations(arms, reference, claimed),
        *_changed_on_the_way(arms),
        *_digests("descriptions of the data (data.json)", lambda run: _known(run.data_card), arms, reference, data),
        *_samples(arms, reference, data),
        *_digests("initial weights", lambda run: _known(run.initial_weights), arms, reference, weights),
        *_digests("orders of the training samples", lambda run: _of_epochs(run, 0), arms, reference, data),
        *_digests(batches, lambda run: _of_epochs(run, 1), arms, reference, data),
        *_digests("evaluated samples", lambda run: run.evaluated, arms, reference, data),
        *_tf32(arms, reference),
        *_machines(arms),
        *_baselines(arms),
        *_lengths(arms, reference),
        *_seeds(arms),
    ]
    objections = [one for one in found if isinstance(one, Objection)]
    checks = tuple(one for one in found if isinstance(one, str))
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


def _without_machine(changes: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {key: values for key, values in changes.items() if not is_below(key, MACHINE)}


def _changes(changes: Mapping[str, tuple[Any, Any]], one: str, other: str) -> str:
    return "; ".join(f"{key} is {show(a)} in {one}, {show(b)} in {other}" for key, (a, b) in changes.items())


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
                f"the {what} of {arm.name} and {reference.name} differ for {of_seeds(bad)}", excuses[arm.name]
            )
    if unknown:
        names = ", ".join(sorted(unknown))
        what_of = f"the {what} could not be checked for all runs of {names}: a digest is missing"
        hint = "watched loops and runs that were killed early have none; train the latter again to check"
        yield Objection(what_of, False, hint)
    if equal and equal == compared:
        number = f"the {equal} recorded pairs" if unknown else "all pairs"
        yield f"the {what} have the same digest in {number} of runs with equal seeds"


def _unlike(said: str, excuses: list[str]) -> Objection:
    if excuses:
        hint = "paired runs are then less correlated, and their differences vary more"
        return Objection(f"{said}, because of {', '.join(excuses)}", False, hint)
    return Objection(said, True, "pairing by seed needs equal ones: train all arms with one version, on the same data")


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
    if not wrong and flat_settings(reference.runs[0].config).get("precision.compute") == "float32":
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
            said = "; ".join(f"{value} ({', '.join(dict.fromkeys(names))})" for value, names in where.items())
            hint = "do not compare speeds; results also differ in the last bits for this reason"
            yield Objection(f"not all runs had the same {fact}: {said}", False, hint)
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
            said = f"{arm.name} ran for {_span(steps)} steps, {reference.name} for {_span(wanted)}"
            yield Objection(said, False, "see the values at equal updates and at equal samples")


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
