"""The names inside a run directory. No other module spells them out.

This module names things; it neither reads nor writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN_JSON = "run.json"
STEPS = "steps.jsonl"
EVENTS = "events.jsonl"
EPOCHS = "epochs.csv"
HISTOGRAMS = "histograms.jsonl"
CAPTIONS = "captions.json"  # in the folder of samples
RECORD_FILES = (STEPS, EVENTS, EPOCHS, HISTOGRAMS)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Every path of one run.

    Attributes:
        root: The run directory itself.
    """

    root: Path

    @property
    def run_json(self) -> Path:
        """What the run is and how it stands (see `mptrain.runlog.state.RunState`)."""
        return self.root / RUN_JSON

    @property
    def config(self) -> Path:
        """The fully resolved configuration, YAML."""
        return self.root / "config.yaml"

    @property
    def overrides(self) -> Path:
        """The overrides that were given on the command line, a YAML list of strings."""
        return self.root / "overrides.yaml"

    @property
    def steps(self) -> Path:
        """One line of strict JSON for each attempted step and learner."""
        return self.root / STEPS

    @property
    def events(self) -> Path:
        """Overflows, scale changes, evaluations and everything else that happened, strict JSON lines."""
        return self.root / EVENTS

    @property
    def epochs(self) -> Path:
        """One row for each epoch, with a header, for spreadsheets."""
        return self.root / EPOCHS

    @property
    def histograms(self) -> Path:
        """One line of strict JSON for each step that was looked at; made by the first of them."""
        return self.root / HISTOGRAMS

    @property
    def data(self) -> Path:
        """What the data were: labels, preparation, files; JSON."""
        return self.root / "data.json"

    @property
    def summary(self) -> Path:
        """The final numbers, schema-versioned JSON."""
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints (see `mptrain.runlog.checkpoints.CheckpointStore`)."""
        return self.root / "checkpoints"

    @property
    def failure(self) -> Path:
        """The folder of what was kept after a numeric stop."""
        return self.root / "failure"

    @property
    def stalls(self) -> Path:
        """Where every thread stood when the run stood still (see `mptrain.engine.watchdog`); text."""
        return self.root / "stalls.txt"

    def stalls_of(self, rank: int) -> Path:
        """The same of one rank; the first one's has no number."""
        return self.stalls if rank == 0 else self.root / f"stalls-rank{rank}.txt"

    @property
    def samples(self) -> Path:
        """The folder of what the task exhibits after each validation: pictures, texts, recordings, and their captions."""
        return self.root / "samples"

    @property
    def export(self) -> Path:
        """The folder of weights that were exported."""
        return self.root / "export"

    @property
    def diagnosis(self) -> Path:
        """The folder of what looks at single steps have found (see `mptrain.runlog.diagnosis`)."""
        return self.root / "diagnosis"

    @property
    def figures(self) -> Path:
        """The pictures of the report in Markdown."""
        return self.root / "figures"

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders but those of trackers, which may hold what they like."""
        return (self.checkpoints, self.failure, self.samples, self.export, self.diagnosis, self.figures)

    @property
    def logger_log(self) -> Path:
        """What the experiment tracker printed; made only where there is one."""
        return self.root / "logger.log"

    @property
    def lock(self) -> Path:
        """The file whose kernel lock says that a process is writing this run."""
        return self.root / "run.lock"

    @property
    def report_html(self) -> Path:
        """The self-contained report for a browser."""
        return self.root / "report.html"

    @property
    def report_md(self) -> Path:
        """The same report in Markdown."""
        return self.root / "report.md"

    @property
    def forecast_html(self) -> Path:
        """Which static loss scale is right, for a browser."""
        return self.root / "forecast.html"

    @property
    def forecast_md(self) -> Path:
        """The same in Markdown."""
        return self.root / "forecast.md"

    def records(self) -> dict[str, Path]:
        """The append-only record files, by the names that checkpoints use for their lengths; one that is missing is empty."""
        return {name: self.root / name for name in RECORD_FILES}
