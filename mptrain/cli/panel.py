"""The live panel of a run on a terminal."""

from __future__ import annotations

import contextlib
import time
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mptrain.cli import wording
from mptrain.cli.progress import LearnerProgress, RunProgress
from mptrain.records import EvalRecord
from mptrain.runlog.storage import readable_bytes

if TYPE_CHECKING:
    from mptrain.records import ProgressRecord, Record

#: Seconds between two drawings; a terminal shows no more to anybody, and drawing takes milliseconds.
INTERVAL = 0.25

_PHASE_STYLES = {"calibrating": "cyan", "growth probe": "green", "abnormal": "bold red"}
_SPARKLINE = 24


class _Terminal(Console):
    """A console that falls silent, instead of ending the process, when its terminal has gone."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LivePanel:
    """A sink that draws a panel, at most four times a second and only when records arrive.

    Args:
        stream: The terminal.
        title: What is being trained.
        colours: Whether to use any.
    """

    def __init__(self, stream: IO[str], title: str = "", *, colours: bool = True) -> None:
        self._title = title
        self._seen = RunProgress()
        self._console = _Terminal(file=stream, no_color=not colours)
        # No refreshing thread: it would draw while signals are handled and worker processes are forked.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._drawn = 0.0
        self._closed = False

    def take(self, record: Record) -> None:
        """Note the record, and draw when the last drawing is old enough."""
        self._seen.take(record)
        if time.monotonic() - self._drawn >= INTERVAL or isinstance(record, EvalRecord):
            self._draw()

    def close(self) -> None:
        """Draw the last state and leave it on the screen."""
        if self._closed:
            return
        self._closed = True
        self._draw(last=True)
        with contextlib.suppress(OSError):  # the terminal may have gone
            self._live.stop()

    def _draw(self, *, last: bool = False) -> None:
        if (self._closed and not last) or not self._seen.learners:
            return
        try:
            self._live.start()
            self._live.update(render(self._seen, self._title), refresh=True)
        except OSError:
            self._closed = True  # the terminal has gone; training goes on without it
        self._drawn = time.monotonic()


def render(seen: RunProgress, title: str = "") -> RenderableType:
    """The panel for a state."""
    rows: list[RenderableType] = []
    if seen.progress is not None:
        rows.append(_bar(seen.progress))
    for name, learner in seen.learners.items():
        rows.append(_numbers(name if len(seen.learners) > 1 else "", learner, seen))
        rows.append(_scale(learner))
    if seen.progress is not None:
        rows.append(_machine(seen.progress))
    return Panel(Group(*rows), title=escape(title) or None, title_align="left", border_style="dim", padding=(0, 1))


def _bar(progress: ProgressRecord) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    for ratio in (1, None, None, None, None):
        grid.add_column(ratio=ratio, no_wrap=True)
    done = progress.step / progress.steps if progress.steps else 0.0
    bar = ProgressBar(
        total=max(progress.steps, 1), completed=progress.step, complete_style="cyan", style="bright_black"
    )
    grid.add_row(
        bar,
        Text(f"step {progress.step:,}/{progress.steps:,}", style="bold"),
        f"{100 * done:.0f} %",
        f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}  [dim]{progress.doing}[/]",
        f"[dim]left[/] {wording.duration(progress.eta)}",
    )
    return grid


def _numbers(name: str, learner: LearnerProgress, seen: RunProgress) -> RenderableType:
    last = learner.last
    parts = [f"[bold]{escape(name)}[/]"] if name else []
    parts += [
        f"[dim]loss[/] [bold]{learner.loss:.4f}[/]",
        f"[dim]lr[/] {last.lr:.3g}",
        f"[dim]gradient norm[/] {last.grad_norm:.3g}",
    ]
    if seen.evaluation is not None:
        found = wording.metrics(seen.evaluation.metrics)
        parts.append(f"[dim]{escape(seen.evaluation.split)}[/] [green]{escape(found)}[/]")
    return _line("   ".join(parts))


def _scale(learner: LearnerProgress) -> RenderableType:
    last = learner.last
    line = f"[dim]loss scale[/] [bold]{wording.scale(last.loss_scale)}[/]"
    line += f" [cyan]{wording.sparkline(learner.scales, _SPARKLINE)}[/]"
    count = learner.overflow_count
    if count:
        style = _PHASE_STYLES.get(learner.phase, "")
        label = f"[{style}]{learner.phase}[/]" if style else learner.phase
        plural = "overflow" if count == 1 else "overflows"
        line += f"   {count} {plural} [dim]({wording.share(learner.overflow_rate)} of steps)[/] {label}"
    else:
        line += "   [dim]no overflow[/]"
    if learner.skipped != count:
        line += f"   [dim]skipped[/] {learner.skipped}"
    return _line(line)


def _machine(progress: ProgressRecord) -> RenderableType:
    waiting = f"{100 * progress.data_wait:.0f} % [dim]waiting for data[/]"
    if progress.data_wait >= 0.2:
        waiting = f"[yellow]{waiting}[/]"
    parts = [
        f"{wording.rate(progress.samples_per_second)} [dim]samples/s[/]",
        waiting,
        f"{readable_bytes(progress.memory)} [dim]memory[/]",
    ]
    return _line("   ".join(parts))


def _line(markup: str) -> Text:
    line = Text.from_markup(markup)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
