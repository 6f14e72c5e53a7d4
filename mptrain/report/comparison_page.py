"""The report of a comparison or a recipe: who differs from the reference, by how much, and whether that was fair."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from mptrain.comparison.results import Comparison
from mptrain.comparison.serialization import read_comparisons
from mptrain.report.comparison_parts import Compared, comparison_sections
from mptrain.report.comparison_tables import comparison_table, verdict_list
from mptrain.report.page import Block, Cell, Code, Fold, Page, Plots, Section, Text, section
from mptrain.report.recipe_part import RecipeVerdict, claim_blocks, expectations_in_words, read_verdict
from mptrain.report.run_parts import OpenedRun, tried
from mptrain.report.sweep_axes import Point, read_points
from mptrain.report.sweep_page import (
    BUCKETS,
    command_blocks,
    environments,
    points_table,
    standing,
    sweep_plot,
    sweep_title,
)
from mptrain.report.wording import counted
from mptrain.runlog.sweeps import Sweep, SweepPaths

Read = Callable[[Path], OpenedRun | str]


def comparison_page(paths: SweepPaths, sweep: Sweep | None) -> Page:
    """The report of a comparison's folder, with its verdicts or, before its jobs are done, without.

    Args:
        paths: Of the folder.
        sweep: Its jobs; None where runs were compared that it did not start.

    Raises:
        StorageError: ``comparison.json`` cannot be read.
    """
    read: Read = lru_cache(maxsize=None)(lambda folder: tried(folder, BUCKETS))
    groups = read_comparisons(paths.comparison) if paths.comparison.exists() else {}
    verdict = read_verdict(paths.root)
    points = read_points(sweep, read) if sweep is not None else []
    recipe = str((sweep.plan if sweep is not None else {}).get("recipe") or verdict.fields.get("recipe") or "")
    smoke = bool(sweep is not None and sweep.plan.get("smoke"))
    title = verdict.title or recipe or (sweep_title(sweep) if sweep is not None and sweep.words else "")
    return Page(
        over="mptrain, report of a recipe" if recipe else "mptrain, report of a comparison",
        title=title or " against ".join(_arms(groups)),
        status=verdict.verdict or (standing(sweep) if sweep is not None and sweep.jobs else Cell("done", "good")),
        lead=_lead(groups, verdict, smoke=smoke, waiting=bool(points)),
        sections=(
            section("Claim and verdict", *claim_blocks(verdict)),
            *(_judged(groups, paths.root, read, points) if groups else _waiting(points, smoke=smoke)),
            section("Runs", Fold(f"All {counted(len(points), 'run')}", (points_table(points),)) if points else None),
            section("Environment", *environments(points)),
            section("Commands", *_commands(groups, paths.root, sweep, recipe, verdict)),
        ),
    )


def _arms(groups: Mapping[str, Comparison]) -> list[str]:
    """The names of all arms, the references last."""
    names = [result.arm.name for comparison in groups.values() for result in comparison.arms[1:]]
    names += [comparison.reference for comparison in groups.values()]
    return list(dict.fromkeys(names))


def _lead(groups: Mapping[str, Comparison], verdict: RecipeVerdict, *, smoke: bool, waiting: bool) -> str:
    sentences = [expectations_in_words(verdict)]
    for name, comparison in groups.items():
        words = [f"{result.arm.name} {result.verdict.word}" for result in comparison.arms[1:]]
        listed = ", ".join(words[:6]) + (f", and {len(words) - 6} more" if len(words) > 6 else "")
        where = f"{name}: " if name else ""
        sentences.append(
            f"{where}{comparison.metric} on {comparison.split} data, against {comparison.reference}: {listed}."
        )
    fatal = sum(objection.fatal for comparison in groups.values() for objection in comparison.objections)
    if fatal:
        sentences.append(f"What is compared is not fair ({counted(fatal, 'objection')} below).")
    if smoke:
        sentences.append("A smoke run shows that everything runs, in short; it judges nothing.")
    elif waiting and not groups:
        sentences.append("It is not judged yet.")
    return " ".join(sentence for sentence in sentences if sentence)


def _waiting(points: Sequence[Point], *, smoke: bool) -> tuple[Section, ...]:
    if not points:
        return ()
    text = None if smoke else Text("There is no comparison.json yet: it is written once the runs have ended.", "warn")
    return (section("Comparison", text, sweep_plot(points)),)


def _judged(groups: Mapping[str, Comparison], folder: Path, read: Read, points: Sequence[Point]) -> list[Section]:
    """The parts of the one comparison, or the tables of all groups and a section for each."""
    if len(groups) == 1:
        ((name, comparison),) = groups.items()
        return list(comparison_sections(Compared(comparison, folder, read, _of_group(points, name))))
    sections = [
        section(f"{name or 'Others'}: comparison", comparison_table(comparison), verdict_list(comparison))
        for name, comparison in groups.items()
    ]
    for at, (name, comparison) in enumerate(groups.items(), 1):
        parts = comparison_sections(Compared(comparison, folder, read, _of_group(points, name), f"g{at}-"))[1:]
        blocks: list[Block] = []
        for part in parts:  # figures are seen at once, the rest on demand
            blocks += [block for block in part.blocks if isinstance(block, Plots)]
            rest = tuple(block for block in part.blocks if not isinstance(block, Plots))
            blocks += [Fold(part.title, rest)] if rest else []
        sections.append(section(f"{name or 'Others'}: details", *blocks))
    return sections


def _of_group(points: Sequence[Point], name: str) -> list[Point]:
    """The points whose arms are called ``GROUP/ARM``."""
    return [point for point in points if point.job.arm.rpartition("/")[0] == name]


def _commands(
    groups: Mapping[str, Comparison], folder: Path, sweep: Sweep | None, recipe: str, verdict: RecipeVerdict
) -> list[Block]:
    if sweep is None:
        runs = [run for comparison in groups.values() for result in comparison.arms for run in result.arm.runs]
        return [Code(shlex.join(["mptrain", "compare", *(os.path.normpath(folder / run.path) for run in runs)]), "sh")]
    if not recipe:
        return command_blocks(sweep)
    words = verdict.fields.get("words")
    more = [str(word) for word in words] if isinstance(words, list) else []
    smoke = ["--smoke"] if sweep.plan.get("smoke") else []
    return [Code(shlex.join(["mptrain", "reproduce", recipe, *more, *smoke]), "sh"), *command_blocks(sweep)]
