"""Comparison of arms whose runs are known by their logs alone.

An arm is several runs of one setting, and each run gives one number: the values of a run are not independent, so no
verdict comes from the steps of one pair. Runs are compared unpaired unless the caller says which belong together. A
level of 5 % is divided by the number of arms and of looks (Bonferroni), so it holds for all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mptrain.numerics.words import counted, listed
from mptrain.runlog.run_state import lower_is_better
from mptrain.study.comparison.logs.runs import Form, Question, read_arms, read_curves
from mptrain.study.comparison.logs.verdict import LoggedArm, judge
from mptrain.study.comparison.results import as_table
from mptrain.system.errors import UsageError

#: Level of all tests together.
ALPHA = 0.05


@dataclass(frozen=True, repr=False)
class LogComparison:
    """Comparison of arms by their logs: the question, the arms with the reference first, and notes on the logs.

    ``alpha`` is the level of each test, after division by the numbers of arms and looks.
    """

    question: Question
    arms: tuple[LoggedArm, ...]
    alpha: float
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return as_table(self.question.metric, self.arms)


def compare(
    *,
    logs: Mapping[str, str | Path | Sequence[str | Path]],
    metric: str,
    margin: float | None = None,
    target: float | None = None,
    not_inferior: bool = False,
    at: str = "last",
    pair: bool = False,
    looks: int = 1,
    better: Literal["lower", "higher"] | None = None,
    reference: str | None = None,
    where: Mapping[str, str] | None = None,
    pattern: str = "",
) -> LogComparison:
    """Judge arms by the logs of their runs, as ``mptrain compare --logs`` does.

    Args:
        logs: Arms by name, and for each the paths of its logs, with ``*``, ``?`` and ``{seed}``.
        metric: Name of the metric in the logs.
        margin: Largest difference that counts as none, in the metric's unit, chosen before the results were seen.
        target: Number that the mean of each arm is to beat, in place of a reference and a margin.
        not_inferior: Ask only whether an arm is not worse by the margin or more.
        at: ``last``, ``step=N``, or ``last=N`` for the mean of the N last values.
        pair: Runs with the same ``{seed}`` belong together.
        looks: Number of times that the question is asked while runs come in.
        better: ``lower`` or ``higher``; None to take it from the name of the metric.
        reference: Name of the arm that the others are compared with; None for the first.
        where: Column to value, of the rows that count where columns tell rows of one name apart: ``{"split": "val"}``.
        pattern: Regular expression with named groups, of which one has the name of the metric: reads lines of any text.

    Raises:
        UsageError: The question cannot be asked so.
        DataError: A log is damaged, or the runs cannot be compared at the same point.
    """
    if not isinstance(logs, Mapping) or not logs or any(not paths for paths in logs.values()):
        raise UsageError("compare --logs needs arms", "name at least one log of each: {'bf16': 'logs/bf16-*.csv'}")
    if looks < 1 or better not in (None, "lower", "higher") or (target is not None and not math.isfinite(target)):
        what = f"looks={looks}, better={better}, target={target}"
        raise UsageError(what, "looks is 1 or more, better is lower or higher, and a target is finite")
    if target is None and not (margin and 0 < margin < math.inf):
        raise UsageError(
            "compare --logs needs --margin",
            "choose, before you see the results, the largest difference that counts as none: --margin 0.01",
        )
    if target is not None and (margin is not None or not_inferior or pair or reference is not None):
        excess = "leave out --margin, --not-inferior, --pair and --reference"
        raise UsageError("--target asks about one arm at a time", excess)
    form: Form = "beats target" if target is not None else "not inferior" if not_inferior else "equivalent"
    question = Question(
        metric=metric,
        form=form,
        margin=margin or 0.0,
        target=math.nan if target is None else target,
        at=str(at),
        paired=pair,
        looks=looks,
        lower_is_better=better != "higher",
        where={str(name): str(value) for name, value in (where or {}).items()},
        pattern=pattern,
    )
    arms = {
        name: [str(one) for one in ([paths] if isinstance(paths, str | Path) else paths)]
        for name, paths in logs.items()
    }
    if better is None:
        try:
            question = replace(question, lower_is_better=lower_is_better(metric))
        except UsageError:
            read_curves(next(iter(arms.values())), question)  # a name that no log has is said first
            raise
    return compare_logs(arms, question, reference or "")


def compare_logs(arms: Mapping[str, Sequence[str]], question: Question, reference: str = "") -> LogComparison:
    """Read the logs of several arms and judge each against a reference, or against a target.

    Args:
        arms: Names of the arms, and for each the paths of its runs; ``*`` and ``?`` stand for any letters, and
            ``{seed}`` for those that name the pair of a run.
        question: The claim.
        reference: Name of the reference; empty for the first arm.

    Raises:
        UsageError: The question cannot be asked of these arms.
        DataError: A log is damaged, or the runs cannot be compared at the same point.
    """
    names = [*arms]
    reference = reference or names[0]
    if reference not in arms:
        raise UsageError(f"no arm is called {reference!r}", f"the arms are {', '.join(names)}")
    if question.form != "beats target" and len(arms) < 2:
        raise UsageError("one arm cannot be compared", "give a second ARM=LOGS, or a number with --target")
    runs, notes = read_arms(arms, question, reference)
    judged = [name for name in names if question.form == "beats target" or name != reference]
    alpha = ALPHA / (len(judged) * question.looks)
    ordered = [*([reference] if reference not in judged else []), *judged]
    results = tuple(
        judge(name, runs[name], None if name not in judged else runs[reference], question, alpha) for name in ordered
    )
    many = [arm for arm in results if arm.mean and len(arm.runs) > 1]
    if alike := [arm.name for arm in many if len({run.value for run in arm.runs}) == 1]:
        notes.append(f"{listed(alike, 3)}: all runs end at one value, as copies or runs of one seed do")
    if len(judged) * question.looks > 1:
        tests = f"{counted(len(judged), 'arm')} and {counted(question.looks, 'look')}"
        notes.append(f"{tests}: each test has the level {alpha:.2g}, all together 5 %")
    return LogComparison(question, results, alpha, tuple(notes))
