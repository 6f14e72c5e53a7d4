"""Rendering and writing of report pages as HTML and as Markdown. Only this module handles markup and escapes text.

Values reach the templates as plain text. The template environment escapes every value: markupsafe escapes HTML, and
`markdown` escapes Markdown so that names are shown literally.

Files are replaced atomically. All functions raise StorageError if a folder cannot be written to, or its ``figures`` is
a symbolic link.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mptrain import __version__, shelves
from mptrain.report.page import Block, Page, Plot
from mptrain.report.plotting import inlined
from mptrain.report.run_list import FoundRun, runs_page
from mptrain.report.run_page import run_page
from mptrain.runlog.atomic_files import remove_drafts, storage_errors, write_together
from mptrain.runlog.directory import require_outside_runs
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.sweeps import SweepPaths, is_sweep
from mptrain.system.errors import StorageError
from mptrain.system.words import elided, plain

TEMPLATES: Final = Path(__file__).parent / "templates"

#: uPlot (unchanged, from `npm pack uplot`), which draws the figures that can be zoomed, with its licence.
UPLOT: Final = TEMPLATES / "vendor" / "uplot"

#: Content security policy: the page loads nothing, and runs only the script with this SHA-256.
POLICY: Final = (
    "default-src 'none'; script-src 'sha256-{}'; style-src 'unsafe-inline'; img-src data:; media-src data:; "
    "base-uri 'none'; form-action 'none'"
)

#: Characters of one name or sentence at most. The middle of a longer text is left out.
MOST_LETTERS: Final = 1500


def html(page: Page, reload: int = 0) -> str:
    """Render a report page as one self-contained HTML document with all figures and its script inside.

    ``reload`` is the number of seconds after which the page reloads itself; 0 for never.
    """
    curves = any(plot.charts for plot in page.plots())
    style, script = TEMPLATES / "style.css", TEMPLATES / "page.js"
    script_text = _texts(UPLOT / "uPlot.iife.min.js", script) if curves else _texts(script)
    return _HTML.get_template("page.html.j2").render(
        page=page,
        style=Markup(_texts(UPLOT / "uPlot.min.css", style) if curves else _texts(style)),
        script=Markup(script_text),
        policy=Markup(POLICY.format(base64.b64encode(hashlib.sha256(script_text.encode()).digest()).decode())),
        reload=reload,
        version=__version__,
    )


def fragment(blocks: Sequence[Block]) -> str:
    """Render blocks of a report as HTML without a page and its style, for a notebook, no wider than text is read."""
    return _HTML.get_template("notebook.html.j2").render(blocks=blocks)


def _texts(*files: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def markdown_page(page: Page, figures: str) -> str:
    """Render a report page as a Markdown document, whose figures (``NAME.svg``) are in a folder relative to it."""
    return _MARKDOWN.get_template("page.md.j2").render(page=page, figures=figures, version=__version__)


def _as_html(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    # A non-breaking space keeps a number and its unit on one line.
    return Markup(str(escape(elided(value, MOST_LETTERS))).replace(" %", "&nbsp;%"))


def _as_markdown(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(elided(value, MOST_LETTERS)))


def _svg(plot: Plot) -> Markup:
    return Markup(inlined(plot.svg))


def _path(text: str) -> Markup:
    return Markup(quote(os.fsencode(text)))


def _charts(plot: Plot) -> str:
    """Return the data of a figure as JSON, fractions with the nine digits that identify every FP32 number."""

    def neutral(value: Any) -> Any:
        if isinstance(value, float):
            if not math.isfinite(value):
                return None
            return int(value) if value.is_integer() else float(f"{value:.9g}")
        if isinstance(value, tuple):
            return [neutral(each) for each in value]
        return elided(value, MOST_LETTERS) if isinstance(value, str) else value

    charts = [
        asdict(chart, dict_factory=lambda pairs: {key: neutral(value) for key, value in pairs}) for chart in plot.charts
    ]
    return json.dumps(charts, separators=(",", ":"))


def _environment(finalize: Any, **filters: Any) -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(filters)
    return made


_HTML: Final = _environment(
    _as_html,
    svg=_svg,
    charts=lambda plot: escape(_charts(plot)),
    lines=lambda text: escape(plain(text, lines=True)),
    wav=lambda data: Markup("data:audio/wav;base64,") + base64.b64encode(data).decode(),
    png=lambda data: Markup("data:image/png;base64,") + base64.b64encode(data).decode(),
    path=_path,
)
_MARKDOWN: Final = _environment(
    _as_markdown, fenced=lambda text, language="": Markup(fenced(text, language)), path=_path
)


#: Characters that are special in Markdown, including its tables, mathematics and raw HTML.
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~$!&<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LINKS: Final = re.compile(r":(?=//)|(?<=www)\.|@", re.IGNORECASE)
_START: Final = re.compile(r"^([-+#=]|\d+[.)](?=\s|$))")


def markdown(text: object) -> str:
    """Escape a line of text so that Markdown shows it literally, both in a paragraph and in a table cell."""
    escaped = _SPECIAL.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), plain(text))
    escaped = _LINKS.sub(lambda match: f"&#{ord(match[0])};", escaped)
    return _START.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", escaped)


def fenced(text: object, language: str = "") -> str:
    """Return text as a fenced Markdown code block whose fence is longer than any run of backticks in the text."""
    code = plain(text, lines=True)
    longest = max((len(backticks) for backticks in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """A written report: its page, and the paths of its two files.

    They are the HTML page, which contains its figures, and the Markdown document, which shows those of the folder
    ``figures`` beside it.
    """

    page: Page
    html: Path
    md: Path


def write_report(path: Path, *, reload: int = 0) -> ReportFiles:
    """Write the report of a run, sweep, comparison or recipe into its folder, and replace an earlier report.

    ``reload`` is the number of seconds after which the HTML page reloads itself; 0 for never. Raise StorageError if the
    path is none of these, or is too damaged to read.
    """
    paths = SweepPaths(path)
    return write_page(page_of(path), path, paths.report_html, paths.report_md, reload=reload)


def write_runs(folder: Path, runs: Sequence[FoundRun], notes: Sequence[str], key: str | None = None) -> ReportFiles:
    """Write the list of runs below a folder, sorted by a key, into the folder: ``runs.html`` and ``runs.md``."""
    require_outside_runs(folder)
    return write_page(runs_page(folder, runs, notes, key), folder, folder / "runs.html", folder / "runs.md")


def write_page(page: Page, folder: Path, html_file: Path, markdown_file: Path, *, reload: int = 0) -> ReportFiles:
    """Write a report page as HTML and as Markdown, with the figures of the latter in the folder ``figures``.

    ``folder`` contains the files and ``figures``. Existing files are replaced. The HTML page reloads itself after
    ``reload`` seconds; 0 for never.
    """
    figures = SweepPaths(folder).figures
    if figures.is_symlink():  # an untrusted folder could redirect the writes
        hint = "remove the link: figures are written only inside the report's own folder"
        raise StorageError(f"{figures} is a symbolic link", hint)
    files: dict[Path, str | bytes] = {figures / f"{plot.name}.svg": plot.svg for plot in page.plots()}
    files |= {markdown_file: markdown_page(page, figures.name), html_file: html(page, reload)}
    if page.plots():
        with storage_errors(figures, "create"):
            figures.mkdir(exist_ok=True)
    for path in files:
        remove_drafts(path.parent, path.name)
    # A report that a power failure destroys can be written again from the records.
    write_together(files, durable=False)
    return ReportFiles(page, html_file, markdown_file)


def page_of(path: Path) -> Page:
    """Return the report page of a run, sweep, comparison or recipe; raise StorageError for any other folder."""
    if is_sweep(path) or SweepPaths(path).comparison.exists():
        page: Page = shelves.load("study", f"the report of {path}, which is no run,").page_of(path)
        return page
    paths = RunPaths(path)
    if path.is_dir() and not paths.run_json.exists():
        raise StorageError(
            f"{path} is neither a run nor a sweep: it has no {paths.run_json.name} and no {SweepPaths(path).json.name}",
            "give the folder of a run, sweep or comparison, or write: last",
        )
    return run_page(paths)
