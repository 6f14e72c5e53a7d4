"""The live panel of a run on a terminal."""

from __future__ import annotations

import contextlib
import time
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mptrain.cli import formatting
from mptrain.cli.display import LearnerProgress, RunProgress
from mptrain.cli.messages import printable
from mptrain.records import EpochRecord, EvalRecord, ProgressRecord, Record, StepRecord
from mptrain.runlog.atomic_files import readable_bytes

#: Seconds between two drawings; a terminal shows no more to anybody, and drawing takes milliseconds.
INTERVAL = 0.25

_PHASE_STYLES = {"calibrating": "cyan", "growth probe": "green", "unexpected": "bold red"}
_SPARKLINE = 24
_GAP = "   "
_SHORTEST_BAR = 6

#: The least width, in characters, of those columns of an epoch's row for which it is not 8.
_CELL = {"epoch": 7, "skipped": 7, "time": 7}


class Terminal(Console):
    """A console that falls silent, instead of ending the process, when its terminal has gone."""

    def on_broken_pipe(self) -> None:
        """Fall silent: nobody looks at it any more."""
        self.quiet = True


class LiveDisplay:
    """A drawing on a terminal that is redrawn on demand, and not any more once the terminal has gone.

    Args:
        stream: The terminal.
        colours: Whether to use any.
        transient: The drawing goes away at the end.
    """

    def __init__(self, stream: IO[str], *, colours: bool, transient: bool) -> None:
        self._console = Terminal(file=stream, no_color=not colours)
        # No refreshing thread: it would draw while signals are handled and worker processes are forked.
        self._live = Live(console=self._console, auto_refresh=False, transient=transient)
        self._drawn = 0.0
        self._gone = False

    def draw(self, drawing: RenderableType) -> None:
        """Replace the drawing."""
        try:
            self._live.start()
            self._live.update(drawing, refresh=True)
        except OSError:
            self._gone = True  # what is shown goes on without it
        self._drawn = time.monotonic()

    def close(self) -> None:
        """Leave the terminal as it is."""
        with contextlib.suppress(OSError):  # the terminal may have gone
            self._live.stop()


class LivePanel(LiveDisplay):
    """A sink that draws a panel, at most four times a second and only when records arrive.

    Args:
        stream: The terminal.
        title: What is being trained.
        colours: Whether to use any.
    """

    def __init__(self, stream: IO[str], title: str = "", *, colours: bool = True) -> None:
        super().__init__(stream, colours=colours, transient=False)
        self._title = title
        self._seen = RunProgress()
        self._titles: list[str] = []

    def take(self, record: Record) -> None:
        """Note the record, and draw when the last drawing is old enough; an epoch leaves a row above the panel."""
        self._seen.take(record)
        if isinstance(record, EpochRecord):
            self._print_epoch(record)
        if isinstance(record, StepRecord) and record.overflow:
            return  # its kind is on the next record
        if time.monotonic() - self._drawn >= INTERVAL or isinstance(record, EvalRecord):
            self._draw()

    def close(self) -> None:
        """Draw the last state and leave it on the screen."""
        self._draw()
        super().close()
        self._gone = True

    def _print_epoch(self, record: EpochRecord) -> None:
        """Print a row above the panel, and the titles of its columns where they are not those of the row before."""
        columns = epoch_columns(record, self._seen, self._console.width)
        titles = [title for title, _ in columns]
        rows = [Text(_side_by_side(columns, titles), style="dim")] if titles != self._titles else []
        rows.append(Text(_side_by_side(columns, [value for _, value in columns])))
        self._titles = titles
        self._draw()
        if not self._gone:
            with contextlib.suppress(OSError):  # the terminal may have gone
                self._console.print(*rows, sep="\n")

    def _draw(self) -> None:
        if not self._gone and self._seen.learners:
            width = self._console.width - 2 * len("^C")  # which a terminal writes behind the panel's last character
            self.draw(render(self._seen, self._title, width))


def epoch_columns(record: EpochRecord, seen: RunProgress, width: int) -> list[tuple[str, str]]:
    """Return titles and values of an epoch's row; those that matter least are left out of a narrow terminal.

    Args:
        record: The epoch of one learner.
        seen: What the display knows of the run.
        width: Characters of a line.
    """
    of = f"/{seen.progress.epochs}" if seen.progress is not None else ""
    metrics = [(f"val {printable(name)}", f"{record.val[name]:.4f}") for name in formatting.metric_order(record.val)]
    columns = [  # the higher the number, the sooner it is left out
        (0, "epoch", f"{record.epoch}{of}"),
        *([(0, "learner", printable(record.learner))] if len(seen.learners) > 1 else []),
        (0, "train loss", f"{record.train_loss:.4f}"),
        *((2 if title == "val loss" else 3 * place, title, value) for place, (title, value) in enumerate(metrics)),
        (1, "lr", f"{record.lr:.3g}"),
        (1, "loss scale", formatting.scale(record.loss_scale)),
        (1, "skipped", str(record.skipped)),
        (1, "time", formatting.duration(record.seconds)),
    ]

    while True:
        shown = [(title, value) for _, title, value in columns]
        if len(columns) == 1 or len(_side_by_side(shown, [""] * len(columns))) <= width:
            return shown
        columns.remove(max(reversed(columns), key=lambda column: column[0]))


