"""The parts that reports of one run and of several share.

An opened run, its environment, command and configuration; its samples, which are the newest pictures, texts and recordings
of its folder; and which operators of a step ran in which dtypes, and how often tensors were cast.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mptrain.comparison.configurations import flat
from mptrain.errors import StorageError
from mptrain.files import read_bytes, read_text
from mptrain.report.formatting import counted, duration, moment
from mptrain.report.page import Block, Cell, Code, Facts, Fold, Picture, Sound, Text, facts, table
from mptrain.report.run_history import History, read_history
from mptrain.runlog.directory import open_run
from mptrain.runlog.run_paths import CAPTIONS
from mptrain.runlog.run_reader import Run, read_run


@dataclass(frozen=True)
class OpenedRun:
    """A run and its records.

    Attributes:
        run: What its small files say.
        history: Its records.
        settings: Its configuration, dotted key to value; empty where it has none.
        dead: It says that it is running, and no process holds it.
    """

    run: Run
    history: History
    settings: dict[str, Any]
    dead: bool

    @property
    def status(self) -> Cell:
        """Return how it stands, in words."""
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
                return Cell("killed, or its machine went down", "bad") if self.dead else Cell("running")

    @property
    def higher_is_better(self) -> bool | None:
        """The direction of its metric, where that is on record."""
        return self.run.summary.get("higher_is_better")

    @property
    def metric(self) -> str:
        """The name of the task's own metric; empty where it has none."""
        return str(self.run.summary.get("metric_name") or "")

    def title(self) -> str:
        """Return what it is: model, data, precision."""
        names = [str(self.settings.get(f"chosen.{group}") or "") for group in ("model", "dataset", "precision")]
        return f"{names[0]} on {names[1]}, {names[2]}" if all(names) else self.run.state.id


def open_with_history(path: Path, most: int) -> OpenedRun:
    """The run in a directory.

    Args:
        path: The directory.
        most: Buckets of each of its curves at most.

    Raises:
        StorageError: It is no run, or one of its small files is damaged.
    """
    run = read_run(path)
    dead = run.state.status == "running" and open_run(path).holder() is None
    history = read_history(run, most)
    last = run.state.attempts[-1].to_step if run.state.attempts else None
    ended = run.summary.get("steps") or 0
    if history.steps < ended and (run.state.status == "done" or last == ended):  # else it is that of an earlier end
        history.notes.append(f"{run.paths.steps.name} lacks steps: it has {history.steps:,} of the {ended:,} attempted")
    return OpenedRun(run, history, flat(run.config), dead)


def unfinished_note(dead: bool) -> str:
    """Return what to mind of a run that says it is running; ``dead`` where no process holds it."""
    if dead:
        return "the run has not ended (it was killed, or its machine went down): this is about the steps so far"
    return "the run is still running: this is about the steps so far"


def environment(run: Run, settings: dict[str, Any]) -> Facts:
    """Return where and with what a run was computed."""
    state = run.state
    attempts = state.attempts
    threads = run.summary.get("threads")
    spans = [
        f"{moment(one.started)} on {one.host}, from step {one.from_step:,}"
        + (f" to step {one.to_step:,}" if one.to_step is not None else "")
        + (f", {duration(one.seconds)}" if one.seconds is not None else "")
        for one in attempts[-5:]
    ]
    earlier = f"{counted(len(attempts) - 5, 'earlier attempt')}; " if len(attempts) > 5 else ""
    return facts(
        ("run", state.id),
        ("device", state.device),
        ("ranks", f"{state.ranks}, {settings.get('distributed.kind', '')}" if state.ranks > 1 else ""),
        ("CPU threads", str(threads) if threads else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in state.versions.items())),
        ("commit", state.git_sha or ""),
        ("precision", state.precision),
        ("seed", str(settings.get("seed", ""))),
        ("attempts" if len(attempts) > 1 else "started", earlier + "; ".join(spans)),
    )


def commands(run: Run) -> list[Block]:
    """The exact command, and the resolved configuration on demand."""
    blocks: list[Block] = [Code(run.state.command, "sh")]
    if run.config:
        blocks.append(Fold("The whole configuration, resolved", (Code(run.config, "yaml"),)))
    else:
        blocks.append(Text("There is no config.yaml.", "warn"))
    return blocks


def open_or_reason(path: Path, most: int) -> OpenedRun | str:
    """As `open_with_history`, or the sentence that says why not."""
    try:
        return open_with_history(path, most)
    except StorageError as error:
        return str(error)


