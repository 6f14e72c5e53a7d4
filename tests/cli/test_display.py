"""What is shown of a run: a panel on a terminal, lines elsewhere; cheap, and silent when nobody reads."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from mptrain.cli.display import HISTORY, PlainLines, RunProgress
from mptrain.cli.panel import LivePanel, render, scale_sparkline, sparkline
from mptrain.cli.train import make_display
from mptrain.engine.options import LogOptions
from mptrain.system.records import EpochRecord, EvalRecord, EventRecord, OverflowRecord, ProgressRecord, StepRecord
from tests.loops import each


class Tty(io.StringIO):
    def isatty(self):
        return True


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def step(number, *, loss=1.0, scale=1024.0, overflow=False, learner="main", refused=0):
    updates = number - refused - overflow
    return StepRecord(learner, number, updates, 0, loss, scale, overflow, overflow, 2.0, 0.1)


def overflow(number, phase="calibrating"):
    return OverflowRecord("main", number, 1024.0, phase, "finite", (), 1, True, 0)


PROGRESS = ProgressRecord(3, 40, 0, 10, 4215.2, "samples", 0.25, 512_000_000, 32.0, "training")
EVALUATION = EvalRecord("val", 3, 1, 200, {"loss": 0.1, "top1": 0.95})
EPOCH = EpochRecord("main", 1, 38, 36, 2, 0.5, 512.0, 0.05, {"top1": 0.95}, 2.0, 600.0)
STEPS = [step(1), step(2, overflow=True), overflow(2), step(3, scale=512.0, refused=1)]
RECORDS = [*STEPS, EVALUATION, EPOCH, PROGRESS]


def take_all(display, records):
    for record in records:
        display.take(record)
    display.close()


def shown(records, width=110):
    seen = RunProgress()
    for record in records:
        seen.take(record)
    console = Console(width=width, file=io.StringIO())
    console.print(render(seen, "cnn [amp]"))
    return console.file.getvalue()


def test_a_terminal_gets_the_panel_and_a_file_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(LogOptions(), Tty()), LivePanel)
    assert isinstance(make_display(LogOptions(), io.StringIO()), PlainLines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(LogOptions(), Tty()), PlainLines)


def test_the_panel_shows_everything_a_run_is_watched_for():
    text = shown(RECORDS)
    for part in (
        "cnn [amp]",
        "step 3/40",
        "epoch 1/10",
        "training",
        "left 0:32",
        "loss 1.0000",
        "lr 0.1",
        "val top1 0.9500",
    ):
        assert part in text
    for part in (
        "loss scale 512",
        "1 overflow",
        "(33 % of steps)",
        "calibrating",
        "4,215 samples/s",
        "25 % waiting",
        "512.0 MB",
    ):
        assert part in text
    assert "no overflow" in shown([step(1)])


@each("done", ["123,456", "9,123,456"])
@each("width", [60, 80])
def test_a_narrow_panel_wraps_instead_of_cutting(width, done):
    evaluation = EvalRecord("val", 3, 1, 200, {"loss": 0.1234, "top1": 0.9512, "top5": 0.9987})
    progress = replace(PROGRESS, step=int(done.replace(",", "")), steps=9_876_543, doing="evaluating")
    text = shown([step(1), overflow(1, "growth probe"), step(2, refused=1), evaluation, progress], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for part in ("top1 0.9512", "top5 0.9987", "loss 0.1234", "gradient norm 2", "growth probe", "4,215 samples/s"):
        assert part in text
    for part in (f"step {done}/9,876,543", "epoch 1/10  evaluating", "left 0:32", "25 % waiting for data", "memory"):
        assert part in text


def test_the_panel_has_a_row_for_each_learner():
    text = shown([step(1, learner="generator"), step(1, learner="discriminator", scale=8.0)])
    assert "generator" in text
    assert "discriminator" in text
    assert text.count("loss scale") == 2


VAL = {"loss": 0.1234, "top1": 0.95, "top5": 0.9987}


def epoch(number, **changes):
    return replace(EPOCH, **{"epoch": number, "step": 38 * number, "val": VAL, **changes})


def on_a_terminal(monkeypatch, records, columns=120):
    """The lines that stay on a terminal of so many columns above the last drawing of the panel."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Tty()
    take_all(make_display(LogOptions(), stream), records)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue().replace("\r", "").replace("╯", "╯\n"))
    return [line for line in text.splitlines() if line and line[0] not in "╭│╰"]


def test_each_epoch_leaves_a_row_above_the_panel(monkeypatch):
    records = [*RECORDS[:-2], PROGRESS, epoch(1), step(77), epoch(2, loss_scale=256.0, skipped=0, train_loss=math.nan)]
    titles, first, second = on_a_terminal(monkeypatch, records)
    assert titles.split("  ")[-1].strip() == "time"
    assert re.split(r"\s{2,}", titles.strip()) == [
        *("epoch", "train loss", "val top1", "val top5", "val loss", "lr", "loss scale", "skipped", "time")
    ]
    assert first.split() == ["1/10", "0.5000", "0.9500", "0.9987", "0.1234", "0.05", "512", "2", "0:02"]
    assert second.split() == ["2/10", "nan", "0.9500", "0.9987", "0.1234", "0.05", "256", "0", "0:02"]
    assert len(titles) == len(first) == len(second)


