"""Report of a step diagnosis: the cause of non-finite values in a training step, by module, and the remedies tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mptrain.numerics.formats import FLOAT16
from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Bullets, Cell, Facts, Page, Table, Text, Tiles, Tone, facts, section, table
from mptrain.report.run_blocks import operator_blocks
from mptrain.runlog.atomic_files import storage_errors, write_together
from mptrain.runlog.diagnosis_file import (
    CauseKind,
    Examination,
    ModuleRow,
    Remedy,
    ValueRange,
    file_stem,
    write_examination,
)
from mptrain.system.words import number, scale, share

#: Name of each cause.
NAMES: Final[dict[CauseKind, str]] = {
    "input": "the batch",
    "weights": "the weights",
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass alone",
    "refused": "an operator that torch refuses",
    "updates": "the updates before this step",
    "evaluation": "an evaluation",
    "none": "nothing",
}

#: Hint for a step whose values are all finite.
_FINITE: Final = (
    "Finite values can still be wrong: mptrain doctor with the same words checks the gradients at every loss scale"
)

#: Limits of the test of a fix.
_TESTED: Final = "Tested on the batch of this step only; gradients of later steps may be larger."

#: Label of a module in which inf or NaN arises.
NOT_FINITE: Final = "first not finite"

#: Share of the FP16 range from which a number in the table is highlighted.
NEAR: Final = 0.25


def write_diagnosis(folder: Path, examined: Examination, words: Sequence[str] = ()) -> Path:
    """Write the report of an examined step to a folder as JSON, Markdown and HTML, and return the path of the latter.

    ``words`` are the overrides that differ from those of the run. Earlier files of the same step and
    overrides are replaced.
    """
    with storage_errors(folder, "create"):
        folder.mkdir(exist_ok=True)
    page = diagnosis_page(examined)
    stem = file_stem(examined, words)
    write_examination(folder / f"{stem}.json", examined)
    shown = folder / f"{stem}.html"
    write_together({folder / f"{stem}.md": markdown_page(page, "figures"), shown: html(page)}, durable=False)
    return shown


def diagnosis_page(examined: Examination) -> Page:
    """Return the report of an examined training step: its cause of failure, values of all modules, remedies.

    Its last section is on operators.
    """
    overflows = examined.cause == "backward" and any(
        row.breaks and breaking(row) == NOT_FINITE for row in examined.modules
    )
    as_usual = overflows and any(remedy.helped and not remedy.words for remedy in examined.remedies)
    tone: Tone = "good" if examined.cause == "none" or as_usual else "bad"
    failed = "skipped, as usual" if as_usual else f"fails in {NAMES[examined.cause]}"
    return Page(
        over="mptrain step diagnosis",
        title=examined.subject,
        status=Cell("finite" if examined.cause == "none" else failed, tone),
        lead=f"{_as_sentence(examined.verdict, examined.operator)}{f' {_FINITE}.' if examined.cause == 'none' else ''}",
        sections=(
            section("Step", Tiles(_tiles(examined)), Bullets(examined.remarks)),
            section("Other problems", Bullets(tuple(cause.sentence for cause in examined.also), "bad")),
            section("Notes", Bullets(examined.notes, "warn")),
            section("Fixes tested", _remedies(examined.remedies), Text(_TESTED) if examined.remedies else None),
            section("Values by module", _modules(examined.modules)),
            section("Operator dtypes", *operator_blocks(examined.operators)),
        ),
    )


def _as_sentence(text: str, operator: str = "") -> str:
    """Return a text as a sentence: with a capital, unless it starts with the name of an operator, and a period."""
    begins = text if operator and text.startswith(f"{operator} ") else f"{text[:1].upper()}{text[1:]}"
    return f"{begins}."


def breaking(row: ModuleRow) -> str:
    """Return the label of the module in which a step's values become wrong: ``first not finite``, ``wrong values``."""
    reach = row.forward if row.breaks == "forward" else row.backward
    return "wrong values" if reach is not None and not reach.inf and not reach.nan else NOT_FINITE


def _tiles(examined: Examination) -> tuple[tuple[str, str, str], ...]:
    return (
        ("step", f"{examined.step:,}", "" if examined.learner == "main" else f"of the {examined.learner}"),
        ("loss", number(examined.loss), "unscaled"),
        ("loss scale", scale(examined.loss_scale), ""),
        ("precision", examined.precision, f"on {examined.device}"),
    )


def _remedies(remedies: Sequence[Remedy]) -> Facts:
    outcomes = {True: "helps", False: "no help", None: "not checked"}
    rows = []
    for remedy in remedies:
        words = f" ({' '.join(remedy.words)})" if remedy.words else ""
        rows.append((outcomes[remedy.helped], f"{remedy.text}{words}: {remedy.outcome}"))
    return facts(*rows)


#: Columns of each pass, and the order in which a narrow terminal leaves columns out.
_PASS: Final = ("largest", "of 65,504", "below 2^-14", "zero")
_OPTIONAL: Final = (
    "backward zero", "forward zero", "type", "backward below 2^-14", "forward below 2^-14", "dtype",
    "backward of 65,504", "forward of 65,504",
)  # fmt: skip


def _modules(modules: Sequence[ModuleRow]) -> Table:
    rows: list[list[Cell | str]] = []
    for row in modules:
        name = Cell(row.name or "(model)", "bad" if row.breaks else "")
        kind = row.type + (f", {row.calls} calls" if row.calls > 1 else "")
        mark = Cell(f"{breaking(row)} ({row.breaks})", "bad") if row.breaks else ""
        rows.append([name, kind, row.dtype, *_cells(row, row.forward), *_cells(row, row.backward), mark])
    note = (
        "Covers all outputs of a module's own operators. Backward: gradients, multiplied by the loss scale. Of 65,504: "
        "largest magnitude relative to FP16's maximum. Below 2^-14: share of the nonzero values that are subnormal in "
        "FP16. Zero: share of all values."
    )
    head = ("module", "type", "dtype", *(f"{phase} {name}" for phase in ("forward", "backward") for name in _PASS), "")
    return table(head, rows, range(3, 11), note, _OPTIONAL)


def _cells(row: ModuleRow, reach: ValueRange | None) -> tuple[Cell, Cell, Cell, Cell]:
    """Return the columns `_PASS` of a module's values in one pass; empty without a range."""
    if reach is None:
        return (Cell(""), Cell(""), Cell(""), Cell(""))
    broken = "inf" if reach.inf else "nan" if reach.nan else ""
    of_range = reach.largest / FLOAT16.max
    size = Cell(broken, "bad") if broken else Cell(f"{reach.largest:.3g}")
    close = Cell(share(of_range), "bad" if of_range >= 1 else "warn" if of_range >= NEAR else "")
    if broken or not row.type:  # the loss is FP32 in every mode
        close = Cell("")
    return size, close, Cell(share(reach.subnormal), "warn" if reach.subnormal > 0.5 else ""), Cell(share(reach.zero))
