"""``mptrain compare``: comparison of new arms, existing runs or logs of any program, with verdicts and a report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import each_warning_once, say, warn
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import Composer
from mptrain.config.config_diff import ABSENT, IGNORED, config_differences, flat_settings
from mptrain.config.schema import RunOptions
from mptrain.config.value_checks import show
from mptrain.report.html_and_markdown import write_page
from mptrain.report.page import Bullets, Section, table
from mptrain.runlog import readable_bytes
from mptrain.runlog.atomic_files import folder_at_once, write_atomically
from mptrain.runlog.sweeps import Sweep, SweepPaths, read_sweep
from mptrain.study.commands.sweep import check_points, finish, launcher_of, record_sweep
from mptrain.study.comparison.logs import compare_logs
from mptrain.study.comparison.results import write_comparisons
from mptrain.study.pages.certificate_page import certificate_page, outcome_blocks
from mptrain.study.sweep.comparisons import (
    ComparisonOptions,
    claimed_by,
    judge_runs,
    judge_sweep,
    name_arms,
    reference_of,
    single_runs,
    with_relative_paths,
)
from mptrain.study.sweep.points import expand
from mptrain.study.sweep.runner import fresh_place, sweep_folder
from mptrain.system import words as words
from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, ConfigError, UsageError, suggest
from mptrain.system.words import counted

if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from mptrain.cli.answer import Answer
    from mptrain.study.comparison.results import Comparison, RunMeasures


#: Arm with a log, of a comparison of logs; keys of settings with paths have a dot.
_LOG = re.compile(r"[^.=]+=.*(\.(csv|tsv|jsonl|ndjson|wandb)|tfevents[^/]*)")


def compare(arguments: Namespace) -> int | Outcome:
    """Train the arms of a comparison and compare them, or compare existing runs, and write a report.

    An arm is all runs of one configuration, which differ in their seeds.

    Args:
        arguments: Parsed command line: ``KEY=A,B ... seed=0,1,2``, or runs; and options such as ``--margin X``.

    Returns:
        The verdicts, with the exit code 0, or 7 if a run failed for a reason other than its numerics; or the exit code
        130 or 75 alone if a signal ended the comparison.

    Raises:
        MptrainError: The arguments are invalid, or the runs differ in more than the compared keys. Nothing is run or
            written then.
    """
    selectors = [word for word in arguments.words if not Path(word).is_file()]  # SWEEP/0* also matches the log files
    odd = [
        *arguments.overrides,
        *(f"--{name}" for name in ("jobs", "launcher") if getattr(arguments, name) is not None),
    ]
    odd += ["--config-dir"] * bool(arguments.config_dir) + ["--config-name"] * (arguments.config_name != "train")
    if not selectors and not odd:
        raise UsageError(
            "compare needs arms or runs",
            "write for example mptrain compare precision=fp32,amp_dynamic seed=0,1,2,3, or mptrain compare RUN RUN",
        )
    if logs := [word for word in odd if _LOG.fullmatch(word)]:
        raise UsageError(f"{logs[0]} is no setting", "to compare logs, add --logs, --metric NAME and --margin X")
    if selectors and odd:
        raise UsageError(
            f"compare takes either existing runs or KEY=VALUE arguments, not both: {selectors[0]} and {odd[0]}",
            "remove one of them",
        )
    question = ComparisonOptions(
        arguments.reference,
        arguments.margin or ComparisonOptions.margin,
        arguments.metric,
        tuple(key for key in (arguments.by or "").split(",") if key),
    )
    if selectors:
        return _compare_runs(selectors, question, anyway=arguments.anyway)
    return _compare_arms(arguments, question)


def conclude(sweep: Sweep, code: int) -> Outcome:
    """Judge a comparison whose training runs have ended, and write its report.

    Args:
        sweep: The sweep that trained the runs; its folder is read again.
        code: Its exit code.

    Raises:
        MptrainError: There is nothing to compare, or the report cannot be written.
    """
    return _judged(judge_sweep(read_sweep(sweep.folder)), sweep.folder, code)


def _compare_arms(arguments: Namespace, question: ComparisonOptions) -> int | Outcome:
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
            hint = suggest(wanted, arms, f"arms are {', '.join(arms)}")
            raise UsageError(f"--reference {wanted}: there is no such arm", hint)
        first = points[0].config
        assert first is not None
        folder = sweep_folder(first.run, "comparisons")
        planned = record_sweep(points, folder, arguments, kind="comparison", plan=question.as_plan())
        code = finish(planned, composer, launcher)
    return code if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED) else conclude(planned, code)


def _compare_runs(selectors: Sequence[str], question: ComparisonOptions, *, anyway: bool) -> Outcome:
    _refuse_options(selectors)
    try:
        comparison = judge_runs(selectors, question, anyway=anyway)
    except (ConfigError, UsageError) as error:
        runs = single_runs(selectors)
        if len({run.path for run in runs}) < 2 or question != ComparisonOptions():
            raise
        return _side_by_side(runs, str(error))
    folder = sweep_folder(RunOptions(root="outputs"), "comparisons")  # after judging: a rejected one leaves no folder
    comparisons = {"": with_relative_paths(comparison, folder)}
    write_comparisons(SweepPaths(folder).comparison, comparisons)
    return _judged(comparisons, folder, EXIT_OK)


def _refuse_options(names: Sequence[str]) -> None:
    """Reject option names of one group, such as two precisions, given in place of runs.

    Raises:
        UsageError: All arguments are options of one group; the hint is the command that trains them as arms.
    """
    if len(names) < 2 or any(Path(name).exists() or (Path("outputs") / name).exists() for name in names):
        return
    catalogue = Catalogue([configs_folder()])
    for group, options in catalogue.groups.items():
        if options.keys() >= set(names):
            line = f"mptrain compare {group}={','.join(names)} seed=0,1,2,3"
            raise UsageError(f"there is no run {names[0]}", f"to train and compare arms, write {line}")


def _judged(comparisons: Mapping[str, Comparison], folder: Path, code: int) -> Outcome:
    from mptrain.report.html_and_markdown import write_report

    written = write_report(folder)  # before printing, which may raise BrokenPipeError

    def display() -> None:
        for group, comparison in comparisons.items():
            say("")
            print_comparison(comparison, group)
        say(f"\ncomparison={folder}")
        say(f"report={written.html}")

    comparison = next(iter(comparisons.values()))  # recipes alone have several
    data = {"comparison": comparison, "folder": str(folder), "html": str(written.html)}
    return Outcome(code, display, lambda: answer(data))


def print_comparison(comparison: Comparison, title: str = "") -> None:
    """Print the table of a comparison with a row per arm, the reason for each verdict, and the checks of fairness.

    An arm is all runs of one configuration, which differ in their seeds.

    Args:
        comparison: The judged comparison.
        title: Heading above the table; empty for none.

    Raises:
        StorageError: Standard output cannot be written.
    """
    from mptrain.study.pages.comparison_blocks import outcome_blocks

    print_blocks(Section(title, tuple(outcome_blocks(comparison))))


def _side_by_side(runs: Sequence[RunMeasures], reason: str) -> Outcome:
    """Return single runs beside each other, with the settings in which they differ and the reason for no verdict."""
    first, *others = runs
    keys = dict.fromkeys(key for run in others for key in config_differences(first.config, run.config, IGNORED))
    differing = {key: tuple(show(flat_settings(run.config).get(key, ABSENT)) for run in runs) for key in keys}

    data = {"no_verdict": reason, "runs": runs, "differing": differing}

    def display() -> None:
        _print_side_by_side(runs, reason, differing)

    return Outcome(EXIT_OK, display, lambda: answer(data))


def _print_side_by_side(runs: Sequence[RunMeasures], reason: str, differing: Mapping[str, Sequence[str]]) -> None:
    first = runs[0]
    metrics = dict.fromkeys(name for run in runs for name in words.metric_order(run.metrics))
    rows = [
        ("ended", [run.status for run in runs]),
        *differing.items(),
        *((f"{name} on {first.split}", [words.number(run.metrics.get(name)) for run in runs]) for name in metrics),
        ("steps", [f"{run.steps:,}" for run in runs]),
        ("skipped", [f"{run.skipped:,}" for run in runs]),
        (f"{first.term}/s", [words.rate(run.terms_per_second or None) for run in runs]),
        ("peak memory", [readable_bytes(run.peak_memory) if run.peak_memory else words.UNKNOWN for run in runs]),
    ]
    seeds = (
        "single runs: what differs may be chance; to compare, train each arm with several seeds (mptrain help compare)"
    )
    print_blocks(
        table(("", *(run.path for run in runs)), [(name, *cells) for name, cells in rows]),
        Bullets((f"no verdict: {reason}", seeds)),
    )


def answer(data: Mapping[str, Any]) -> Answer:
    """Return the object that ``--json`` prints, from its fields."""
    from mptrain.study.answers import CompareAnswer

    return CompareAnswer(**data)


def compare_logged(arguments: Namespace) -> Outcome:
    """Compare arms by the logs of their runs, and write a certificate.

    Args:
        arguments: Parsed command line: ``ARM=LOGS ...``, and options such as ``--metric NAME``.

    Returns:
        The verdicts, with the exit code 0.

    Raises:
        MptrainError: An option is missing or does not fit, or a log cannot be read. Nothing is written then.
    """
    for option in ("jobs", "launcher", "by", "anyway"):
        if getattr(arguments, option):
            raise UsageError(f"--{option} has no effect on --logs", "leave it out")
    arms: dict[str, list[str]] = {}
    for word in arguments.overrides:
        name, _, pattern = word.partition("=")
        arms.setdefault(name, []).append(pattern)
    if arguments.words or not arms:
        what = f"{arguments.words[0]} has no arm" if arguments.words else "compare --logs needs arms"
        raise UsageError(what, "write for example mptrain compare --logs 'bf16=a/*.csv' 'fp8=b/*.csv' --metric loss")
    if not arguments.metric:
        raise UsageError("compare --logs needs --metric", "name a column of the logs: --metric loss")
    if bad := next((word for word in arguments.where if "=" not in word), None):
        raise UsageError(f"--where {bad} has no value", f"write --where {bad}=VALUE")
    comparison = compare_logs.compare(
        logs=arms,
        metric=arguments.metric,
        margin=arguments.margin,
        target=arguments.target,
        not_inferior=bool(arguments.not_inferior),
        at=arguments.at or "last",
        pair=bool(arguments.pair),
        looks=arguments.looks or 1,
        better=arguments.better,
        reference=arguments.reference,
        where=dict(word.split("=", 1) for word in arguments.where),
        pattern=arguments.pattern or "",
    )
    folder = fresh_place(Path("outputs"), "comparisons")
    page = folder / "certificate.html"
    with folder_at_once(folder) as draft:  # after judging: a refused one leaves no folder
        write_page(certificate_page(comparison), draft, draft / page.name, draft / "certificate.md")
        write_atomically(draft / "certificate.json", json.dumps(comparison.to_dict(), indent=1) + "\n")

    def display() -> None:
        print_blocks(Section("", tuple(outcome_blocks(comparison))))
        say(f"\ncertificate={page}")

    data = {"logs": comparison, "folder": str(folder), "html": str(page)}
    return Outcome(EXIT_OK, display, lambda: answer(data))
