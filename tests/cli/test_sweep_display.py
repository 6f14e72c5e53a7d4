"""The live table of a sweep: what is urgent is on the screen, whatever its size."""

import dataclasses
import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from mptrain.runlog import RunPaths, write_summary
from mptrain.runlog.sweeps import Sweep, SweepJob
from mptrain.study.commands.sweep_display import LiveTable, choose, print_outcome, remaining
from mptrain.study.sweep.executor import JobProgress
from tests.loops import each


def jobs_with(*statuses):
    return tuple(
        SweepJob(n, f"{n:03d}-seed={n}", (), (f"seed={n}",), status=status, seconds=4.0 if status == "done" else None)
        for n, status in enumerate(statuses)
    )


def sweep_of(folder, *statuses, parallel=1):
    return Sweep(folder, "sweep", (), (), "train", parallel, jobs_with(*statuses))


def progress(step=30, eta=6.0, **more):
    fields = {"metric_name": "top1", "metric": 0.5, "scales": (65536.0,), "overflows": 3, "skipped": 2, **more}
    return JobProgress(step, 120, eta, "training", **fields)


def drawn(table, width=120, height=30):
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(table.render(width, height))
    return console.file.getvalue().splitlines()


def table_of(sweep, **known):
    table = LiveTable(sweep, io.StringIO())
    for number, said in known.items():
        table.progressed(int(number[1:]), said)
    return table


def test_a_running_job_shows_progress_metric_scale_overflows_and_time_left(tmp_path):
    lines = drawn(table_of(sweep_of(tmp_path, "running", "waiting"), j0=progress()))
    for expected in ("seed=0", "running", "30/120", "top1 0.5000", "65536", "3", "2", "0:06"):
        assert expected in lines[1].split() or expected in lines[1]
    assert lines[2].split() == ["1", "seed=1", "waiting"]
    assert lines[3].startswith("1 running, 1 waiting")


def test_the_runs_of_an_arm_are_told_apart_on_80_columns(tmp_path):
    jobs = tuple(
        SweepJob(n, f"{n}", (), (f"precision={arm}", "scaler.scale=1024", f"seed={n % 2}"), arm=arm)
        for n, arm in enumerate(["fp16_static", "fp16_static", "amp_static"])
    )
    jobs = (dataclasses.replace(jobs[0], status="running"), *jobs[1:])
    lines = drawn(table_of(Sweep(tmp_path, "comparison", (), (), "train", 1, jobs), j0=progress()), width=80)
    assert "25 %" in lines[1]
    labels = [line.split("  ")[1] for line in lines[1:4]]
    assert labels == ["fp16_static seed=0", "fp16_static seed=1", "amp_static"]


def test_a_job_that_is_done_shows_its_final_numbers_and_a_failed_one_why(tmp_path):
    sweep = sweep_of(tmp_path, "done", "failed")
    learner = {"skipped": 7, "overflows": {"unexpected": 8}, "scale": {"last": 512.0}}
    RunPaths(tmp_path / "000-seed=0").root.mkdir()
    numbers = {"metric": 0.9, "metric_name": "top1", "metric_split": "test", "learners": {"a": learner, "b": learner}}
    write_summary(RunPaths(tmp_path / "000-seed=0").summary, numbers)
    sweep = sweep.with_job(SweepJob(1, "001", (), ("seed=1",), status="failed", code=4, reason="only\x1b[2J overflows"))
    lines = drawn(table_of(sweep))
    for expected in ("done", "0:04 in all", "top1 0.9000", "512", "16", "14"):
        assert expected in lines[1]
    assert "only\\x1b[2J overflows" in lines[2]


@each("width", [60, 80, 120])
@each("height", [10, 24])
def test_many_points_never_overflow_the_screen(tmp_path, width, height):
    statuses = ["done"] * 120 + ["failed"] + ["running"] * 2 + ["waiting"] * 100
    table = table_of(sweep_of(tmp_path, *statuses), j121=progress(), j122=progress(step=99_999))
    lines = drawn(table, width, height)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith("121") for line in lines)
    assert any(" not shown" in line and "99 waiting" in line for line in lines)


def test_what_runs_and_what_failed_comes_before_what_is_done_or_waits():
    jobs = jobs_with(*["done"] * 50, "failed", *["done"] * 50, "running", "running", *["waiting"] * 50)
    assert [job.number for job in choose(jobs, 7)] == [50, 98, 99, 100, 101, 102, 103]
    assert choose(jobs[:5], 7) == list(jobs[:5])
    many = jobs_with(*["failed"] * 50, "running", "waiting")
    assert [job.number for job in choose(many, 4)] == [48, 49, 50, 51]


def test_time_left_is_known_once_a_job_is_done_or_says_it(tmp_path):
    sweep = sweep_of(tmp_path, "running", "waiting", "waiting", "waiting", parallel=2)
    assert remaining(sweep, {}, {0: 1.0}) == math.inf
    assert remaining(sweep, {0: progress(eta=6.0)}, {0: 2.0}) == pytest.approx((6 + 3 * 8) / 2)
    started = sweep_of(tmp_path, "done", "running", "waiting", parallel=1)  # 4 s each
    assert remaining(started, {}, {1: 1.0}) == pytest.approx(3 + 4)
    assert remaining(sweep_of(tmp_path, "done"), {}, {}) == 0


def test_a_signal_is_answered_on_the_screen(tmp_path):
    table = table_of(sweep_of(tmp_path, "running"))
    table.stopping("SIGINT")
    assert any(line.startswith("SIGINT: running jobs save checkpoints") for line in drawn(table))


def test_no_colours_where_none_are_wanted(tmp_path):
    for colours in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda: True
        table = LiveTable(sweep_of(tmp_path, "running"), stream, colours=colours)
        table.tick()
        table.close()
        assert ("\x1b[36m" in stream.getvalue()) == colours


def test_a_terminal_that_has_gone_does_not_stop_the_sweep(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    table = LiveTable(sweep_of(tmp_path, "running"), Gone())
    table.tick()
    table.changed(sweep_of(tmp_path, "done"), sweep_of(tmp_path, "done").jobs[0])
    table.tick()
    table.close()


STILL = "still run by process 12 on there since 2026-01-02, which outlived the sweep that started it"


def test_a_job_that_another_process_still_runs_is_named(tmp_path, capsys):
    sweep = sweep_of(tmp_path, "running", "running")
    sweep = sweep.with_job(replace(sweep.jobs[0], reason=STILL))
    lines = drawn(table_of(sweep), width=200)
    assert "still run by process 12 on there" in lines[1]
    assert "starting" in lines[2]
    sweep = sweep_of(tmp_path, "running", "waiting")
    print_outcome(sweep.with_job(replace(sweep.jobs[0], reason=STILL)))
    out = capsys.readouterr().out
    assert "1 of the jobs is still run by processes of an earlier command, which were not stopped:" in out
    assert f"- 0 seed=0: {STILL}" in out
