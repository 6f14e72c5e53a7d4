"""Commands about several runs, and what the kernel asks of this shelf: sweeps, recipes and their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.command import (
    ANY_KEY,
    CONFIG_DIR,
    FOLDERS,
    JOBS,
    JSON,
    LAUNCHER,
    OVERRIDES,
    RECIPE,
    Argument,
    Option,
    Outcome,
    Usage,
    any_number,
    command,
    positive_number,
    whole_number,
)
from mptrain.parallel.torchrun import refuse_torchrun
from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.cli.answer import Answer
    from mptrain.report.html_and_markdown import ReportFiles
    from mptrain.report.page import Page


@command(
    "train arms and compare them, with confidence intervals and verdicts",
    Argument("A,B", key=ANY_KEY),
    Argument("0,1,2", "+", "seed"),
    also=[
        Usage("compare existing runs", (Argument("RUN"), Argument("RUN", "+"))),
        Usage("compare logs of any program", (Argument("LOGS", "+", "ARM"),), switch="--logs"),
    ],
    options=(
        Option("--reference", "arm that the others are compared with (default: precision=fp32)", "ARM"),
        Option(
            "--margin",
            "largest difference that counts as equivalent, in the metric's unit: 0.005 is half a percentage point of "
            "accuracy (default: 0.01)",
            "X",
            read=positive_number,
        ),
        Option("--metric", "metric to compare (default: that of the best checkpoint)", "NAME"),
        Option("--by", "keys in which RUNs may differ", "KEY,KEY"),
        Option("--anyway", "compare RUNs whatever they differ in"),
        Option("--logs", "compare logs: CSV, JSONL, TensorBoard, Lightning, transformers, wandb, MLflow, mptrain"),
        Option("--at", "where logs are compared: at a step, or by the mean of the last N values", "last|last=N|step=N"),
        Option("--not-inferior", "ask of logs only whether no arm is worse by the margin or more"),
        Option("--target", "ask of logs whether the mean of each arm beats a number", "X", read=any_number),
        Option("--pair", "compare logs in pairs, named by {seed} in their paths"),
        Option("--looks", "times that logs are looked at as runs come in (default: 1)", "N", read=whole_number(1000)),
        Option("--where", "rows of logs that count, such as split=val; may be repeated", "KEY=VALUE", many=True),
        Option("--pattern", "read text logs by a regular expression with named groups such as (?P<step>...)", "REGEX"),
        Option("--better", "direction of the metric in logs (default: by its name)", "lower|higher"),
        JOBS,
        LAUNCHER,
        JSON,
        *FOLDERS,
    ),
)
def _compare(arguments: Namespace) -> int | Outcome:
    """Trains every arm with every seed, or takes existing RUNs, including folders of sweeps.

    An arm is a combination of the values; seed= repeats arms and forms no new ones. Reports for each arm if it is
    better than the reference, equivalent, worse or undecided, from differences paired by seed. RUNs must differ only in
    precision and scaler, unless --by or --anyway is given. With --logs an arm is a name and the logs of its runs, files
    or folders that any program wrote, in quotes if they have a *; --metric and --margin (or --target) are required.
    """
    if arguments.logs:
        from mptrain.study.commands.compare import compare_logged

        return compare_logged(arguments)
    for option in ("at", "not_inferior", "target", "pair", "looks", "better", "where", "pattern"):
        if getattr(arguments, option) not in (None, False, []):
            raise UsageError(f"--{option.replace('_', '-')} is about logs", "add --logs, and write ARM=LOGS")
    from mptrain.study.commands.compare import compare

    return compare(arguments)


@command(
    "reproduce a published result and check its claim",
    RECIPE,
    OVERRIDES,
    options=(
        Option("--dry-run", "print the plain commands and run nothing"),
        Option("--smoke", "shorten all runs to check that they work"),
        JOBS,
        CONFIG_DIR,
    ),
)
def _reproduce(arguments: Namespace) -> int:
    """Runs a recipe from mptrain list recipes or from your own folder, and prints its results and expectations.

    The exit code is 5 if an expectation is not met. Finished runs are not repeated. KEY=VALUE changes every run;
    run.root=DIR sets the output folder.
    """
    from mptrain.study.commands.reproduce import reproduce

    return reproduce(arguments)


def sweep(arguments: Namespace) -> int:
    """Train the points of a sweep (``-m``), as listed or as a Hydra sweeper chooses them; return the exit code."""
    from mptrain.study.commands.sweep import has_sweeper, sweep

    if has_sweeper(arguments.overrides):
        from mptrain.study.commands.sweeper_search import search

        return search(arguments)
    return sweep(arguments)


def resumed(arguments: Namespace) -> int | None:
    """Run the missing jobs of a sweep that ``mptrain resume`` names, and judge a comparison.

    Returns:
        The exit code; None if the folder is no sweep.
    """
    from mptrain.config.compose import allowed_packages, is_allow_override
    from mptrain.study.commands.sweep import find_sweep, resume_sweep

    trusted = [word for word in arguments.overrides if is_allow_override(word)]
    others = [word for word in arguments.overrides if word not in trusted]
    planned = find_sweep(arguments.words[0], others, arguments.jobs, arguments.launcher)
    if planned is None:
        return None
    refuse_torchrun("a sweep")
    code = resume_sweep(planned, arguments.jobs, allowed_packages(trusted), arguments.launcher)
    if planned.kind == "comparison" and code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        from mptrain.study.commands.compare import conclude

        conclude(planned, code).show()
    return code


def page_of(path: Path) -> Page:
    """Return the report page of a sweep, comparison or recipe; raise StorageError if it is too damaged to read."""
    from mptrain.runlog.sweeps import SweepPaths, is_sweep, read_sweep
    from mptrain.study.pages.comparison_page import comparison_page
    from mptrain.study.pages.sweep_page import sweep_page

    planned = read_sweep(path) if is_sweep(path) else None
    if planned is None or planned.kind != "sweep" or SweepPaths(path).comparison.exists():
        return comparison_page(SweepPaths(path), planned)
    return sweep_page(planned)


def written_together(folders: Sequence[Path]) -> tuple[Path, ReportFiles]:
    """Write one report of several runs into a new folder below ``outputs/reports``; return the folder and the files."""
    from mptrain.report.html_and_markdown import ReportFiles, write_page
    from mptrain.runlog.atomic_files import folder_at_once
    from mptrain.study.pages.sweep_page import runs_page
    from mptrain.study.sweep.runner import fresh_place

    page = runs_page(folders)  # first: a run that cannot be read leaves no folder
    folder = fresh_place(Path("outputs"), "reports")
    with folder_at_once(folder) as draft:
        write_page(page, draft, draft / "report.html", draft / "report.md")
    return folder, ReportFiles(page, folder / "report.html", folder / "report.md")


def answer_of(reports: Mapping[Path, ReportFiles]) -> Answer:
    """Return the object of ``mptrain report --json``, with the points, verdicts and expectations of sweeps."""
    from mptrain.study.answers import ReportAnswer

    return ReportAnswer.written(reports)


def recipe_names() -> list[str]:
    """Return the names of the recipes included in mptrain."""
    from mptrain.study.recipe.catalogue import recipe_names

    return recipe_names()


def print_recipes() -> None:
    """Print all recipes, for ``mptrain list recipes``."""
    from mptrain.study.commands.reproduce import print_recipe
    from mptrain.study.recipe.catalogue import find_recipe

    for position, name in enumerate(recipe_names()):
        if position:
            print()
        print_recipe(find_recipe(name))
