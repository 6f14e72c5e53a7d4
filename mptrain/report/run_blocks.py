"""Blocks shared by reports of one run and of several runs."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mptrain.config.config_diff import flat
from mptrain.report.page import Block, Cell, Code, Facts, Fold, Picture, Sound, Table, Text, Tone, facts, table
from mptrain.report.run_history import History, read_history
from mptrain.runlog.directory import open_run
from mptrain.runlog.run_paths import CAPTIONS, WATCHED
from mptrain.runlog.run_reader import Run, read_run
from mptrain.runlog.sweeps import SweepJob
from mptrain.system.errors import StorageError
from mptrain.system.files import read_bytes, read_text
from mptrain.system.words import counted, duration, moment


@dataclass(frozen=True)
class OpenedRun:
    """A run opened for a report: its small files, and the histories of its steps and events.

    Attributes:
        settings: Its configuration as dotted key to value; empty if it has none.
        dead: Whether its status is running although no process holds its lock.
    """

    run: Run
    history: History
    settings: dict[str, Any]
    dead: bool

    @property
    def status(self) -> Cell:
        """Status of the run in words, such as ``failed (exit code 4)``, as a table cell with a tone."""
        state = self.run.state
        code = f" (exit code {state.exit_code})" if state.exit_code else ""
        match state.status:
            case "done":
                return Cell("done", "good")
            case "failed":
                return Cell(f"failed{code}", "bad")
            case "preempted":
                return Cell(f"stopped by a signal{code}", "warn")
            case _:
                return Cell("killed, or the machine went down", "bad") if self.dead else Cell("running")

    @property
    def is_watched(self) -> bool:
        """True if another program trained, watched by `mptrain.watch`."""
        return is_watched(self.settings)

    @property
    def metric(self) -> str:
        """Name of the task's metric, such as ``top1``; empty if it has none."""
        return str(self.run.summary.get("metric_name") or "")

    @property
    def skip_rate(self) -> float | None:
        """Share of skipped steps over all learners, 0 to 1; None if no step is recorded."""
        learners = self.history.learners.values()
        attempts = sum(learner.attempts for learner in learners)
        return sum(learner.refused for learner in learners) / attempts if attempts else None

    @property
    def left_out(self) -> str:
        """Sentence part on the backward passes of a watched loop that no update followed; empty if there are none."""
        count = sum(self.history.left_out.values())
        return f"{counted(count, 'backward pass', 'backward passes')} followed by no update" if count else ""

    def title(self) -> str:
        """Return the title of the run's report: ``MODEL on DATASET, PRECISION``, or the run's id if one is unknown."""
        names = [str(self.settings.get(f"chosen.{group}") or "") for group in ("model", "dataset", "precision")]
        model = " ".join(dict.fromkeys([names[0], str(self.settings.get("model.name") or names[0])]))
        return f"{model} on {names[1]}, {names[2]}" if all(names) else self.run.state.id


_JOB_TONES: Final[dict[str, Tone]] = {"done": "good", "failed": "bad", "interrupted": "warn", "preempted": "warn"}


def job_status(job: SweepJob) -> Cell:
    """Return the status of a job (run) of a sweep with its exit code, if that is not 0, as a table cell."""
    return Cell(f"{job.status} ({job.code})" if job.code else job.status, _JOB_TONES.get(job.status, ""))


def open_with_history(path: Path, most: int) -> OpenedRun:
    """Open the run in a directory, and read all its records into curves of at most ``most`` buckets (points).

    Raise StorageError if the directory is not a run, or one of its small files is damaged.
    """
    run = read_run(path)
    dead = run.state.status == "running" and open_run(path).holder() is None
    history = read_history(run, most)
    last = run.state.attempts[-1].to_step if run.state.attempts else None
    ended = run.summary.get("steps") or 0
    if history.steps < ended and (run.state.status == "done" or last == ended):  # else the summary is older
        history.notes.append(f"{run.paths.steps.name} lacks steps: it has {history.steps:,} of the {ended:,} attempted")
    return OpenedRun(run, history, flat(run.config), dead)


def unfinished_note(dead: bool) -> str:
    """Return a sentence for the report of a run whose status is ``running``.

    A ``dead`` run was killed, as no process holds its lock.
    """
    if dead:
        return "the run has not ended (it was killed, or the machine went down): this covers the steps so far"
    return "the run is still running: this covers the steps so far"


