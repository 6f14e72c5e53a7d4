"""The page that recommends a static loss scale for a run, beside what a sweep measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mptrain.errors import StorageError
from mptrain.report.curves import MOST_BUCKETS
from mptrain.report.forecast_blocks import forecast_plot, forecast_table, reasons, recommendation, scale_words
from mptrain.report.formatting import counted
from mptrain.report.histogram_summary import forecasts, read_histograms
from mptrain.report.page import Bullets, Cell, Page, Section, Table, Text, plots, section
from mptrain.report.run_blocks import OpenedRun, commands, environment, open_with_history, unfinished_note
from mptrain.report.sweep_points import MeasuredScales, read_measured

if TYPE_CHECKING:
    from mptrain.numerics.forecast import Forecast

#: Keys of a sweep that are named.
_NAMED: Final = 6

#: Sections whose keys are named first.
_FIRST: Final = ("model", "dataset", "task", "train")


@dataclass(frozen=True)
class Recommendation:
    """The static scales that the histograms of a run speak for.

    Attributes:
        opened: The run.
        forecasts: By learner.
        measured: What a sweep found; None without one.
        sweep: Its folder.
        notes: What could not be read, and that the run goes on.
    """

    opened: OpenedRun
    forecasts: dict[str, Forecast]
    measured: MeasuredScales | None
    sweep: Path | None
    notes: tuple[str, ...]

    @property
    def unlike(self) -> str:
        """That the sweep trained something else than this run, and in what; empty where it did not."""
        found = self.measured.unlike(self.opened.run.config) if self.measured else {}
        if not found:
            return ""
        ordered = sorted(found.items(), key=_weight)
        named = [f"{key} is {own} in the run, {theirs} in the sweep" for key, (own, theirs) in ordered]
        more = f"; and {counted(len(named) - _NAMED, 'more key')}" if len(named) > _NAMED else ""
        return f"The sweep is not of this run's configuration, so what it measured says little here: {'; '.join(named[:_NAMED])}{more}."

    def sentences(self) -> list[str]:
        """One for each learner, with its name where there are several."""
        settings = self.opened.settings
        several = len(self.forecasts) > 1
        return [
            (f"{name}: " if several else "") + recommendation(forecast, scale_words(settings, name if several else ""))
            for name, forecast in self.forecasts.items()
        ]

    def reasons(self, learner: str) -> list[str]:
        """Return why, in sentences."""
        return reasons(self.forecasts[learner])

    def table(self, learner: str) -> Table | None:
        """A row for each scale; None where nothing can be foretold."""
        forecast = self.forecasts[learner]
        return forecast_table(forecast, self.measured) if forecast.scales else None


def recommend(path: Path, sweep: Path | None = None) -> Recommendation:
    """Return what the histograms of a run say.

    Args:
        path: The run directory.
        sweep: The folder of a sweep over static scales; None for none.

    Raises:
        StorageError: It is no run, or has no histograms; or the sweep is none, or has no static scales.
    """
    measured = read_measured(sweep) if sweep is not None else None
    opened = open_with_history(path, MOST_BUCKETS)
    running = opened.run.state.status == "running"
    notes = [unfinished_note(opened.dead)] if running else []
    damages: list[str] = []
    found = read_histograms(opened.run, damages)
    if not found:
        again = "restore the file from a copy, or train again" if damages else "train it"
        raise StorageError(
            f"{path} has no histograms{': ' + damages[0] if damages else ''}", f"{again} with diagnostics=histograms"
        )
    return Recommendation(opened, forecasts(opened.run, found), measured, sweep, (*notes, *damages))


def forecast_page(found: Recommendation) -> Page:
    """The page of a recommendation."""
    opened = found.opened
    notes = Bullets(found.notes, "warn")
    return Page(
        over="mptrain, recommended loss scale",
        title=opened.title(),
        status=Cell(""),
        lead=" ".join(found.sentences()),
        sections=(
            *(_learner(found, name) for name in found.forecasts),
            section("The run", notes, environment(opened.run, opened.settings), *commands(opened.run)),
        ),
    )


def _weight(difference: tuple[str, tuple[str, str]]) -> int:
    section_of = difference[0].split(".")[0]
    return _FIRST.index(section_of) if section_of in _FIRST else len(_FIRST)


def _learner(found: Recommendation, name: str) -> Section:
    several = len(found.forecasts) > 1
    figure = f"forecast-{name}" if several else "forecast"
    whose = f", {name}" if several else ""
    shown = forecast_plot(figure, found.forecasts[name], whose, found.measured)
    return section(
        f"Static scales for {name}" if several else "Static scales",
        Bullets(tuple(found.reasons(name))),
        plots(shown),
        found.table(name),
        Text(found.unlike, "warn") if found.unlike else None,
    )
