"""`mptrain.compare`: verdicts on runs of mptrain, or by logs on those of any program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.api.run import in_python
from mptrain.runlog.run_reader import Run
from mptrain.study.comparison.logs import compare_logs
from mptrain.system.errors import UsageError, instance

if TYPE_CHECKING:
    from mptrain.study.comparison.logs.compare_logs import LogComparison
    from mptrain.study.comparison.results import Comparison


@in_python
def compare(
    *runs: Run | str | Path,
    logs: Mapping[str, str | Path | Sequence[str | Path]] | None = None,
    reference: str | None = None,
    metric: str | None = None,
    margin: float | None = None,
    by: str | Sequence[str] = (),
    anyway: bool = False,
    **about_logs: Any,
) -> Comparison | LogComparison:
    """Judge arms, each several runs that differ in their seeds, as ``mptrain compare`` does.

    Args:
        runs: Runs, their directories or names, or folders of sweeps, which stand for all of their runs.
        logs: Instead of runs, arms by name and for each the paths of its logs, which any program wrote.
        reference: Name of the arm that the others are compared with.
        metric: Name of the metric; for runs by default that of the task.
        margin: Largest difference that counts as none, in the metric's unit; for runs by default 0.01.
        by: Configuration key, or keys, in which runs may differ, besides those of precision and scaler.
        anyway: Compare runs whatever they differ in.
        about_logs: Further arguments of `mptrain.study.comparison.logs.compare_logs.compare`, such as ``target`` and
            ``at``.

    Raises:
        MptrainError: The question cannot be asked of these runs or logs.
    """
    if (logs is None) == (not runs):
        raise UsageError("compare takes either runs or logs", "compare('RUN', 'RUN'), or compare(logs={'ARM': 'LOGS'})")
    if odd := [run for run in runs if not isinstance(run, Run | str | Path)]:
        hint = "give the runs themselves: compare(*runs); arms are told apart by their configurations"
        raise UsageError(f"compare was given {instance(odd[0])} in place of a run", hint)
    for name, value in {"margin": margin, **about_logs}.items():
        if name in ("margin", "target", "looks") and not isinstance(value, Real | None):
            raise UsageError(f"{name}={value!r} is no number", f"write {name}={0.01 if name == 'margin' else 1}")
    if logs is not None:
        if by or anyway:
            raise UsageError("by and anyway are about runs of mptrain", "leave them out beside logs")
        return compare_logs.compare(logs=logs, metric=metric or "", margin=margin, reference=reference, **about_logs)
    if about_logs:
        raise UsageError(f"{next(iter(about_logs))} is about logs", "leave it out, or give logs=")
    from mptrain.study.sweep.comparisons import ComparisonOptions, judge_runs

    margin = ComparisonOptions.margin if margin is None else margin
    options = ComparisonOptions(reference, margin, metric, (by,) if isinstance(by, str) else tuple(by))
    return judge_runs([str(run.paths.root if isinstance(run, Run) else run) for run in runs], options, anyway=anyway)
