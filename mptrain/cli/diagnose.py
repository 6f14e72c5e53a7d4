"""``mptrain diagnose RUN`` and ``mptrain diagnose KEY=VALUE ...``: search for the cause of a failed step, and fixes."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text

from mptrain.cli.messages import printable, say, wrapped
from mptrain.cli.places import place_of
from mptrain.cli.tables import BREAK, Column, capture, columns_of, render_table
from mptrain.errors import EXIT_OK
from mptrain.report.diagnosis_page import FINITE, TESTED, as_sentence, breaking, cells, verdict_on
from mptrain.report.run_blocks import by_cast, by_operator, summary

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.report.page import Cell
    from mptrain.runlog.diagnosis_file import Examination, ModuleRow, Remedy

#: Maximum number of modules in the table unless --all is given, and how many of the first and last are always kept.
MOST_ROWS, ENDS = 40, 6

_LEGEND = (
    "of 65,504: largest magnitude relative to FP16's maximum; below 2^-14: subnormal share of nonzero values",
    "zero: share of all values; backward: gradients, multiplied by the loss scale",
)

_COLOURS = {"good": "green", "warn": "yellow", "bad": "red", "": ""}


def diagnose(arguments: Namespace) -> int:
    """Examine one training step of a run or of a configuration; print the cause of its failure and the fixes tested.

    Args:
        arguments: Parsed command line: a run and overrides, or a configuration; ``--step``, ``--learner``, ``--all``
            and ``--config-dir``.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: The arguments are invalid, or the step cannot be examined.
    """
    overrides, step, learner = arguments.overrides, arguments.step, arguments.learner
    from mptrain.config.trust import allow_argument, allowed_packages, command_with, is_allow_override

    run = next(iter(arguments.words), "")
    if run:
        place = place_of(run, overrides)
        from mptrain.inspection.diagnosis import diagnose_run

        done = diagnose_run(place, overrides, step, learner)
    else:
        from mptrain.config.compose import compose
        from mptrain.inspection.diagnosis import diagnose_config

        done = diagnose_config(compose(overrides, config_dirs=arguments.config_dir), step or 1, learner)
    _print(done.found, everything=arguments.all)
    of_run = f"mptrain resume {shlex.quote(run)}" if done.page is not None else ""
    packages = allowed_packages(overrides)
    if fix_words := next((one.words for one in done.found.remedies if one.helped and one.words), None):
        keys = [word for word in overrides if of_run and not is_allow_override(word)]
        fix = shlex.join([*keys, *fix_words])
        if of_run and done.steps_left:
            say(f"\nto train on with the fix: {command_with(f'{of_run} {fix}', packages)}")
        else:
            why = "its weights have diverged" if done.found.cause == "updates" else "the run has no steps left to train"
            ended = f"{why}; " if of_run else ""
            start = "start another run and " if of_run else ""
            say(f"\n{ended}to train with the fix, {start}add {fix}{allow_argument(packages)}")
        if done.steps_left and fix_words[0].startswith("scaler.scale="):
            line = command_with(f"{of_run} scaler=dynamic", packages)
            say(f"to let the scale follow later gradients: {line}")
    if done.page is not None:
        say(f"\n{done.page}")
    return EXIT_OK


def _print(found: Examination, *, everything: bool) -> None:
    whose = "" if found.learner == "main" else f" of the {found.learner}"
    lines = wrapped(f"step {found.step:,}{whose}, precision {found.precision}, on {found.device}")
    lines += [line for remark in found.remarks for line in wrapped(remark)]
    lines += ["", *wrapped(as_sentence(found.verdict, found.operator))]
    for title, sentences in (
        ("also wrong", [one.sentence for one in found.also]),
        ("notes", found.notes),
        (f"fixes tested ({TESTED})", [_remedy(one) for one in found.remedies]),
    ):
        if sentences:
            lines += ["", title, *(line for sentence in sentences for line in wrapped(sentence, "- "))]
    shown, left_out = (list(found.modules), 0) if everything else interesting(found.modules)
    below = [f"{left_out} modules not shown; --all shows them"] if left_out else []
    below += [line for sentence in _LEGEND for line in wrapped(sentence)]
    lines += ["", *render_table(_columns(shown), piped_width=160)]
    lines += capture(160, *(Text(line, style="dim") for line in below), "", escape(summary(found.operators)))
    operators = by_operator(found.operators.get("operators") or [])
    casts = by_cast(found.operators.get("casts") or [])
    rows = [*operators, *((phase, "cast", source, to, calls) for phase, source, to, calls in casts)]
    lines += render_table(
        columns_of(("pass", "operator", "in", "out", "calls"), rows, numeric=("calls",)), piped_width=160
    )
    if found.cause == "none":
        lines += ["", *wrapped(f"{FINITE}.")]
    say("\n".join(lines), styled=True)


def _remedy(one: Remedy) -> str:
    words = f" ({' '.join(one.words)})" if one.words else ""
    return f"{one.text}{words}: {verdict_on(one)}; {one.outcome}"


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
    places = {*range(ENDS), *range(len(modules) - ENDS, len(modules))}
    for place, row in enumerate(modules):
        if row.breaks:
            places |= {place - 1, place, place + 1}
    reached = {
        place: (
            row.forward.largest if row.forward else 0.0,
            row.backward.largest if row.backward else 0.0,
            max(reach.subnormal for reach in (row.forward, row.backward) if reach),
        )
        for place, row in enumerate(modules)
    }
    orders = [sorted(reached, key=lambda place: -reached[place][number]) for number in range(3)]
    for place in itertools.chain.from_iterable(zip(*orders, strict=True)):
        if len(places) < MOST_ROWS:
            places.add(place)
    chosen = sorted(place for place in places if 0 <= place < len(modules))
    return [modules[place] for place in chosen], len(modules) - len(chosen)


def _columns(rows: Sequence[ModuleRow]) -> list[Column]:
    names = [escape(printable(row.name or "(model)")) for row in rows]
    types = [escape(row.type + (f", {row.calls} calls" if row.calls > 1 else "")) for row in rows]
    marks = [f"[red]<- {breaking(row)},{BREAK}{row.breaks}[/]" if row.breaks else "" for row in rows]
    found = [
        Column("module", tuple(names), is_text=True),
        Column("type", tuple(types), 1, is_text=True),
        Column("dtype", tuple(row.dtype for row in rows), 3, is_text=True),
    ]
    for phase in ("forward", "backward"):
        numbers = zip(*(cells(row, row.forward if phase == "forward" else row.backward) for row in rows), strict=True)
        titles = ((f"{phase}\nlargest", None), ("of\n65,504", 4), ("below\n2^-14", 2), ("\nzero", 0))
        for (title, importance), column in zip(titles, numbers, strict=True):
            name = f"{phase} {' '.join(title.split())}"
            found.append(Column(title, tuple(map(_coloured, column)), importance, name))
    return [*found, Column("", tuple(marks), is_text=True)]


def _coloured(cell: Cell) -> str:
    colour = _COLOURS[cell.tone]
    return f"[{colour}]{cell.text}[/]" if colour else cell.text
