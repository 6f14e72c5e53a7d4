import contextlib
import json
import os
import re
from dataclasses import replace
from datetime import datetime

import pytest

from mptrain.config.compose import Composer, compose
from mptrain.config.schema import RunOptions
from mptrain.runlog import RunDirectory, RunPaths, RunState
from mptrain.runlog.directory import hold_lock
from mptrain.runlog.run_state import Attempt
from mptrain.runlog.sweeps import read_sweep
from mptrain.study.sweep import runner as sweeps
from mptrain.study.sweep.points import Point, expand
from mptrain.study.sweep.runner import (
    directory_name,
    missing_points,
    plan_sweep,
    quoted,
    refresh_status,
    require_free,
    run_sweep,
    sweep_folder,
)
from mptrain.system.errors import ConfigError, StorageError
from tests import jobs_that_end as jobs
from tests.loops import each


@pytest.fixture(scope="module")
def composer():
    return Composer()


class Watched:
    """Keeps what ``sweep.json`` said at each change."""

    def __init__(self):
        self.seen = []

    def changed(self, sweep, job):
        assert read_sweep(sweep.folder) == sweep
        self.seen.append((job.number, job.status))

    def progressed(self, number, progress):
        pass

    def stopping(self, name):
        pass

    def tick(self):
        pass


def planned(composer, folder, *words, **more):
    folder.mkdir(exist_ok=True)
    return plan_sweep(expand(words, composer.catalogue), folder, words=words, **more)


def statuses(sweep):
    return [job.status for job in sweep.jobs]


def test_every_change_of_a_job_is_on_record_and_one_failure_gives_7(composer, tmp_path):
    sweep = planned(composer, tmp_path / "it's a sweep", f"seed={jobs.DONE},{jobs.BUG},{jobs.SAYS}")
    watch = Watched()
    sweep, code = run_sweep(sweep, composer, jobs.program(), watch)
    assert code == 7
    assert statuses(sweep) == ["done", "failed", "done"]
    assert watch.seen == [
        (0, "running"), (0, "done"), (1, "running"), (1, "failed"), (2, "running"), (2, "done"),
    ]  # fmt: skip
    assert read_sweep(sweep.folder) == sweep
    assert sweep.jobs[1].reason == "ZeroDivisionError: oh"
    assert sweep.jobs[0].seconds > 0
    assert sweep.paths.log("001-seed=2").read_text().startswith("seed 2\n")


def test_a_second_run_of_it_runs_what_is_not_done_by_what_the_runs_say(composer, tmp_path):
    sweep = planned(composer, tmp_path / "s", f"seed={jobs.DONE},{jobs.BUG},{jobs.SAYS}", parallel=2)
    sweep, _ = run_sweep(sweep, composer, jobs.program(), Watched())
    (sweep.folder / "002-seed=9" / "run.json").unlink()  # sweep.json says that it is done
    found = refresh_status(read_sweep(sweep.folder))
    assert statuses(found) == ["done", "waiting", "waiting"]
    assert [(point.number, point.description) for point in missing_points(found)] == [
        (1, "point 2/3 (seed=2)"),
        (2, "point 3/3 (seed=9)"),
    ]
    watch = Watched()
    _, code = run_sweep(found, composer, jobs.program(), watch)
    assert code == 7
    assert {number for number, _ in watch.seen} == {1, 2}


def test_without_failures_it_ends_with_0_and_nothing_is_run_again(composer, tmp_path):
    sweep = planned(composer, tmp_path / "s", f"seed={jobs.DONE},{jobs.SAYS}")
    sweep, code = run_sweep(sweep, composer, jobs.program(), Watched())
    assert code == 0
    watch = Watched()
    _, code = run_sweep(sweep, composer, jobs.program(), watch)
    assert (code, watch.seen) == (0, [])


@pytest.mark.parametrize(("kind", "again", "ends"), [("sweep", {0, 1}, 7), ("comparison", {0}, 0), ("recipe", {0}, 0)])
def test_a_failure_of_numerics_is_a_finding_where_arms_are_judged(composer, tmp_path, kind, again, ends):
    sweep = planned(composer, tmp_path / "s", f"seed={jobs.DONE},{jobs.BUG}", kind=kind)
    failed = RunDirectory(RunPaths(sweep.paths.run(sweep.jobs[1].name)))
    failed.root.mkdir()
    failed.write_state(RunState("x", (), "", status="failed", exit_code=4, reason="only overflows\nmore"))
    watch = Watched()
    sweep, code = run_sweep(sweep, composer, jobs.program(), watch)
    assert {number for number, _ in watch.seen} == again
    assert code == ends
    if kind != "sweep":
        assert (statuses(sweep), sweep.jobs[1].reason) == (["done", "failed"], "only overflows")