#: Bytes of a file that is put into a page at most.
MOST_BYTES: Final = 3_000_000

#: Rows of a table of texts, and recordings of a kind, at most.
_MOST: Final = 24

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_WAV: Final = b"RIFF"


def exhibits(run: Run, *, over: str = "", most_bytes: int = MOST_BYTES) -> list[Block]:
    """The newest file of each kind, pictures first, then texts and recordings; what is damaged or too large is left out.

    Recordings are in the order of their numbers, so that those which belong together stand beside each other.

    Args:
        run: Whose.
        over: The folder of the run as the report sees it, ending with a slash; empty for its own report.
        most_bytes: Of one file.
    """
    blocks: list[Block] = []
    captions = _captions(run.paths.samples)
    for suffix in (".png", ".tsv", ".wav"):
        newest: dict[str, Path] = {}
        try:
            for path in sorted(run.paths.samples.glob(f"*{suffix}"), key=_kind_and_step):
                newest[_kind_and_step(path)[0]] = path
            kinds = sorted(newest, key=_number_and_name) if suffix == ".wav" else list(newest)
            found = [
                (newest[kind], read_bytes(newest[kind]), captions.get(kind, ""))
                for kind in kinds
                if newest[kind].stat().st_size <= most_bytes
            ]
        except OSError:
            continue
        for path, data, caption in found[:_MOST]:
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
    """``("samples", 60)`` of ``samples-000060.png``; other files are of a kind of their own."""
    name, _, step = path.stem.rpartition("-")
    return (name, int(step)) if name and step.isdecimal() else (path.stem, 0)


def _number_and_name(kind: str) -> tuple[int, str]:
    """``(2, "drawn")`` of ``drawn-2``."""
    name, _, number = kind.rpartition("-")
    return (int(number), name) if name and number.isdecimal() else (0, kind)


def _captions(samples: Path) -> dict[str, str]:
    """Return what the samples are, by kind; empty where nothing is said, or it cannot be read."""
    try:
        found = json.loads(read_text(samples / CAPTIONS))
    except (OSError, ValueError, RecursionError):
        return {}
    return {kind: text for kind, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _what(path: Path) -> str:
    """``samples-000060.png`` in words."""
    name, _, step = path.stem.rpartition("-")
    return f"{name} after step {int(step):,}" if name and step.isdecimal() else path.stem


Calls = Sequence[Mapping[str, Any]]


def operator_blocks(found: Mapping[str, Calls]) -> list[Block]:
    """Return how many operators ran in which dtypes, and how many casts there were, in a sentence; the tables on demand.

    Args:
        found: ``operators`` and ``casts``, as in the event ``operators``; empty where a run has none.
    """
    operators, casts = found.get("operators") or [], found.get("casts") or []
    if not operators:
        return []
    note = "Views and reservations of memory are left out; casts are counted apart."
    head = ("pass", "operator", "dtypes in", "dtypes out", "calls")
    folds = [Fold("Every operator", (table(head, by_operator(operators), numeric=(4,), note=note),))]
    if casts:
        folds.append(Fold("Every cast", (table(("pass", "from", "to", "calls"), by_cast(casts), numeric=(3,)),)))
    return [Text(summary(found)), *folds]


def summary(found: Mapping[str, Calls]) -> str:
    """Return how many operators gave what, and how many casts there were, in one sentence."""
    by_dtype: Counter[str] = Counter()
    for one in found.get("operators") or []:
        by_dtype[str(one["outputs"])] += int(one["calls"])
    casts = sum(int(one["calls"]) for one in found.get("casts") or [])
    shares = ", ".join(f"{calls:,} gave {name}" for name, calls in by_dtype.most_common())
    return f"Of {counted(by_dtype.total(), 'operator')} in one step, {shares}; {counted(casts, 'cast')} between dtypes."


def by_operator(operators: Calls) -> list[tuple[str, ...]]:
    """Rows of pass, operator, inputs, outputs and calls, with the passes in their order."""
    return _by_pass(operators, ("operator", "inputs", "outputs"))


def by_cast(casts: Calls) -> list[tuple[str, ...]]:
    """Rows of pass, from, to and calls."""
    return _by_pass(casts, ("from", "to"))


def _by_pass(calls: Calls, words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [
        (phase, *(one[word] for word in words), f"{one['calls']:,}")
        for phase in ("forward", "backward")
        for one in calls
        if one["phase"] == phase
    ]
