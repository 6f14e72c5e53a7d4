"""Report that recommends a static loss scale for a run, optionally with the measurements of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mptrain.numerics.words import listed
from mptrain.report.forecast_blocks import MeasuredScales, forecast_plot, forecast_table, reasons, recommendation
from mptrain.report.histogram_summary import forecasts, read_histograms
from mptrain.report.page import Bullets, Cell, Page, Section, Table, Text, plots, section
from mptrain.report.run_blocks import (
    OpenedRun,
    commands,
    environment,
    histogram_words,
    open_with_history,
    unfinished_note,
)
from mptrain.report.run_history import MOST_BUCKETS
from mptrain.study.pages.sweep_points import differences, read_measured
from mptrain.system.errors import StorageError

if TYPE_CHECKING:
    from mptrain.numerics.forecast import Forecast

#: Maximum number of differing keys that are named.
_NAMED: Final = 6

#: Config sections whose keys are named first.
_FIRST: Final = ("model", "dataset", "task", "train")


@dataclass(frozen=True)
class Recommendation:
    """Static FP16 loss scales recommended for a run from its gradient histograms, with all that its report shows.

    Attributes:
        forecasts: The forecast of each learner, by name.
        measured: The measurements of a sweep over loss scales; None without one.
        sweep: The folder of that sweep.
        notes: Notes about unreadable records and about a run that has not ended.
    """

    opened: OpenedRun
    forecasts: dict[str, Forecast]
    measured: MeasuredScales | None
    sweep: Path | None
    notes: tuple[str, ...]

    @property
    def unlike(self) -> str:
        """Warning that names the configuration keys in which the sweep differs from this run; empty if it does not."""
        found = differences(self.measured, self.opened.run.config) if self.measured else {}
        if not found:
            return ""
        ordered = sorted(found.items(), key=_weight)
        named = [f"{key} is {own} in the run, {theirs} in the sweep" for key, (own, theirs) in ordered]
        return (
            "The sweep's configuration differs from this run, so its measurements may not apply: "
            f"{listed(named, _NAMED, '; ')}."
        )

    def sentences(self) -> list[str]:
        """Return the recommended loss scale of each learner in words, with learner names if there are several."""
        several = len(self.forecasts) > 1
        return [
            (f"{name}: " if several else "") + recommendation(forecast, self.opened, name if several else "")
            for name, forecast in self.forecasts.items()
        ]

    def __str__(self) -> str:
        """Return the recommendation of each learner with its reasons, and the notes, as lines of text."""
        pairs = zip(self.sentences(), self.forecasts, strict=True)
        said = [line for sentence, name in pairs for line in (sentence, *(f"  {why}" for why in self.reasons(name)))]
        return "\n".join([*said, *(f"note: {one}" for one in self.notes)])

    def reasons(self, learner: str) -> list[str]:
        """Return the reasons for the loss scale recommended for a learner, as sentences."""
        return reasons(self.forecasts[learner])

    def table(self, learner: str) -> Table | None:
        """Return a learner's table with a row for each static loss scale, or None if nothing can be forecast."""
        forecast = self.forecasts[learner]
        return forecast_table(forecast, self.measured) if forecast.scales else None


def recommend(path: str | Path, sweep: str | Path | None = None) -> Recommendation:
    """Recommend static FP16 loss scales for a run, or a loop that `mptrain.watch` recorded, from gradient histograms.

    ``str`` of the result is text for people. Nothing is written, and torch is not imported.

    Args:
        path: The run directory.
        sweep: Folder of a sweep over static scales whose results are shown beside the forecast.

    Raises:
        StorageError: The path is not a run or has no histograms, or the sweep is none or has no static scales.
    """
    path, sweep = Path(path), None if sweep is None else Path(sweep)
    measured = read_measured(sweep) if sweep is not None else None
    opened = open_with_history(path, MOST_BUCKETS)
    running = opened.run.state.status == "running"
    notes = [unfinished_note(opened.dead)] if running else []
    notes += [opened.history.not_finite_elsewhere] if opened.history.not_finite_elsewhere else []
    damages: list[str] = []
    found = read_histograms(opened.run, damages)
    if not found:
        again = "restore the file from a backup, or train again" if damages else "train it"
        hint = f"{again} with {histogram_words(opened.settings)}"
        raise StorageError(f"{path} has no histograms{': ' + damages[0] if damages else ''}", hint)
    return Recommendation(opened, forecasts(opened.run, found), measured, sweep, (*notes, *damages))


def forecast_page(found: Recommendation) -> Page:
    """Return the report of the static loss scales recommended for a run; its last section is the run."""
    opened = found.opened
    return Page(
        over="mptrain recommended loss scale",
        title=opened.title(),
        status=Cell(""),
        lead=" ".join(found.sentences()),
        sections=(
            *(_learner(found, name) for name in found.forecasts),
            section("Notes", Bullets(found.notes, "warn")),
            section("Run", environment(opened.run, opened.settings), *commands(opened.run)),
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
