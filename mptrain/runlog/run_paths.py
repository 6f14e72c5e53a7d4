"""Names of runs, and of all files in a run directory. No other module spells out these file names.

Run names cannot lead out of ``run.root``, and generated names are unique. This module only builds names; it must not
read or write files.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mptrain.system.errors import ConfigError
from mptrain.system.masking import masked

RUN_JSON = "run.json"
STEPS = "steps.jsonl"
EVENTS = "events.jsonl"
EPOCHS = "epochs.csv"
HISTOGRAMS = "histograms.jsonl"
CAPTIONS = "captions.json"  # in the samples folder
#: First key of the configuration of a watched loop (`mptrain.watch`), which no run of mptrain has.
WATCHED = "watched"
RECORD_FILES = (STEPS, EVENTS, EPOCHS, HISTOGRAMS)

MAX_PART_BYTES = 255  # limit of a file name on common Linux file systems
_MAX_LABEL = 120


class PathInside:
    """Descriptor for a class attribute: the path of one file or folder inside the ``root`` of its object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: Any, owner: type) -> Path:
        return Path(paths.root, self._name)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of all files and folders in a run directory, which need not exist."""

    root: Path

    #: Identity and status of the run (see `mptrain.runlog.run_state.RunState`).
    run_json = PathInside(RUN_JSON)
    #: The fully resolved configuration, YAML.
    config = PathInside("config.yaml")
    #: The overrides that were given on the command line, a YAML list of strings.
    overrides = PathInside("overrides.yaml")
    #: One line of strict JSON for each attempted step and learner.
    steps = PathInside(STEPS)
    #: Overflows, scale changes, evaluations and all other events, as lines of strict JSON.
    events = PathInside(EVENTS)
    #: One CSV row for each epoch, with a header.
    epochs = PathInside(EPOCHS)
    #: One line of strict JSON for each sampled step; created with the first one.
    histograms = PathInside(HISTOGRAMS)
    #: Description of the data: labels, preparation, files; JSON.
    data = PathInside("data.json")
    #: Digests of the samples that the weights were trained on (see `mptrain.runlog.record_writer`), 8 bytes each.
    trained_samples = PathInside("trained_samples.bin")
    #: The final numbers, JSON with a schema number.
    summary = PathInside("summary.json")
    #: Folder of checkpoints (see `mptrain.runlog.checkpoints.CheckpointStore`).
    checkpoints = PathInside("checkpoints")
    #: Folder of data saved when the run stops because of its numerics.
    failure = PathInside("failure")
    #: Stack of every thread when the run stalled (see `mptrain.engine.interrupt`), as text.
    stalls = PathInside("stalls.txt")

    def stalls_of(self, rank: int) -> Path:
        """Return the path of ``stalls`` (stacks of a stalled process) of a rank; for rank 0 it has no number."""
        return self.stalls if rank == 0 else self.root / f"stalls-rank{rank}.txt"

    #: Folder for each rank of a watched loop with records of its own: events, and with sharded parameters everything.
    ranks = PathInside("ranks")
    #: Folder of samples that the task shows after each validation: images, texts, audio, and their captions.
    samples = PathInside("samples")
    #: Folder of exported weights.
    export = PathInside("export")
    #: Folder of diagnoses of single steps (see `mptrain.runlog.diagnosis_file`).
    diagnosis = PathInside("diagnosis")
    #: Figures of the Markdown report.
    figures = PathInside("figures")

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders inside the run directory, except those of experiment trackers, whose content is not controlled."""
        return (self.checkpoints, self.failure, self.ranks, self.samples, self.export, self.diagnosis, self.figures)

    #: Output of the experiment tracker; created only if the run uses one.
    logger_log = PathInside("logger.log")
    #: Lock file; a process that writes this run holds its kernel lock.
    lock = PathInside("run.lock")
    #: The self-contained HTML report.
    report_html = PathInside("report.html")
    #: The report in Markdown.
    report_md = PathInside("report.md")
    #: Forecast of the best static loss scale, HTML.
    forecast_html = PathInside("forecast.html")
    #: Forecast of the best static loss scale, Markdown.
    forecast_md = PathInside("forecast.md")

    def records(self) -> dict[str, Path]:
        """Return the append-only record files (steps, events, epochs, histograms) by file name; they need not exist."""
        return {name: self.root / name for name in RECORD_FILES}


def check_run_name(name: str) -> str:
    """Return the name of a run after checking that ``ROOT/NAME`` is a valid path inside ROOT; it may have subfolders.

    Raises:
        ConfigError: The name is empty or absolute, or has control characters, or a part of it is empty, ``.`` or
            ``..``, starts with ``-`` or ``.``, has blanks at its ends, or is too long.
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
    """Generate the names of a date folder and, inside it, of the folder of a new run or sweep.

    These are ``YYYY-MM-DD`` and ``HH-MM-SS-LABEL-xxxx`` in local time, where xxxx is random and hexadecimal: two runs
    that start in the same second with the same label collide with a probability of 1 in 65,536. In the label,
    characters other than letters, digits and ``._+-`` become ``_``.
    """
    moment = moment or datetime.now()
    plain = re.sub(r"[^A-Za-z0-9._+-]", "_", masked(label))[:_MAX_LABEL]
    return moment.strftime("%Y-%m-%d"), f"{moment:%H-%M-%S}-{plain}-{secrets.token_hex(2)}"


def name_problem(part: str) -> str:
    """Return why a part of a run name is invalid, such as ``has control characters``; empty if it is valid."""
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
