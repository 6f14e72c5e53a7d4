"""Writing of reports of runs, sweeps and comparisons: detects the kind of folder and writes HTML and Markdown.

Files are replaced atomically. All functions raise StorageError if a folder cannot be written to, or its ``figures`` is
a symbolic link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mptrain import shelves
from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Page
from mptrain.report.run_list import FoundRun, runs_page
from mptrain.report.run_page import run_page
from mptrain.runlog.atomic_files import remove_drafts, storage_errors, write_together
from mptrain.runlog.directory import require_outside_runs
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.sweeps import SweepPaths, is_sweep
from mptrain.system.errors import StorageError


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
