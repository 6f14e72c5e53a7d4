"""Names: what a run may be called, and what is inside of its directory. No other module spells them out.

Names of runs stay inside the root of all runs, and fresh ones nobody else has. This module names things; it neither reads nor
writes them.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mptrain.errors import ConfigError
from mptrain.masking import masked

RUN_JSON = "run.json"
STEPS = "steps.jsonl"
EVENTS = "events.jsonl"
EPOCHS = "epochs.csv"
HISTOGRAMS = "histograms.jsonl"
CAPTIONS = "captions.json"  # in the folder of samples
RECORD_FILES = (STEPS, EVENTS, EPOCHS, HISTOGRAMS)

MAX_PART_BYTES = 255  # the longest file name of every common Linux file system
_MAX_LABEL = 120


class PathInside:
    """A path inside the folder that is the ``root`` of a value.

    Args:
        name: Of the file or folder.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: Any, owner: type) -> Path:
        return Path(paths.root, self._name)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Every path of one run.

    Attributes:
        root: The run directory itself.
    """

    root: Path

    #: Identity and status of the run (see `mptrain.runlog.run_state.RunState`).
    run_json = PathInside(RUN_JSON)
    #: The fully resolved configuration, YAML.
    config = PathInside("config.yaml")
    #: The overrides that were given on the command line, a YAML list of strings.
    overrides = PathInside("overrides.yaml")
    #: One line of strict JSON for each attempted step and learner.
    steps = PathInside(STEPS)
    #: Overflows, scale changes, evaluations and everything else that happened, strict JSON lines.
    events = PathInside(EVENTS)
    #: One row for each epoch, with a header, for spreadsheets.
    epochs = PathInside(EPOCHS)
    #: One line of strict JSON for each step that was looked at; made by the first of them.
    histograms = PathInside(HISTOGRAMS)
    #: Description of the data: labels, preparation, files; JSON.
    data = PathInside("data.json")
    #: The final numbers, schema-versioned JSON.
    summary = PathInside("summary.json")
    #: The folder of checkpoints (see `mptrain.runlog.checkpoints.CheckpointStore`).
    checkpoints = PathInside("checkpoints")
    #: The folder of what was kept after a numeric stop.
    failure = PathInside("failure")
    #: Stack of every thread when the run stood still (see `mptrain.engine.watchdog`); text.
    stalls = PathInside("stalls.txt")

    def stalls_of(self, rank: int) -> Path:
        """The same of one rank; the first one's has no number."""
        return self.stalls if rank == 0 else self.root / f"stalls-rank{rank}.txt"

    #: The folder of what the task exhibits after each validation: pictures, texts, recordings, and their captions.
    samples = PathInside("samples")
    #: The folder of weights that were exported.
    export = PathInside("export")
    #: The folder of what looks at single steps have found (see `mptrain.runlog.diagnosis_file`).
    diagnosis = PathInside("diagnosis")
    #: The pictures of the report in Markdown.
    figures = PathInside("figures")

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders but those of trackers, which may hold what they like."""
        return (self.checkpoints, self.failure, self.samples, self.export, self.diagnosis, self.figures)

    #: Output of the experiment tracker; made only where there is one.
    logger_log = PathInside("logger.log")
    #: The file whose kernel lock says that a process is writing this run.
    lock = PathInside("run.lock")
    #: The self-contained report for a browser.
    report_html = PathInside("report.html")
    #: The same report in Markdown.
    report_md = PathInside("report.md")
    #: Answer to which static loss scale is right, for a browser.
    forecast_html = PathInside("forecast.html")
    #: The same in Markdown.
    forecast_md = PathInside("forecast.md")

    def records(self) -> dict[str, Path]:
        """The append-only record files, by the names that checkpoints use for their lengths; one that is missing is empty."""
        return {name: self.root / name for name in RECORD_FILES}


def check_run_name(name: str) -> str:
    """The name, if ``ROOT/NAME`` is a usable path inside ROOT; sub-folders as in ``a/b`` are allowed.

    Raises:
        ConfigError: Empty, absolute, with ``.`` or ``..`` or empty parts, with control characters, or with a
            part that starts with ``-`` or ``.``, has blanks at its ends, or is too long.
    """
    why = next((why for part in name.split("/") if (why := name_problem(part))), "")
    if name.startswith("/"):
        why = "is an absolute path"
    if not name:
        why = "is empty"
    if why:
        raise ConfigError(f"run.name={name!r} {why}", "write a name like resnet50 or sweep/seed0, inside run.root")
    return name


def fresh_name(label: str, moment: datetime | None = None) -> tuple[str, str]:
    """A date folder and a run folder that no other run has chosen, except by a chance of 1 in 65,536.

    Args:
        label: ``MODEL-DATASET-PRECISION``; characters that are awkward in a path become ``_``.
        moment: The local time; now when not given.

    Returns:
        ``(YYYY-MM-DD, HH-MM-SS-LABEL-xxxx)`` where xxxx is random and hexadecimal.
    """
    moment = moment or datetime.now()
    plain = re.sub(r"[^A-Za-z0-9._+-]", "_", masked(label))[:_MAX_LABEL]
    return moment.strftime("%Y-%m-%d"), f"{moment:%H-%M-%S}-{plain}-{secrets.token_hex(2)}"


def name_problem(part: str) -> str:
    """Return why one part of a name cannot be used, as in ``name {objection}``; empty if it can."""
    if part in ("", ".", ".."):
        return f"has {part!r} as a part of the path"
    if part[0] in "-.":
        return f"has a part that starts with {part[0]!r}"
    if part != part.strip():
        return "has blanks around a part"
    if any(unicodedata.category(character)[0] == "C" or character in "\u2028\u2029" for character in part):
        return "has control characters"
    if len(part.encode()) > MAX_PART_BYTES:
        return f"has a part longer than {MAX_PART_BYTES} bytes"
    return ""