def environment(run: Run, settings: dict[str, Any]) -> Facts:
    """Return a run's device, versions, commit, seed and attempts as a block of names and values."""
    state = run.state
    attempts = state.attempts
    threads = run.summary.get("threads")
    spans = [
        f"{moment(attempt.started)} on {attempt.host}, from step {attempt.from_step:,}"
        + (f" to step {attempt.to_step:,}" if attempt.to_step is not None else "")
        + (f", {duration(attempt.seconds)}" if attempt.seconds is not None else "")
        for attempt in attempts[-5:]
    ]
    earlier = f"{counted(len(attempts) - 5, 'earlier attempt')}; " if len(attempts) > 5 else ""
    return facts(
        ("run", state.id),
        ("device", state.device),
        ("ranks", f"{state.ranks}, {settings.get('distributed.kind', '')}" if state.ranks > 1 else ""),
        ("CPU threads", str(threads) if threads else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in state.versions.items())),
        ("commit", state.git_sha or ""),
        ("seed", str(settings.get("seed", ""))),
        ("attempts" if len(attempts) > 1 else "started", earlier + "; ".join(spans)),
    )


def commands(run: Run) -> list[Block]:
    """Return the parts and exact command of a run and, collapsed, its resolved configuration, as blocks of a report."""
    blocks: list[Block] = [facts(*run.state.parts.items()), Code(run.state.command, "sh")]
    if run.config:
        blocks.append(Fold("Resolved configuration", (Code(run.config, "yaml"),)))
    else:
        blocks.append(Text("There is no config.yaml.", "warn"))
    return blocks


#: The scaler of a constant loss scale.
_STATIC: Final = "mptrain.scaler.StaticScaler"


def is_watched(settings: Mapping[str, Any]) -> bool:
    """Return whether another program trained, watched by `mptrain.watch`; ``settings`` are by dotted key."""
    return any(key.partition(".")[0] == WATCHED for key in settings)


def scale_words(settings: Mapping[str, Any], learner: str = "") -> str:
    """Return the overrides that set a static loss scale, up to its value: ``precision=fp16_static scaler.scale=``.

    Only the overrides that the run's configuration (``settings``, by dotted key) needs are included. ``learner`` is
    empty if the run has only one. For a watched loop they are arguments of torch's scaler, which then never grows.
    """
    if is_watched(settings):
        return "GradScaler with growth_interval=10**9 and init_scale="
    own = f"learners.{learner}.scaler" if learner else "scaler"
    if settings.get("precision.compute") != "float16":
        first = "precision=fp16_static "
    else:
        rule = settings.get(f"{own}._target_") or settings.get("scaler._target_")
        first = "" if rule == _STATIC else "scaler=static "
    return f"{first}{own}.scale="


def histogram_words(settings: Mapping[str, Any], every: int | None = None) -> str:
    """Return the overrides with which a run records histograms, ``every`` so many steps; of a watch its argument."""
    if is_watched(settings):
        return f"every={every or 100} in mptrain.watch"
    return "diagnostics=histograms" + (f" diagnostics.every={every}" if every else "")


#: Overrides that the same run in FP32 does not have.
_OF_PRECISION: Final = re.compile(r"[+~]*((learners\.[^.=]+\.)?(precision|scaler|diagnostics)[.=]|run\.name=)")


def fp32_run(opened: OpenedRun, every: int) -> str:
    """Return the command of the same run in FP32 with histograms, or what to change in a watched loop, in words."""
    if opened.is_watched:
        return f"the same loop in FP32, without autocast and GradScaler, with {histogram_words(opened.settings, every)}"
    kept = [word for word in shlex.split(opened.run.state.command) if not _OF_PRECISION.match(word)]
    return shlex.join([*kept, "precision=fp32", *histogram_words(opened.settings, every).split()])


def shared_parts(runs: Iterable[OpenedRun]) -> list[Block]:
    """Return the parts, such as model and optimizer, on which all finished runs agree, as blocks of a report."""
    first, *others = [run.run.state.parts for run in runs if run.run.state.status == "done"] or [{}]
    shared = facts(*((name, text) for name, text in first.items() if all(parts.get(name) == text for parts in others)))
    return [Text("The same in all finished runs:"), shared] if shared.rows else []


def open_or_reason(path: Path, most: int) -> OpenedRun | str:
    """Open a run as `open_with_history` does, but return an error's message, for the report of several runs."""
    try:
        return open_with_history(path, most)
    except StorageError as error:
        return str(error)


#: Maximum size in bytes of a file that is embedded in a page.
MOST_BYTES: Final = 3_000_000

#: Maximum rows of a table of texts, and maximum files of each type.
_MOST: Final = 24

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_WAV: Final = b"RIFF"


