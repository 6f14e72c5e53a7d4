"""``mptrain compare``: comparison of newly trained arms or existing runs, with a table, verdicts and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.comparison_table import print_comparison, print_side_by_side
from mptrain.cli.messages import each_warning_once, say, warn
from mptrain.cli.sweep_running import check_points, finish, launcher_of, record_sweep
from mptrain.comparison.results import write_comparisons
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.compose import Composer
from mptrain.config.schema import RunOptions
from mptrain.numerics.words import counted
from mptrain.runlog.sweeps import Sweep, SweepPaths, read_sweep
from mptrain.sweep.comparisons import (
    ComparisonOptions,
    claimed_by,
    judge,
    judge_runs,
    name_arms,
    reference_of,
    single_runs,
    with_relative_paths,
)
from mptrain.sweep.points import expand
from mptrain.sweep.runner import sweep_folder
from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, ConfigError, UsageError, did_you_mean

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.comparison.results import Comparison


def compare(arguments: Namespace) -> int:
    """Train the arms of a comparison and compare them, or compare existing runs; print the verdicts and write a report.

    An arm is all runs of one configuration, which differ in their seeds.

    Args:
        arguments: Parsed command line: ``KEY=A,B ... seed=0,1,2``, or runs; and options such as ``--margin X``.

    Returns:
        0; 7 if a run failed for a reason other than its numerics; 130 or 75 if a signal ended the comparison.

    Raises:
        MptrainError: The arguments are invalid, or the runs differ in more than the compared keys. Nothing is run or
            written then.
    """
    places = [word for word in arguments.words if not Path(word).is_file()]  # SWEEP/0* also matches the log files
    odd = [
        *arguments.overrides,
        *(f"--{name}" for name in ("jobs", "launcher") if getattr(arguments, name) is not None),
    ]
    odd += ["--config-dir"] * bool(arguments.config_dir) + ["--config-name"] * (arguments.config_name != "train")
    if not places and not odd:
        raise UsageError(
            "compare needs arms or runs",
            "write for example mptrain compare precision=fp32,amp_dynamic seed=0,1,2,3, or mptrain compare RUN RUN",
        )
    if places and odd:
        raise UsageError(
            f"compare takes either existing runs or KEY=VALUE arguments, not both: {places[0]} and {odd[0]}",
            "remove one of them",
        )
    question = ComparisonOptions(
        arguments.reference,
        arguments.margin or ComparisonOptions.margin,
        arguments.metric,
        tuple(key for key in (arguments.by or "").split(",") if key),
    )
    if places:
        return _compare_runs(places, question, anyway=arguments.anyway)
    return _compare_arms(arguments, question)


def conclude(sweep: Sweep) -> None:
    """Judge a comparison whose training runs have ended, print the verdicts and write its report.

    Args:
        sweep: The sweep that trained the runs; its folder is read again.

    Raises:
        MptrainError: There is nothing to compare, or the report cannot be written.
    """
    _show(judge(read_sweep(sweep.folder)), sweep.folder)


def _compare_arms(arguments: Namespace, question: ComparisonOptions) -> int:
    with each_warning_once():
        composer = Composer(arguments.config_dir, arguments.config_name)
        launcher = launcher_of(arguments.launcher, arguments.jobs)
        points = name_arms(expand(arguments.overrides, composer.catalogue))
        arms = list(dict.fromkeys(point.arm for point in points))
        seeds = len(points) // len(arms)
        points = check_points(
            points, composer, launcher, f"points valid: {len(arms)} arms ({', '.join(arms)}) x {counted(seeds, 'seed')}"
        )
        warn(sentence for point in points for sentence in point.warnings)
        if seeds < 2:
            warn(["one seed gives no variance estimate and so no verdict: add more seeds, such as seed=0,1,2,3"])
        question = replace(question, claimed=(*question.claimed, *claimed_by(points)))
        wanted = question.reference or reference_of(points)
        question = replace(question, reference=wanted)
        if wanted not in arms and wanted.partition("=")[2] not in arms:
            near = did_you_mean(wanted, arms)
            hint = f"did you mean {near}?" if near else f"arms are {', '.join(arms)}"
            raise UsageError(f"--reference {wanted}: there is no such arm", hint)
        first = points[0].config
        assert first is not None
        folder = sweep_folder(first.run, "comparisons")
        planned = record_sweep(points, folder, arguments, kind="comparison", plan=question.as_plan())
        code = finish(planned, composer, launcher)
    if code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        conclude(planned)
    return code


def _compare_runs(places: Sequence[str], question: ComparisonOptions, *, anyway: bool) -> int:
    _refuse_options(places)
    try:
        comparison = judge_runs(places, question, anyway=anyway)
    except (ConfigError, UsageError) as error:
        runs = single_runs(places)
        if len({run.path for run in runs}) < 2 or question != ComparisonOptions():
            raise
        print_side_by_side(runs, str(error))
        return EXIT_OK
    folder = sweep_folder(RunOptions(root="outputs"), "comparisons")  # after judging: a rejected one leaves no folder
    comparisons = {"": with_relative_paths(comparison, folder)}
    write_comparisons(SweepPaths(folder).comparison, comparisons)
    _show(comparisons, folder)
    return EXIT_OK


def _refuse_options(places: Sequence[str]) -> None:
    """Reject option names of one group, such as two precisions, given in place of runs.

    Raises:
        UsageError: All arguments are options of one group; the hint is the command that trains them as arms.
    """
    if len(places) < 2 or any(Path(place).exists() or (Path("outputs") / place).exists() for place in places):
        return
    catalogue = Catalogue([location.configs()])
    for group, options in catalogue.groups.items():
        if options.keys() >= set(places):
            line = f"mptrain compare {group}={','.join(places)} seed=0,1,2,3"
            raise UsageError(f"there is no run {places[0]}", f"to train and compare arms, write {line}")


def _show(comparisons: Mapping[str, Comparison], folder: Path) -> None:
    from mptrain.report import write_report

    written = write_report(folder)  # before printing, which may raise BrokenPipeError
    for group, comparison in comparisons.items():
        say("")
        print_comparison(comparison, group)
    say(f"\ncomparison={folder}")
    say(f"report={written.html}")
