"""Writes reports: decides what kind of folder it is, makes the page, replaces the files whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mptrain.errors import StorageError
from mptrain.report.comparison_page import comparison_page
from mptrain.report.forecast_page import Recommendation, forecast_page
from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Page
from mptrain.report.replay_page import Replay, file_name, replay_page
from mptrain.report.run_page import run_page
from mptrain.report.sweep_page import sweep_page
from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.sweeps import SweepPaths, is_sweep, read_sweep


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The two files of a report; the figures of the second lie in a folder beside it."""

    html: Path
    md: Path


def write_report(path: Path) -> ReportFiles:
    """Write the report of a run, a sweep, or a comparison into its own folder, replacing an earlier one.

    Args:
        path: A run directory, the folder of a sweep, or that of a comparison or recipe.

    Raises:
        StorageError: It is none of them, is damaged beyond reading, or cannot be written to; or its ``figures`` lead
            elsewhere.
    """
    paths = SweepPaths(path)
    return write_page(page_of(path), path, ReportFiles(paths.report_html, paths.report_md))


def write_replay(replay: Replay) -> ReportFiles:
    """Write ``replay-NAME-KEY-VALUE.html`` and ``.md`` into the folder of the run, replacing earlier ones of those words.

    Raises:
        StorageError: The folder cannot be written to, or its ``figures`` lead elsewhere.
    """
    name = file_name(replay)
    return write_page(
        replay_page(replay), replay.root, ReportFiles(replay.root / f"{name}.html", replay.root / f"{name}.md")
    )


def write_forecast(found: Recommendation) -> ReportFiles:
    """Write ``forecast.html`` and ``forecast.md`` into the folder of the run, replacing earlier ones.

    Raises:
        StorageError: The folder cannot be written to, or its ``figures`` lead elsewhere.
    """
    paths = found.opened.run.paths
    return write_page(forecast_page(found), paths.root, ReportFiles(paths.forecast_html, paths.forecast_md))


def write_page(page: Page, folder: Path, files: ReportFiles) -> ReportFiles:
    """Write a page as HTML and as Markdown, whose figures go into the folder ``figures`` beside it.

    Args:
        page: What to write.
        folder: Where ``figures`` lies.
        files: What to write to, in that folder; earlier files are replaced.

    Raises:
        StorageError: As `write_report`.
    """
    figures = SweepPaths(folder).figures
    if figures.is_symlink():  # of a folder that somebody else made
        hint = "remove the link: pictures are written into the report's own folder"
        raise StorageError(f"{figures} is a symbolic link", hint)
    if page.plots():
        with storage_errors(figures, "create"):
            figures.mkdir(exist_ok=True)
    for plot in page.plots():
        write_atomically(figures / f"{plot.name}.svg", plot.svg, durable=False)
    write_atomically(files.md, markdown_page(page, figures.name), durable=False)
    write_atomically(files.html, html(page), durable=False)
    return files


def page_of(path: Path) -> Page:
    """The content of a report.

    Raises:
        StorageError: As `write_report`.
    """
    sweep = read_sweep(path) if is_sweep(path) else None
    if SweepPaths(path).comparison.exists() or (sweep is not None and sweep.kind != "sweep"):
        return comparison_page(SweepPaths(path), sweep)
    if sweep is not None:
        return sweep_page(sweep)
    paths = RunPaths(path)
    if path.is_dir() and not paths.run_json.exists():
        raise StorageError(
            f"{path} is neither a run nor a sweep: it has no {paths.run_json.name} and no {SweepPaths(path).json.name}",
            "name the folder of a run, of a sweep or of a comparison, or write: last",
        )
    return run_page(paths)