def test_arms_take_turns(composer, tmp_path):
    points = [
        Point(number, (f"seed={number}",), (), arm=arm) for number, arm in enumerate(["a", "a", "a", "b", "b", "b"])
    ]
    (tmp_path / "s").mkdir()
    sweep = plan_sweep(points, tmp_path / "s", words=(), kind="comparison")
    watch = Watched()
    run_sweep(sweep, composer, jobs.program(jobs.finish_at_once), watch)
    started = [number for number, status in watch.seen if status == "running"]
    assert started == [0, 3, 1, 4, 2, 5]


def test_each_job_has_a_directory_of_its_own_and_may_go_on_there(composer, tmp_path):
    sweep = planned(composer, tmp_path / "it's", "seed=0,1", "run.name=mine", "run.resume=must", "run.root=elsewhere")
    assert [job.overrides for job in sweep.jobs] == [("seed=0",), ("seed=1",)]
    config = composer.compose(sweeps._spec(sweep, sweep.jobs[1]).words)
    assert (config.run.root, config.run.name, config.run.resume) == (str(tmp_path / "it's"), "001-seed=1", "auto")


def test_a_sweep_that_is_there_goes_on_if_its_points_are_the_same(composer, tmp_path):
    first = planned(composer, tmp_path / "s", f"seed={jobs.DONE},{jobs.BUG}", "run.name=s")
    first, _ = run_sweep(first, composer, jobs.program(), Watched())
    again = planned(
        composer, tmp_path / "s", f"seed={jobs.DONE},{jobs.BUG}", "run.name=s", "run.resume=auto", parallel=3
    )
    assert again.jobs == first.jobs
    assert (again.started, again.parallel) == (first.started, 3)
    with pytest.raises(StorageError, match="is a sweep with different points"):
        planned(composer, tmp_path / "s", "seed=0,1,2")
    with pytest.raises(StorageError, match="is a sweep with different points"):
        planned(composer, tmp_path / "s", f"seed={jobs.DONE},{jobs.BUG}", kind="comparison")


def test_only_one_process_runs_a_sweep(composer, tmp_path):
    sweep = planned(composer, tmp_path / "s", "seed=0")
    require_free(sweep)
    with hold_lock(sweep.paths.lock):
        with pytest.raises(StorageError, match="is being written by"):
            run_sweep(sweep, composer, jobs.program(), Watched())
        with pytest.raises(StorageError, match="is being written by"):
            require_free(sweep)


def test_a_sweep_that_is_being_run_is_not_written_over(composer, tmp_path):
    sweep = planned(composer, tmp_path / "s", "seed=0")
    before = [path.read_bytes() for path in (sweep.paths.json, sweep.paths.csv)]
    with hold_lock(sweep.paths.lock), pytest.raises(StorageError, match="is being written by"):
        planned(composer, tmp_path / "s", "seed=0", parallel=3)
    assert [path.read_bytes() for path in (sweep.paths.json, sweep.paths.csv)] == before


def test_a_run_that_somebody_else_goes_on_with_is_named_at_once_and_left_alone(composer, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "_PATIENCE", 0.2)
    sweep = planned(composer, tmp_path / "s", f"seed={jobs.DONE},{jobs.SAYS}")
    run = RunDirectory(RunPaths(sweep.paths.run(sweep.jobs[0].name)))
    run.root.mkdir()
    watch = Watched()
    with run.lock():
        sweep, code = run_sweep(sweep, composer, jobs.program(), watch)
    assert code == 7
    assert watch.seen == [(0, "running"), (1, "running"), (1, "done")]
    assert statuses(sweep) == ["running", "done"]
    assert re.match(r"still run by process \d+ on .*, which outlived the sweep", sweep.jobs[0].reason)
    assert read_sweep(sweep.folder) == sweep
    sweep, code = run_sweep(sweep, composer, jobs.program(), watch)
    assert (code, statuses(sweep), sweep.jobs[0].reason) == (0, ["done", "done"], "")


def test_a_process_that_outlived_its_sweep_is_waited_for(composer, tmp_path):
    sweep = planned(composer, tmp_path / "s", f"seed={jobs.DONE}")
    run = RunDirectory(RunPaths(sweep.paths.run("000")))
    run.root.mkdir()
    watch = Watched()
    with contextlib.ExitStack() as held:
        held.enter_context(run.lock())
        watch.tick = held.close  # it ends while the sweep waits
        sweep, code = run_sweep(sweep, composer, jobs.program(), watch)
    assert (code, statuses(sweep)) == (0, ["done"])
    assert watch.seen == [(0, "running"), (0, "waiting"), (0, "running"), (0, "done")]


