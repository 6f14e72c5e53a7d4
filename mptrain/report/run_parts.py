"""The parts that reports of one run and of several share: an opened run, its environment, command, configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain.errors import StorageError
from mptrain.report.history import History, read_history
from mptrain.report.page import Block, Cell, Code, Facts, Fold, Text, facts
from mptrain.report.settings import chosen, flat
from mptrain.report.wording import counted, duration, moment
from mptrain.runlog.directory import open_run
from mptrain.runlog.reader import Run, read_run


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
        """How it stands, in words."""
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
        """What it is: model, data, precision."""
        names = [chosen(self.settings, group) for group in ("model", "dataset", "precision")]
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


def unfinished(dead: bool) -> str:
    """What to mind of a run that says it is running; ``dead`` where no process holds it."""
    if dead:
        return "the run has not ended (it was killed, or its machine went down): this is about the steps so far"
    return "the run is still running: this is about the steps so far"


def environment(run: Run, settings: dict[str, Any]) -> Facts:
    """Where and with what a run was computed."""
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


def tried(path: Path, most: int) -> OpenedRun | str:
    """As `open_with_history`, or the sentence that says why not."""
    try:
        return open_with_history(path, most)
    except StorageError as error:
        return str(error)