def exhibits(run: Run, *, over: str = "", most_bytes: int = MOST_BYTES) -> list[Block]:
    """Return a run's newest sample of each kind as blocks of a report: images, then texts, then audio.

    A kind is the name of a sample file before its step number. Damaged files and those larger than ``most_bytes`` are
    left out. Audio files are sorted by number, so that related ones are adjacent. ``over`` is the path of the run
    directory relative to the report, with a trailing slash; empty for the run's own report.
    """
    blocks: list[Block] = []
    captions = _captions(run.paths.samples)
    for suffix in (".png", ".tsv", ".wav"):
        newest: dict[str, Path] = {}
        try:
            for path in sorted(run.paths.samples.glob(f"*{suffix}"), key=_kind_and_step):
                newest[_kind_and_step(path)[0]] = path
            kinds = sorted(newest, key=_number_and_name) if suffix == ".wav" else list(newest)
            samples = [
                (newest[kind], read_bytes(newest[kind]), captions.get(kind, ""))
                for kind in kinds
                if newest[kind].stat().st_size <= most_bytes
            ]
        except OSError:
            continue
        for path, data, caption in samples[:_MOST]:
            blocks += _block(path, f"{over}{run.paths.samples.name}/{path.name}", data, caption)
    return blocks


def _block(path: Path, file: str, data: bytes, caption: str) -> list[Block]:
    words = ". ".join(filter(None, (_what(path), caption)))
    if path.suffix == ".png" and data.startswith(_PNG):
        return [Picture(file, words, data)]
    if path.suffix == ".wav" and data.startswith(_WAV):
        return [Sound(file, words, data)]
    if path.suffix == ".tsv":
        try:
            rows = list(csv.reader(io.StringIO(data.decode(errors="replace"), newline=""), dialect="excel-tab"))
        except csv.Error:
            return []
        if rows[1:] and rows[0]:
            width = len(rows[0])
            body = [[*row, *[""] * width][:width] for row in rows[1 : _MOST + 1]]
            return [Text(f"{_what(path)}:"), table(rows[0], body)]
    return []


def _kind_and_step(path: Path) -> tuple[str, int]:
    """Return ``("samples", 60)`` for ``samples-000060.png``. A file without a step number is its own kind."""
    name, _, step = path.stem.rpartition("-")
    return (name, int(step)) if name and step.isdecimal() else (path.stem, 0)


def _number_and_name(kind: str) -> tuple[int, str]:
    """Return ``(2, "drawn")`` for ``drawn-2``."""
    name, _, number = kind.rpartition("-")
    return (int(number), name) if name and number.isdecimal() else (0, kind)


def _captions(samples: Path) -> dict[str, str]:
    """Return the captions of the samples by kind; empty if the file is missing or cannot be read."""
    try:
        captions = json.loads(read_text(samples / CAPTIONS))
    except (OSError, ValueError, RecursionError):
        return {}
    return (
        {kind: text for kind, text in captions.items() if isinstance(text, str)} if isinstance(captions, dict) else {}
    )


def _what(path: Path) -> str:
    """Describe ``samples-000060.png`` as ``samples after step 60``."""
    name, _, step = path.stem.rpartition("-")
    return f"{name} after step {int(step):,}" if name and step.isdecimal() else path.stem


Calls = Sequence[Mapping[str, Any]]


def operator_blocks(event: Mapping[str, Calls]) -> list[Block]:
    """Return the dtypes in which the operators of a training step computed, as blocks of a report.

    They are a sentence and a collapsed table, from the fields of the event ``operators``.
    """
    if not event.get("operators"):
        return []
    return [Text(summary(event)), Fold("All operators and casts", (operator_table(event),))]


def summary(event: Mapping[str, Calls]) -> str:
    """Return the number of a step's operators by output dtype, and of its casts between dtypes, in one sentence."""
    by_dtype: Counter[str] = Counter()
    for operator in event.get("operators") or []:
        by_dtype[str(operator["outputs"])] += int(operator["calls"])
    casts = sum(int(cast["calls"]) for cast in event.get("casts") or [])
    shares = ", ".join(f"{calls:,} returned {name}" for name, calls in by_dtype.most_common())
    return f"Of {counted(by_dtype.total(), 'operator')} in one step, {shares}; {counted(casts, 'cast')} between dtypes."


def operator_table(event: Mapping[str, Calls]) -> Table:
    """Return the table of a step's operators, then of its casts, forward pass first, with dtypes and calls."""
    operators = [
        (operator, operator["operator"], operator["inputs"], operator["outputs"])
        for operator in event.get("operators") or []
    ]
    casts = [(cast, "cast", cast["from"], cast["to"]) for cast in event.get("casts") or []]
    rows = [
        (phase, *words, f"{call['calls']:,}")
        for kind in (operators, casts)
        for phase in ("forward", "backward")
        for call, *words in kind
        if call["phase"] == phase
    ]
    head = ("pass", "operator", "dtypes in", "dtypes out", "calls")
    return table(head, rows, numeric=(4,), note="Views and memory allocations are left out.")
