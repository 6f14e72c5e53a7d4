"""Live panel that shows the progress of a training run on a terminal."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mptrain.cli.display import LearnerProgress, RunProgress
from mptrain.cli.messages import printable
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.system import words as words
from mptrain.system.records import EpochRecord, EvalRecord, ProgressRecord, Record, StepRecord

#: Seconds between two redraws; a redraw takes milliseconds, and faster updates are not readable.
INTERVAL = 0.25

_PHASE_STYLES = {"calibrating": "cyan", "growth probe": "green", "unexpected": "bold red"}
_SPARKLINE, _BARS = 24, "▁▂▃▄▅▆▇█"
_GAP = "   "
_SHORTEST_BAR = 6

#: Minimum width in characters of the columns of an epoch's row that differ from the default of 8.
_CELL = {"epoch": 7, "skipped": 7, "time": 7}


class Terminal(Console):
    """rich console that becomes silent when its terminal closes, instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Stop all output after the terminal has closed; rich calls this method."""
        self.quiet = True


class LiveDisplay:
    """Area of a terminal that is redrawn in place on demand, until the terminal closes.

    Args:
        stream: The terminal.
        colours: Whether to use colours.
        transient: Whether to erase the display at the end.
    """

    def __init__(self, stream: IO[str], *, colours: bool, transient: bool) -> None:
        self._console = Terminal(file=stream, no_color=not colours)
        # A refresh thread would draw while signals are handled and worker processes are forked.
        self._live = Live(console=self._console, auto_refresh=False, transient=transient)
        self._drawn = 0.0
        self._gone = False

    def draw(self, drawing: RenderableType) -> None:
        """Replace the displayed content on the terminal.

        Args:
            drawing: The new content.
        """
        try:
            self._live.start()
            self._live.update(drawing, refresh=True)
        except OSError:
            self._gone = True  # the run continues without the display
        self._drawn = time.monotonic()

    def close(self) -> None:
        """Stop the display, and erase it if it is transient."""
        with contextlib.suppress(OSError):  # the terminal may have closed
            self._live.stop()


class LivePanel(LiveDisplay):
    """Sink that shows a training run on a terminal: loss, loss scale, overflows, progress and speed in a live panel.

    The panel is redrawn when records arrive, at most four times a second.

    Args:
        stream: The terminal.
        title: Title of the panel: the model and precision.
        colours: Whether to use colours.
    """

    def __init__(self, stream: IO[str], title: str = "", *, colours: bool = True) -> None:
        super().__init__(stream, colours=colours, transient=False)
        self._title = title
        self._seen = RunProgress()
        self._titles: list[str] = []

    def take(self, record: Record) -> None:
        """Update the panel's state from a record, and redraw if a redraw is due.

        An epoch also adds a row above the panel.
        """
        self._seen.take(record)
        if isinstance(record, EpochRecord):
            self._print_epoch(record)
        if isinstance(record, StepRecord) and record.overflow:
            return  # the next record has the phase of the overflow
        if time.monotonic() - self._drawn >= INTERVAL or isinstance(record, EvalRecord):
            self._draw()

    def close(self) -> None:
        """Draw the final state of the run and keep it on the screen; later records are not drawn."""
        self._draw()
        super().close()
        self._gone = True

    def _print_epoch(self, record: EpochRecord) -> None:
        """Print a row above the panel, preceded by column titles if they differ from those of the previous row."""
        columns = epoch_columns(record, self._seen, self._console.width)
        titles = [title for title, _ in columns]
        rows = [Text(_side_by_side(columns, titles), style="dim")] if titles != self._titles else []
        rows.append(Text(_side_by_side(columns, [value for _, value in columns])))
        self._titles = titles
        self._draw()
        if not self._gone:
            with contextlib.suppress(OSError):  # the terminal may have closed
                self._console.print(*rows, sep="\n")

    def _draw(self) -> None:
        if not self._gone and self._seen.learners:
            width = self._console.width - 2 * len("^C")  # a terminal echoes ^C after the panel's last character
            self.draw(render(self._seen, self._title, width))


def epoch_columns(record: EpochRecord, seen: RunProgress, width: int) -> list[tuple[str, str]]:
    """Return the titles and values of the row that the display prints for a finished epoch.

    Args:
        record: Record of one learner's epoch.
        seen: Displayed state of the run.
        width: Line width in characters; the least important columns are left out if they do not fit.
    """
    of = f"/{seen.progress.epochs}" if seen.progress is not None else ""
    metrics = [(f"val {printable(name)}", f"{record.val[name]:.4f}") for name in words.metric_order(record.val)]
    columns = [  # columns with higher numbers are dropped first
        (0, "epoch", f"{record.epoch}{of}"),
        *([(0, "learner", printable(record.learner))] if len(seen.learners) > 1 else []),
        (0, "train loss", f"{record.train_loss:.4f}"),
        *((2 if title == "val loss" else 3 * index, title, value) for index, (title, value) in enumerate(metrics)),
        (1, "lr", f"{record.lr:.3g}"),
        (1, "loss scale", words.digits(record.loss_scale)),
        (1, "skipped", str(record.skipped)),
        (1, "time", words.duration(record.seconds)),
    ]

    while True:
        shown = [(title, value) for _, title, value in columns]
        if len(columns) == 1 or len(_side_by_side(shown, [""] * len(columns))) <= width:
            return shown
        columns.remove(max(reversed(columns), key=lambda column: column[0]))


def _side_by_side(columns: list[tuple[str, str]], cells: list[str]) -> str:
    """Join cells to a row, padded so that consecutive rows align."""
    widths = [max(len(title), len(value), _CELL.get(title, 8)) for title, value in columns]
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def render(seen: RunProgress, title: str = "", width: int | None = None) -> RenderableType:
    """Return the panel that shows a run: progress, then loss, loss scale and overflows per learner, metrics and speed.

    Args:
        seen: Displayed state of the run.
        title: Title of the panel.
        width: Width in characters; None for that of the terminal.
    """
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
    """Return text from a file or a user's class, with rich markup and control characters escaped."""
    return escape(printable(name))


