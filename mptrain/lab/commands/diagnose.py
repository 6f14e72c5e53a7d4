"""``mptrain diagnose``, ``recommend`` and ``replay``: the cause of a failed step, and what other scales would do."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome, named_folder, named_folder_or_last, run_folder
from mptrain.cli.messages import say
from mptrain.config.compose import allow_argument, allowed_packages, command_with, is_allow_override
from mptrain.lab.pages.diagnosis_page import diagnosis_page
from mptrain.lab.pages.loss_scale_pages import Replay, file_name, forecast_page, recommend, replay_page
from mptrain.report.html_and_markdown import ReportFiles, write_page
from mptrain.report.page import Code, Text, section
from mptrain.report.run_blocks import operator_table, summary
from mptrain.runlog.diagnosis_file import Fix
from mptrain.system.errors import EXIT_DATA, EXIT_OK

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.cli.answer import Answer
    from mptrain.lab.diagnosis.diagnose import DiagnosisResult
    from mptrain.lab.pages.loss_scale_pages import Recommendation
    from mptrain.runlog.diagnosis_file import Examination, ModuleRow


#: Maximum number of modules in the table unless --all is given, and how many of the first and last are always kept.
MOST_ROWS, ENDS = 40, 6


def diagnose(arguments: Namespace) -> Outcome:
    """Examine one training step of a run or of a configuration, for the cause of its failure and the fixes that help.

    Args:
        arguments: Parsed command line: a run and overrides, or a configuration; ``--step``, ``--learner``, ``--all``
            and ``--config-dir``.

    Returns:
        The diagnosis, with the exit code 0.

    Raises:
        MptrainError: The arguments are invalid, or the step cannot be examined.
    """
    overrides, step, learner = arguments.overrides, arguments.step, arguments.learner
    run = next(iter(arguments.words), "")
    if run:
        directory = run_folder(run, overrides)
        from mptrain.lab.diagnosis.diagnose import diagnose_run

        done = diagnose_run(directory, overrides, step, learner)
    else:
        from mptrain.config.compose import compose
        from mptrain.lab.diagnosis.diagnose import diagnose_config

        done = diagnose_config(compose(overrides, config_dirs=arguments.config_dir), step or 1, learner)
    fix = _fix(done, run, overrides)
    rows, left_out = (done.examination.modules, 0) if arguments.all else interesting(done.examination.modules)
    examination = replace(done.examination, modules=tuple(rows))

    def show() -> None:
        _print(examination, left_out)
        if fix is not None:
            _print_fix(fix, is_of_run=done.page is not None)
        if done.page is not None:
            say(f"\n{done.page}")

    def answer() -> Answer:
        from mptrain.lab.answers import DiagnoseAnswer

        return DiagnoseAnswer(diagnosis=examination, modules_left_out=left_out, fix=fix, html=str(done.page or ""))

    return Outcome(EXIT_OK, show, answer)


def _fix(done: DiagnosisResult, run: str, overrides: Sequence[str]) -> Fix | None:
    """Return the first remedy that helped and can be written as overrides."""
    words = next((remedy.words for remedy in done.examination.remedies if remedy.helped and remedy.words), None)
    if words is None:
        return None
    packages = allowed_packages(overrides)
    if done.page is None:
        return Fix((*words, *shlex.split(allow_argument(packages))))
    keys = [word for word in overrides if not is_allow_override(word)]
    if not done.steps_left:
        why = (
            "its weights have diverged" if done.examination.cause == "updates" else "the run has no steps left to train"
        )
        return Fix((*keys, *words, *shlex.split(allow_argument(packages))), why_not=why)
    resume = f"mptrain resume {shlex.quote(run)}"
    follows = f"{resume} scaler=dynamic" if words[0].startswith("scaler.scale=") else ""
    return Fix(
        (*keys, *words),
        command=command_with(f"{resume} {shlex.join([*keys, *words])}", packages),
        dynamic_command=command_with(follows, packages) if follows else "",
    )


def _print_fix(fix: Fix, *, is_of_run: bool) -> None:
    if fix.command:
        say(f"\nto train on with the fix: {fix.command}")
    else:
        ended, start = (f"{fix.why_not}; ", "start another run and ") if is_of_run else ("", "")
        say(f"\n{ended}to train with the fix, {start}add {shlex.join(fix.overrides)}")
    if fix.dynamic_command:
        say(f"to let the scale follow later gradients: {fix.dynamic_command}")


def _print(examination: Examination, left_out: int) -> None:
    page = diagnosis_page(examination)
    *sections, _ = page.sections  # a terminal cannot unfold the operators in the last one
    operators = (
        (Text(summary(examination.operators)), operator_table(examination.operators)) if examination.operators else ()
    )
    more = Text(f"{left_out} modules not shown; --all shows them") if left_out else None
    print_blocks(Text(page.lead, page.status.tone), *sections, more, section("Operator dtypes", *operators))


def interesting(modules: Sequence[ModuleRow]) -> tuple[list[ModuleRow], int]:
    """Select at most about `MOST_ROWS` modules of an examined step for a table, and count the others.

    The selection keeps modules in which something breaks and their neighbours, the first and last modules, and those
    with the largest magnitudes or the most subnormal values.

    Args:
        modules: Modules of the network in call order, with their magnitudes.

    Returns:
        The selected modules in order, and the number of others.
    """
    if len(modules) <= MOST_ROWS:
        return list(modules), 0
    shown = {*range(ENDS), *range(len(modules) - ENDS, len(modules))}
    for index, row in enumerate(modules):
        if row.breaks:
            shown |= {index - 1, index, index + 1}
    reached = {
        index: (
            row.forward.largest if row.forward else 0.0,
            row.backward.largest if row.backward else 0.0,
            max(reach.subnormal for reach in (row.forward, row.backward) if reach),
        )
        for index, row in enumerate(modules)
    }
    orders = [sorted(reached, key=lambda index: -reached[index][number]) for number in range(3)]
    for index in itertools.chain.from_iterable(zip(*orders, strict=True)):
        if len(shown) < MOST_ROWS:
            shown.add(index)
    chosen = sorted(index for index in shown if 0 <= index < len(modules))
    return [modules[index] for index in chosen], len(modules) - len(chosen)


def recommend_scale(arguments: Namespace) -> Outcome:
    """Recommend a static loss scale for a run, with the effect of every other scale, and write a report.

    The report is written into the run's folder.

    Args:
        arguments: Parsed command line: the run, or ``last``; ``--sweep`` with the folder of a sweep over static scales.

    Returns:
        The recommendation; the exit code is 0, or 6 if a learner (a model with its optimizer) has too few histograms,
        or gradients that FP16 may have rounded to zero unseen.

    Raises:
        StorageError: The run has no histograms, the sweep has no static scales, or a folder cannot be read or written.
    """
    (run,), sweep = arguments.words, arguments.sweep
    recommendation = recommend(named_folder_or_last(run), named_folder(sweep) if sweep else None)
    written = write_forecast(recommendation)
    known = all(forecast.is_answered for forecast in recommendation.forecasts.values())

    def data() -> Answer:
        from mptrain.lab.answers import RecommendAnswer

        return RecommendAnswer.written(recommendation, written)

    return Outcome(EXIT_OK if known else EXIT_DATA, lambda: _show(written), data)


def report_replay(replay: Replay) -> int:
    """Print the effect of a loss scaling rule that was simulated on the recorded steps of a run, and write a report.

    Returns:
        The exit code 0.

    Raises:
        StorageError: The report cannot be written.
    """
    _show(write_replay(replay))
    return EXIT_OK


def _show(written: ReportFiles) -> None:
    """Print a written report without its last section, the run or command, and its paths."""
    *shown, _ = written.page.sections
    print_blocks(Text(written.page.lead), *shown, Code(f"{written.html}\n{written.md}"))


def write_replay(replay: Replay) -> ReportFiles:
    """Write the report of a replayed loss-scaling rule into the run directory.

    The files are ``replay-NAME-KEY-VALUE.html`` and ``.md``. Earlier files of the same rule and words are replaced.
    """
    name = file_name(replay)
    return write_page(replay_page(replay), replay.root, replay.root / f"{name}.html", replay.root / f"{name}.md")


def write_forecast(recommendation: Recommendation) -> ReportFiles:
    """Write the report of recommended loss scales into the run directory: ``forecast.html`` and ``forecast.md``."""
    paths = recommendation.opened.run.paths
    return write_page(forecast_page(recommendation), paths.root, paths.forecast_html, paths.forecast_md)
