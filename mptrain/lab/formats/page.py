"""Page of the number formats of a network, and the filters with which torchao converts it."""

from __future__ import annotations

from pathlib import Path

from mptrain.lab.formats.report import FormatsReport, band_of, shown
from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Bullets, Cell, Page, Table, Text, section
from mptrain.runlog.atomic_files import storage_errors, write_together
from mptrain.system.words import counted, percent

#: Parameters in the table, those with the largest errors first.
PARAMETERS = 40


def write_formats(folder: Path, report: FormatsReport) -> Path:
    """Write ``formats.html`` and ``formats.md`` to a folder, and return the path of the first.

    If layers to keep were looked for, ``torchao_filters.py`` has the filters.

    Raises:
        StorageError: A file cannot be written.
    """
    with storage_errors(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    page, shown_in = formats_page(report), folder / "formats.html"
    with storage_errors(folder, "write"):
        (folder / "torchao_filters.py").unlink(missing_ok=True)  # it may be of another look
    files = {
        folder / "formats.md": markdown_page(page, "figures"),
        **({} if report.last.keep is None else {folder / "torchao_filters.py": filters(report)}),
        shown_in: html(page),
    }
    write_together(files, durable=False)
    return shown_in


def formats_page(report: FormatsReport) -> Page:
    """Return the page: verdicts, layers to keep, errors of each module, and what was not looked at."""
    first, *more = report.sentences()
    worst = max((band_of(errors) for errors in report.last.formats), key=lambda band: band.most)
    layers = report.layers()
    return Page(
        over="mptrain formats",
        title=report.subject,
        status=Cell(counted(len(report.last.formats), "format"), worst.tone),
        lead=". ".join((first, *more)) + ".",
        sections=(
            section("Formats", report.table()),
            section("Layers to keep in FP32", layers),
            section("Errors by parameter", _parameters(report), Text("Relative errors of the gradients.")),
            section("Limits", Bullets(report.notes())),
        ),
    )


def _parameters(report: FormatsReport) -> Table:
    last = report.last
    names = {name for errors in last.formats for name in errors.parameters}
    largest = {name: max(errors.parameters[name] for errors in last.formats) for name in names}
    chosen = sorted(names, key=lambda name: -largest[name])[:PARAMETERS]
    rows = [(Cell(name), *(Cell(percent(errors.parameters[name])) for errors in last.formats)) for name in chosen]
    every = (Cell("all"), *(Cell(shown(errors), band_of(errors).tone) for errors in last.formats))
    left = len(names) - len(chosen)
    note = f"{left:,} parameters with smaller errors are not shown" if left else ""
    head = ("parameter", *(errors.name for errors in last.formats))
    return Table(head, (every, *rows), frozenset(range(1, len(head))), note)


def filters(report: FormatsReport) -> str:
    """Return a Python module with a filter of torchao for each format, which needs torch alone."""
    kept = {errors.name: sorted(report.filter(errors.name).kept) for errors in report.last.formats}
    lines = [f"    {name!r}: {names!r}," for name, names in kept.items()]
    return "\n".join(
        [
            f'"""Filters for torchao, from mptrain formats: {report.subject}."""',
            "",
            "import functools",
            "",
            "import torch",
            "",
            "# Modules that stay in high precision, by format.",
            "KEEP = {",
            *lines,
            "}",
            "",
            "",
            "def _converts(kept, module, name):",
            '    return isinstance(module, torch.nn.Linear) and name.replace("_orig_mod.", "") not in kept',
            "",
            "",
            "def filter_of(number_format):",
            '    """Return the filter_fn of torchao.quantization.quantize_ for a format, such as "mxfp8"."""',
            "    return functools.partial(_converts, KEEP[number_format])",
            "",
        ]
    )