def _progress(progress: ProgressRecord) -> RenderableType:
    done = progress.step / progress.steps if progress.steps else 0.0
    bar = ProgressBar(max(progress.steps, 1), progress.step, complete_style="cyan", style="bright_black")
    return _Parts(
        f"[bold]step {progress.step:,}/{progress.steps:,}[/]",
        f"{100 * done:.0f} %",
        f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}  [dim]{_shown(progress.doing)}[/]",
        f"[dim]left[/] {words.duration(progress.eta)}",
        first=bar,
    )


def _numbers(name: str, learner: LearnerProgress) -> RenderableType:
    losses = sparkline(learner.losses, _SPARKLINE)
    return _Parts(
        *([f"[bold]{_shown(name)}[/]"] if name else []),
        f"[dim]loss[/] [bold]{learner.loss:.4f}[/] [cyan]{losses}[/]",
        f"[dim]lr[/] {learner.last.lr:.3g}",
        f"[dim]gradient norm[/] {learner.last.grad_norm:.3g}",
    )


def scale_sparkline(scales: Sequence[float], width: int) -> str:
    """Draw a series of loss scales as a sparkline (``▁▂▄█``) on a logarithmic axis.

    Args:
        scales: Loss scales in order; only positive, finite ones are drawn.
        width: Maximum number of characters.
    """
    return sparkline(
        [math.log2(value) for value in scales if value > 0 and math.isfinite(value)], width, least_span=1.0
    )


def sparkline(values: Sequence[float], width: int, least_span: float = 0.0) -> str:
    """Draw a series of values as a sparkline (``▁▂▄█``); values that are not finite are left out.

    Args:
        values: Values in order.
        width: Maximum number of characters; longer series are sampled evenly.
        least_span: Minimum range of the vertical axis.
    """
    shown = [value for value in values if math.isfinite(value)]
    if not shown:
        return ""
    if len(shown) > width:
        shown = [shown[index * (len(shown) - 1) // (width - 1)] for index in range(width)]
    low = min(shown)
    span = max(max(shown) - low, least_span) or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in shown)


def _metrics(evaluation: EvalRecord) -> RenderableType:
    first, *others = (f"[green]{_shown(name)}[/]" for name in words.metrics(evaluation.metrics).split("  "))
    return _Parts(f"[dim]{_shown(evaluation.split)}[/] {first}", *others)


def _scale(learner: LearnerProgress) -> RenderableType:
    bars = scale_sparkline(learner.scales, _SPARKLINE)
    count, style = learner.overflow_count, _PHASE_STYLES.get(learner.phase, "")
    label = f"[{style}]{learner.phase}[/]" if style else learner.phase
    rate = f"[dim]({words.share(learner.overflow_rate)} of steps)[/]"
    overflows = (
        f"{count} {'overflow' if count == 1 else 'overflows'} {rate} {label}" if count else "[dim]no overflow[/]"
    )
    return _Parts(
        f"[dim]loss scale[/] [bold]{words.digits(learner.last.loss_scale)}[/] [cyan]{bars}[/]",
        overflows,
        *([f"[dim]skipped[/] {learner.skipped}"] if learner.skipped != count else []),
    )


def _machine(progress: ProgressRecord) -> RenderableType:
    waiting = f"{100 * progress.data_wait:.0f} % [dim]waiting for data[/]"
    return _Parts(
        f"{words.rate(progress.terms_per_second)} [dim]{_shown(progress.term)}/s[/]",
        f"[yellow]{waiting}[/]" if progress.data_wait >= 0.2 else waiting,
        f"{readable_bytes(progress.memory)} [dim]memory[/]",
    )


class _Parts:
    """Renderable that places pieces of text side by side, as many on a line as fit, without breaking a piece.

    Args:
        markup: Markup of each piece.
        first: Renderable that fills the rest of the first line, or its own line if there is too little room.
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
            yield Segment.line()  # a progress bar does not end its line
        line = Text()
        for piece in self._pieces:
            if line.cell_len and line.cell_len + len(_GAP) + piece.cell_len > width:
                yield line
                line = Text()
            line = Text.assemble(line, _GAP if line.cell_len else "", piece)
        yield line
