"""Grouping of runs into the arms of a comparison, names of arms, pairs of runs by seed, and choice of the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from mptrain.config.config_diff import MACHINE, NOT_COMPARED, config_differences, flat_settings, is_below
from mptrain.config.value_checks import show
from mptrain.study.comparison.results import Arm, RunMeasures
from mptrain.system.errors import UsageError, suggest


def group_into_arms(
    runs: Sequence[RunMeasures], names: Sequence[str] | None = None, paths: Sequence[str] | None = None
) -> tuple[Arm, ...]:
    """Group runs into the arms of a comparison, in the order of their first runs, with the runs of each by seed.

    ``names`` has the arm of each run. If None, runs whose configurations differ only in seed and machine form one arm;
    runs with the same seed on different machines form separate arms. ``paths`` are the paths under which the user
    named the runs. If each arm has a path of its own, the path names it; else the settings in which the arms differ do.
    Raise UsageError if two runs of an arm have the same seed.
    """
    if names is not None:
        members: dict[str, list[RunMeasures]] = {}
        for name, run in zip(names, runs, strict=True):
            members.setdefault(name, []).append(run)
    else:
        kinds: list[list[int]] = []
        for at, run in enumerate(runs):
            kind = next((kind for kind in kinds if _belongs(run, [runs[index] for index in kind])), None)
            kinds.append([at]) if kind is None else kind.append(at)
        called = _typed_names([{paths[at] for at in kind} for kind in kinds]) if paths else []
        called = called or _names([runs[kind[0]] for kind in kinds])
        members = {name: [runs[at] for at in kind] for name, kind in zip(called, kinds, strict=True)}
    return tuple(Arm(name, _by_seed(name, some)) for name, some in members.items())


def pair_by_seed(arm: Arm, reference: Arm) -> list[tuple[RunMeasures, RunMeasures]]:
    """Return the runs of two arms in pairs with the same seed: (run of the arm, run of the reference), by seed."""
    others = {run.seed: run for run in reference.runs}
    return [(run, others[run.seed]) for run in arm.runs if run.seed in others]


def choose_reference(arms: Sequence[Arm], name: str | None = None) -> Arm:
    """Return the reference of a comparison: the arm of this name, or the only one in FP32, else the first.

    Raise UsageError if no arm has that name.
    """
    if name is None:
        full = [arm for arm in arms if precision_of(arm.runs[0]) == "fp32"]
        return full[0] if len(full) == 1 else arms[0]
    for arm in arms:
        if arm.name == name:
            return arm
    hint = suggest(name, [arm.name for arm in arms], f"the arms are {', '.join(arm.name for arm in arms)}")
    raise UsageError(f"no arm is called {name!r}", hint)


def precision_of(run: RunMeasures) -> str:
    """Return the name of a run's precision mode as on the command line (``fp32``); empty if it is not recorded."""
    return run.chosen.get("precision") or str(flat_settings(run.config).get("precision.name", ""))


def _by_seed(name: str, runs: Iterable[RunMeasures]) -> tuple[RunMeasures, ...]:
    by_seed: dict[int, RunMeasures] = {}
    for run in runs:
        if other := by_seed.get(run.seed):
            raise UsageError(
                f"two runs{f' of {name}' if name else ' of an arm'} have seed {run.seed}: {other.path} and {run.path}",
                "leave one of them out: an arm has one run per seed",
            )
        by_seed[run.seed] = run
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def _belongs(run: RunMeasures, arm: Sequence[RunMeasures]) -> bool:
    """Return whether a run has the configuration of an arm's runs, apart from machine, and a seed of its own."""
    changes = config_differences(arm[0].config, run.config)
    if all(is_below(key, MACHINE) for key in changes):
        return not changes or run.seed not in {other.seed for other in arm}
    return False


def _typed_names(path_sets: Sequence[set[str]]) -> list[str]:
    """Return short typed paths as names; empty if an arm has several paths, or a path several arms."""
    typed = [next(iter(some)) for some in path_sets if len(some) == 1]
    if len(set(typed)) < len(path_sets):
        return []
    for count in range(1, max(len(PurePath(path).parts) for path in typed) + 1):
        short = ["/".join(PurePath(path).parts[-count:]) for path in typed]
        if len(set(short)) == len(short) and all(short):
            return short
    return typed


def _names(runs: Sequence[RunMeasures]) -> list[str]:
    """Return a short name for each of several runs with different configurations.

    The precision comes first, then other groups, then keys, with machine keys last. Each part is added only if it
    distinguishes runs that had the same name before.
    """
    parts: list[list[str]] = [[] for _ in runs]
    for labels in _candidates(runs):
        before = [tuple(part) for part in parts]
        after = [(*part, label) for part, label in zip(before, labels, strict=True)]
        if len(set(after)) > len(set(before)):
            for part, label in zip(parts, labels, strict=True):
                part.append(label)
    return [" ".join(filter(None, part)) or precision_of(run) for part, run in zip(parts, runs, strict=True)]


def _candidates(runs: Sequence[RunMeasures]) -> Iterable[list[str]]:
    """Yield labels of the runs, such as ``scaler.scale=8``, one setting at a time; empty for runs without it."""
    yield [precision_of(run) for run in runs]
    for name in dict.fromkeys(group for run in runs for group in run.chosen):
        yield [f"{name}={run.chosen[name]}" if name in run.chosen else "" for run in runs]
    flat: list[dict[str, Any]] = [dict(flat_settings(run.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    for key in sorted(keys, key=lambda key: is_below(key, MACHINE)):
        if not is_below(key, NOT_COMPARED):
            yield [f"{key}={show(config[key])}" if key in config else "" for config in flat]