def _side_by_side(columns: list[tuple[str, str]], cells: list[str]) -> str:
    """Return cells below each other from row to row, each as wide as its title and as numbers usually are."""
    widths = [max(len(title), len(value), _CELL.get(title, 8)) for title, value in columns]
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def render(seen: RunProgress, title: str = "", width: int | None = None) -> RenderableType:
    """The panel for a state; as wide as the terminal where no width is given."""
    rows: list[RenderableType] = []
    if seen.progress is not None:
        rows.append(_progress(seen.progress))
    for name, learner in seen.learners.items():
        rows.append(_numbers(name if len(seen.learners) > 1 else "", learner))
        rows.append(_scale(learner))
    if seen.evaluation is not None:
        rows.append(_metrics(seen.evaluation))
    if seen.progress is not None:
        rows.append(_machine(seen.progress))
    heading = _shown(title) or None
    return Panel(Group(*rows), title=heading, title_align="left", border_style="dim", padding=(0, 1), width=width)


def _shown(name: str) -> str:
    """A word out of a file, or of a part of the user's, which controls neither rich nor the terminal."""
    return escape(printable(name))


def _progress(progress: ProgressRecord) -> RenderableType:
    done = progress.step / progress.steps if progress.steps else 0.0
    bar = ProgressBar(max(progress.steps, 1), progress.step, complete_style="cyan", style="bright_black")
    return _Parts(
        f"[bold]step {progress.step:,}/{progress.steps:,}[/]",
        f"{100 * done:.0f} %",
        f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}  [dim]{_shown(progress.doing)}[/]",
        f"[dim]left[/] {formatting.duration(progress.eta)}",
        first=bar,
    )


def _numbers(name: str, learner: LearnerProgress) -> RenderableType:
    losses = formatting.sparkline(learner.losses, _SPARKLINE)
    return _Parts(
        *([f"[bold]{_shown(name)}[/]"] if name else []),
        f"[dim]loss[/] [bold]{learner.loss:.4f}[/] [cyan]{losses}[/]",
        f"[dim]lr[/] {learner.last.lr:.3g}",
        f"[dim]gradient norm[/] {learner.last.grad_norm:.3g}",
    )


def _metrics(evaluation: EvalRecord) -> RenderableType:
    first, *others = (f"[green]{_shown(name)}[/]" for name in formatting.metrics(evaluation.metrics).split("  "))
    return _Parts(f"[dim]{_shown(evaluation.split)}[/] {first}", *others)


def _scale(learner: LearnerProgress) -> RenderableType:
    bars = formatting.scale_sparkline(learner.scales, _SPARKLINE)
    count, style = learner.overflow_count, _PHASE_STYLES.get(learner.phase, "")
    label = f"[{style}]{learner.phase}[/]" if style else learner.phase
    rate = f"[dim]({formatting.share(learner.overflow_rate)} of steps)[/]"
    overflows = (
        f"{count} {'overflow' if count == 1 else 'overflows'} {rate} {label}" if count else "[dim]no overflow[/]"
    )
    return _Parts(
        f"[dim]loss scale[/] [bold]{formatting.scale(learner.last.loss_scale)}[/] [cyan]{bars}[/]",
        overflows,
        *([f"[dim]skipped[/] {learner.skipped}"] if learner.skipped != count else []),
    )


def _machine(progress: ProgressRecord) -> RenderableType:
    waiting = f"{100 * progress.data_wait:.0f} % [dim]waiting for data[/]"
    return _Parts(
        f"{formatting.rate(progress.terms_per_second)} [dim]{_shown(progress.term)}/s[/]",
        f"[yellow]{waiting}[/]" if progress.data_wait >= 0.2 else waiting,
        f"{readable_bytes(progress.memory)} [dim]memory[/]",
    )


class _Parts:
    """Pieces of text side by side, as many on a line as fit; none is cut or broken while it fits alone.

    Args:
        markup: Of each piece.
        first: What takes the rest of the first line, or a line of its own where little is left.
    """

    def __init__(self, *markup: str, first: RenderableType | None = None) -> None:
        self._pieces = [Text.from_markup(piece) for piece in markup]
        self._first = first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self._first is not None:
            whole = sum(piece.cell_len + len(_GAP) for piece in self._pieces)
            if width - whole >= _SHORTEST_BAR:
                grid = Table.grid(padding=(0, len(_GAP), 0, 0), expand=True)
                grid.add_column(ratio=1, no_wrap=True)
                grid.add_column(no_wrap=True)
                grid.add_row(self._first, Text(_GAP).join(self._pieces))
                yield grid
                return
            yield self._first
            yield Segment.line()  # which a progress bar leaves out
        line = Text()
        for piece in self._pieces:
            if line.cell_len and line.cell_len + len(_GAP) + piece.cell_len > width:
                yield line
                line = Text()
            line = Text.assemble(line, _GAP if line.cell_len else "", piece)
        yield line