@pytest.mark.parametrize(("columns", "gone"), [(80, {"val top5"}), (60, {"val top5", "val loss", "time"})])
def test_a_narrow_terminal_loses_the_columns_that_matter_least(monkeypatch, columns, gone):
    titles, row = on_a_terminal(monkeypatch, [step(1), PROGRESS, epoch(1)], columns)
    assert len(row) <= columns
    assert not any(title in titles for title in gone)
    for title in ("epoch", "train loss", "val top1", "lr"):
        assert title in titles


def test_each_learner_has_a_row_of_an_epoch(monkeypatch):
    records = [step(1, learner="generator"), step(1, learner="discriminator"), PROGRESS]
    records += [epoch(1, learner=name, val={}) for name in ("generator", "discriminator")]
    titles, first, second = on_a_terminal(monkeypatch, records)
    assert "learner" in titles
    assert first.split()[:3] == ["1/10", "generator", "0.5000"]
    assert second.split()[:3] == ["1/10", "discriminator", "0.5000"]


def test_the_panel_shows_how_the_loss_went():
    assert "loss 1.0000 ▁" in shown([step(1)])
    falling = shown([step(number, loss=10.0 / number) for number in range(1, 30)])
    assert re.search(r"loss \d\.\d{4} █[█▇▆▅▄▃▂▁]*▁ ", falling)


def test_the_panel_leaves_room_for_what_a_terminal_shows_of_ctrl_c(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Tty()
    panel = LivePanel(stream, colours=False)
    panel.take(step(1))
    panel.close()
    frames = re.findall(r"[╭╰]─+[╮╯]", stream.getvalue())
    assert frames
    assert {len(frame) for frame in frames} == {76}


def test_an_overflow_is_not_shown_before_its_kind_is_known(monkeypatch):
    panel = LivePanel(Tty())
    drawn = []
    monkeypatch.setattr(panel, "_draw", lambda **_: drawn.append(panel._seen.learners["main"].overflow_count))
    panel.take(step(1, overflow=True))
    panel.take(overflow(1))
    assert drawn == [1]


def test_no_colour_is_obeyed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    panel = make_display(LogOptions(), stream := Tty())
    take_all(panel, RECORDS)
    assert "loss scale" in stream.getvalue()
    colours = {code for codes in re.findall(r"\x1b\[([\d;]*)m", stream.getvalue()) for code in codes.split(";")}
    assert not colours & {str(number) for number in (*range(30, 38), *range(90, 98))}


def test_the_panel_is_drawn_at_most_four_times_a_second(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("mptrain.cli.panel.time.monotonic", lambda: clock[0])
    panel = LivePanel(Tty())
    drawn = []
    monkeypatch.setattr(panel._live, "update", lambda *args, **kwargs: drawn.append(clock[0]))
    for number in range(1, 1001):
        clock[0] += 0.01
        panel.take(step(number))
    panel.close()
    assert 30 <= len(drawn) <= 42  # 10 seconds


def test_lines_are_key_value_pairs_without_control_characters():
    stream = io.StringIO()
    take_all(PlainLines(stream, 0.0), [*RECORDS, EventRecord("checkpoint", 3, {})])
    text = stream.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    evaluation, epoch, progress = text.splitlines()
    assert evaluation == "eval=val step=3 loss=0.1000 top1=0.9500"
    assert epoch.startswith("epoch=1 step=38 updates=36 skipped=2 train_loss=0.5000 loss_scale=512 lr=0.05")
    fields = dict(field.split("=") for field in progress.split(" "))
    known = {"step": "3/40", "overflows": "1", "last_overflow": "calibrating", "loss_scale": "512", "data_wait": "0.25"}
    assert fields.items() >= {**known, "eta": "0:32"}.items()


def test_lines_about_progress_keep_their_distance(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("mptrain.cli.display.time.monotonic", lambda: clock[0])
    lines = PlainLines(stream := io.StringIO(), 10.0)
    lines.take(step(1))
    for _ in range(60):
        clock[0] += 1.0
        lines.take(PROGRESS)
    assert len(stream.getvalue().splitlines()) == 6


@pytest.mark.parametrize("make", [lambda: PlainLines(Gone(), 0.0), lambda: LivePanel(Gone())])
def test_training_goes_on_when_nobody_reads_any_more(make):
    display = make()
    take_all(display, RECORDS * 2)
    display.close()


def test_the_history_of_the_scale_covers_the_run_in_bounded_space():
    seen = RunProgress()
    for number in range(1, 10_001):
        seen.take(step(number, scale=float(number)))
    scales = seen.learners["main"].scales
    assert len(scales) < HISTORY
    assert scales[0] == 1.0
    assert scales[-1] > 9000
    assert scales == sorted(scales)


def test_a_loss_that_is_not_finite_does_not_spoil_the_shown_one():
    seen = RunProgress()
    for loss in (2.0, float("nan"), float("inf"), 2.0):
        seen.take(step(1, loss=loss))
    assert seen.learners["main"].loss == 2.0


def test_a_sparkline_shows_the_whole_history_on_a_logarithmic_axis():
    assert scale_sparkline([1, 2, 4, 8], 10) == "▁▃▆█"
    assert scale_sparkline([4.0] * 100, 8) == "▁" * 8
    assert scale_sparkline([1.0] * 50 + [1024.0] * 50, 4) == "▁▁██"
    assert scale_sparkline([], 8) == ""
    assert scale_sparkline([math.nan, 0.0], 8) == ""
    assert sparkline([0.8, math.nan, 0.4, math.inf, 0.0, -0.8], 10) == "█▇▅▁"  # linear, of losses
    assert sparkline([2.3], 8) == "▁"
    assert sparkline([], 8) == ""