def test_the_time_of_a_job_is_that_of_all_its_processes(composer, tmp_path):
    sweep = planned(composer, tmp_path / "s", f"seed={jobs.BUG}")
    sweep, _ = run_sweep(sweep, composer, jobs.program(), Watched())
    first = sweep.jobs[0].seconds
    sweep = sweep.with_job(replace(sweep.jobs[0], seconds=17.0))
    sweep, _ = run_sweep(sweep, composer, jobs.program(), Watched())
    assert 0 < first < 17.0 < sweep.jobs[0].seconds


def test_attempts_that_no_sweep_saw_end_count_as_well(composer, tmp_path):
    sweep = planned(composer, tmp_path / "s", "seed=0,1")
    for job, ended in zip(sweep.jobs, ("2026-01-02T03:00:17.000+00:00", None), strict=True):
        run = RunDirectory(RunPaths(sweep.paths.run(job.name)))
        run.root.mkdir()
        attempt = Attempt("2026-01-02T03:00:00.000+00:00", ended, 1, "here", 0)
        run.write_state(RunState("x", (), "", status="preempted", attempts=(attempt,)))
        run.paths.steps.touch()
    os.utime(run.paths.run_json, (1000, 1000))
    os.utime(run.paths.steps, (1012.5, 1012.5))  # its last step before it was killed
    found = refresh_status(sweep)
    assert [job.seconds for job in found.jobs] == [17.0, 12.5]
    assert [job.seconds for job in refresh_status(found).jobs] == [17.0, 12.5]
    longer = found.with_job(replace(found.jobs[0], seconds=20.0))  # with the start of its process
    assert refresh_status(longer).jobs[0].seconds == 20.0


def test_the_plan_and_the_arms_of_a_comparison_are_kept(composer, tmp_path):
    points = [replace(point, arm=f"arm{point.number}") for point in expand(["seed=0,1"], composer.catalogue)]
    plan_sweep(points, tmp_path, words=["seed=0,1"], kind="comparison", plan={"margin": 0.01}, config_dirs=["conf"])
    fields = json.loads((tmp_path / "sweep.json").read_text())
    assert (fields["kind"], fields["plan"]) == ("comparison", {"margin": 0.01})
    assert [job["arm"] for job in fields["jobs"]] == ["arm0", "arm1"]
    assert fields["config_dirs"][0].startswith("/")


def test_directory_names_are_sortable_and_safe():
    assert directory_name(Point(7, (), ("a=b/../c", "d='x y'"))) == "007-a=b_.._c,d=_x_y"
    assert directory_name(Point(7, (), ())) == "007"
    assert len(directory_name(Point(7, (), ("x=" + "y" * 500,)))) <= 104


def test_a_sweep_has_a_folder_of_its_own_below_sweeps(tmp_path):
    options = RunOptions(root=str(tmp_path))
    first, second = sweep_folder(options), sweep_folder(options)
    assert first != second
    assert first.is_dir()
    assert first.parent.parent == tmp_path / "sweeps"
    datetime.strptime(first.parent.name, "%Y-%m-%d")
    assert sweep_folder(replace(options, name="mine")) == tmp_path / "mine"


def test_a_named_folder_is_a_sweep_of_ours_or_nothing_yet(composer, tmp_path):
    options = RunOptions(root=str(tmp_path), name="mine")
    with pytest.raises(StorageError, match=r"run\.resume=must: there is no sweep in"):
        sweep_folder(replace(options, resume="must"))
    planned(composer, sweep_folder(options), "seed=0")
    with pytest.raises(StorageError, match="there is a sweep in") as caught:
        sweep_folder(options)
    assert f"mptrain resume {tmp_path / 'mine'}" in caught.value.hint
    for resume in ("auto", "must"):
        assert sweep_folder(replace(options, resume=resume)) == tmp_path / "mine"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    for name in ("run", "run/below"):
        with pytest.raises(StorageError, match=r"(?m)(is|lies in) the run .*run$"):
            sweep_folder(replace(options, name=name))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(StorageError, match="other exists and is not a sweep"):
        sweep_folder(replace(options, name="other", resume="auto"))
    with pytest.raises(ConfigError, match=r"run\.resume=auto needs a run\.name"):
        sweep_folder(RunOptions(resume="auto"))


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        sweep_folder(RunOptions(root=str(tmp_path / "file")))


@each("text", ["plain", "it's", "back\\slash", "a,b", "x: {y}", "tail\\", "\\'"])
def test_quoted_values_come_back_as_they_were(text):
    assert compose([f"run.root={quoted(text)}"]).run.root == text
