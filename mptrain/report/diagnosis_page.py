"""The page about a step that was looked at: what is wrong with it, module by module, and what was tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mptrain.numerics.formats import FLOAT16
from mptrain.report.formatting import number, scale, share
from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Bullets, Cell, Page, Table, Tiles, Tone, section, table
from mptrain.report.run_blocks import operator_blocks
from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.diagnosis_file import (
    CauseKind,
    Examination,
    ModuleRow,
    Remedy,
    ValueRange,
    file_stem,
    write_examination,
)

#: What each cause is called.
NAMES: Final[dict[CauseKind, str]] = {
    "input": "the batch",
    "weights": "the weights",
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass alone",
    "refused": "an operator that torch refuses",
    "none": "nothing",
}

#: What a finite step does not say.
FINITE: Final = "Finite is not yet right: mptrain doctor with the same words checks the gradients at every loss scale"

#: From this share of FP16's range on, a number in the table catches the eye.
NEAR: Final = 0.25


def write_diagnosis(folder: Path, found: Examination, words: Sequence[str] = ()) -> Path:
    """Write the three files of a diagnosis, replacing earlier ones of that step under those words.

    Args:
        folder: Made if missing.
        found: The step.
        words: Those that differ from the run's.

    Returns:
        The page for a browser.

    Raises:
        StorageError: The folder cannot be written to.
    """
    with storage_errors(folder, "create"):
        folder.mkdir(exist_ok=True)
    page = diagnosis_page(found)
    stem = file_stem(found, words)
    write_examination(folder / f"{stem}.json", found)
    write_atomically(folder / f"{stem}.md", markdown_page(page, "figures"), durable=False)
    shown = folder / f"{stem}.html"
    write_atomically(shown, html(page), durable=False)
    return shown


def diagnosis_page(found: Examination) -> Page:
    """The page about a step."""
    tone: Tone = "good" if found.cause == "none" else "bad"
    return Page(
        over="mptrain, diagnosis of a step",
        title=found.subject,
        status=Cell("finite" if found.cause == "none" else f"goes wrong in {NAMES[found.cause]}", tone),
        lead=f"{as_sentence(found.verdict, found.operator)}{f' {FINITE}.' if found.cause == 'none' else ''}",
        sections=(
            section("The step", Tiles(_tiles(found)), Bullets(found.remarks)),
            section("Wrong as well", Bullets(tuple(one.sentence for one in found.also), "bad")),
            section("Worth knowing", Bullets(found.notes, "warn")),
            section("What was tried", _remedies(found.remedies)),
            section("Forward pass, module by module", _modules(found.modules, "forward")),
            section("Backward pass, module by module", _modules(found.modules[::-1], "backward")),
            section("Operators and their dtypes", *operator_blocks(found.operators)),
        ),
    )


def as_sentence(text: str, operator: str = "") -> str:
    """Return a text as a sentence. The name of an operator with which it begins stays as torch writes it."""
    begins = text if operator and text.startswith(f"{operator} ") else f"{text[:1].upper()}{text[1:]}"
    return f"{begins}."


def breaking(row: ModuleRow) -> str:
    """Return what a module that goes wrong is marked with."""
    reach = row.forward if row.breaks == "forward" else row.backward
    return "wrong values" if reach is not None and not reach.inf and not reach.nan else "first not finite"


def _tiles(found: Examination) -> tuple[tuple[str, str, str], ...]:
    return (
        ("step", f"{found.step:,}", "" if found.learner == "main" else f"of the {found.learner}"),
        ("loss", number(found.loss), "not scaled"),
        ("loss scale", scale(found.loss_scale), ""),
        ("precision", found.precision, f"on {found.device}"),
    )


def verdict_on(remedy: Remedy) -> str:
    """Return whether a remedy helped, in one word or two."""
    return {True: "helps", False: "no help", None: "not checked"}[remedy.helped]


def _remedies(remedies: Sequence[Remedy]) -> Table:
    tones: dict[bool | None, Tone] = {True: "good", False: "bad", None: "warn"}
    rows: list[list[Cell | str]] = [
        [one.text, " ".join(one.words), Cell(verdict_on(one), tones[one.helped]), one.outcome] for one in remedies
    ]
    return table(("remedy", "what to write", "checked", "on this batch"), rows)


def _modules(modules: Sequence[ModuleRow], phase: str) -> Table:
    rows: list[list[Cell | str]] = []
    for row in modules:
        reach, breaks = row.forward if phase == "forward" else row.backward, row.breaks == phase
        if reach is not None or breaks:
            name = Cell(row.name or "(model)", "bad" if breaks else "")
            kind = row.type + (f", {row.calls} calls" if row.calls > 1 else "")
            rows.append([name, kind, row.dtype, *cells(row, reach), Cell(breaking(row), "bad") if breaks else ""])
    scaled = " Gradients carry the loss scale." if phase == "backward" else ""
    note = (
        f"Of all that a module's own operators gave.{scaled} Below 2^-14: share of the nonzero values, which FP16 holds with "
        "fewer bits. Zero: share of all values."
    )
    head = ("module", "type", "dtype", "largest", "of 65,504", "below 2^-14", "zero", "")
    return table(head, rows, numeric=(3, 4, 5, 6), note=note)


def cells(row: ModuleRow, reach: ValueRange | None) -> tuple[Cell, Cell, Cell, Cell]:
    """One pass of a module: largest magnitude, its share of FP16's range, share below 2^-14, share of zeros."""
    if reach is None:
        return (Cell(""), Cell(""), Cell(""), Cell(""))
    broken = "inf" if reach.inf else "nan" if reach.nan else ""
    of_range = reach.largest / FLOAT16.max
    size = Cell(broken, "bad") if broken else Cell(f"{reach.largest:.3g}")
    close = Cell(share(of_range), "bad" if of_range >= 1 else "warn" if of_range >= NEAR else "")
    if broken or not row.type:  # the loss is FP32 in every mode
        close = Cell("")
    return size, close, Cell(share(reach.subnormal), "warn" if reach.subnormal > 0.5 else ""), Cell(share(reach.zero))
