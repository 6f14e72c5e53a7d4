"""Points of a sweep that go through submitit to a Slurm that is made of scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mptrain.config.compose import Composer
from mptrain.config.launcher import Launcher
from mptrain.runlog.sweeps import read_sweep
from mptrain.study.commands.sweep import launcher_of
from mptrain.study.sweep import slurm_executor
from mptrain.study.sweep.executor import JobOutcome
from mptrain.study.sweep.points import expand
from mptrain.study.sweep.runner import plan_sweep, refresh_status, run_sweep
from mptrain.study.sweep.slurm_executor import FOLDER, require_none_queued
from mptrain.study.sweep.worker import read_result
from mptrain.system.errors import EnvironmentRefused, StorageError
from tests import fake_slurm
from tests import jobs_that_end as jobs
from tests.small_runs import environment

pytestmark = pytest.mark.process

pytest.importorskip("submitit")
TWO = Launcher(at_once=2)


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Jobs are fresh processes, and find the tests where this one does."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    return tmp_path


@pytest.fixture
def slurm(folder, monkeypatch):
    home = fake_slurm.install(folder / "bin", sys.executable)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm_executor, "_ASK", 0.5)
    monkeypatch.setattr(slurm_executor, "_LATE", 1.0)
    return home


def first(slurm):
    return (slurm / "first").read_text()


class Watched:
    def __init__(self):
        self.seen = []
        self.stopped = []

    def changed(self, sweep, job):
        self.seen.append((job.number, job.status))

    def progressed(self, number, progress):
        pass

    def stopping(self, name):
        self.stopped.append(name)

    def tick(self):
        pass


def planned(composer, folder, *words):
    (folder / "s").mkdir()
    return plan_sweep(expand(words, composer.catalogue), folder / "s", words=words)


def run(sweep, composer, launcher, function=jobs.train, watch=None):
    return run_sweep(sweep, composer, jobs.program(function), watch or Watched(), launcher=launcher)


def test_jobs_that_are_done_that_fail_and_that_are_killed(composer, folder, slurm):
    sweep = planned(composer, folder, f"seed={jobs.DONE},{jobs.BUG},{jobs.KILLED},{jobs.LEAVES}")
    watch = Watched()
    sweep, code = run(sweep, composer, TWO, watch=watch)
    assert code == 7
    assert [job.status for job in sweep.jobs] == ["done", "failed", "failed", "failed"]
    assert sweep.jobs[1].reason == "ZeroDivisionError: oh"
    assert sweep.jobs[2].reason.endswith("without a result")
    assert sweep.jobs[3].reason.startswith("sys.exit(0) in jobs_that_end.py:")
    assert sweep.paths.log("000-seed=0").read_text().startswith("seed 0\n")
    assert {(0, "running"), (0, "done"), (2, "running")} <= set(watch.seen)
    assert read_sweep(sweep.folder) == sweep

    again, code = run(refresh_status(sweep), composer, TWO, jobs.finish_at_once)
    assert code == 0
    assert len(list((sweep.folder / FOLDER).iterdir())) == 2  # each time has a folder that was empty
    assert again.jobs[0] == sweep.jobs[0] or again.jobs[0].status == "done"


@pytest.mark.parametrize(
    "name", ["y\ntouch PWNED\n", "a\rb", "50%j", "back\\slash", "esc\x1b[2J", "\u2028line", "caf\udce9"]
)
def test_a_folder_that_a_batch_script_cannot_name_is_refused_before_anything_is_submitted(
    composer, folder, slurm, monkeypatch, name
):
    (folder / name).mkdir()
    monkeypatch.chdir(folder / name)
    (folder / name / "s").mkdir()
    words = (f"seed={jobs.DONE}",)
    for place in (Path("s"), folder / name / "s"):  # the current folder's name counts too
        sweep = plan_sweep(expand(words, composer.catalogue), place, words=words)
        with pytest.raises(StorageError, match="cannot stand in a batch script"):
            run(sweep, composer, Launcher(), jobs.finish_at_once)
    assert not (folder / name / "s" / FOLDER).exists()


def test_a_folder_with_other_letters_is_quoted(composer, folder, slurm):
    (folder / 'it\'s "$(touch PWNED)" `x` #; é').mkdir()
    sweep = planned(composer, folder / 'it\'s "$(touch PWNED)" `x` #; é', f"seed={jobs.DONE}")
    _, code = run(sweep, composer, Launcher(), jobs.finish_at_once)
    assert code == 0
    assert not [*folder.rglob("PWNED")]
    [script] = slurm.glob("*.sh")
    assert "$(touch PWNED)" in script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_what_is_handed_over_holds_words_and_no_secret(composer, folder, slurm, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "sesame-open-now")
    sweep = planned(composer, folder, "seed=0", "model=torchvision", "model.name=sesame-open-now")
    sweep, code = run(sweep, composer, TWO, jobs.finish_at_once)
    assert code == 0
    [pickled] = (sweep.folder / FOLDER).glob("*/*_submitted.pkl")
    assert b"seed=0" in pickled.read_bytes()
    assert b"sesame-open-now" not in pickled.read_bytes()
    assert pickled.parent.stat().st_mode & 0o077 == 0


def test_a_signal_cancels_the_jobs_which_save_themselves(composer, folder, slurm):
    sweep = planned(composer, folder, f"seed={jobs.STUCK},{jobs.DONE}")
    watch = Watched()

    def stop():
        while (0, "running") not in watch.seen:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    sweep, code = run(sweep, composer, Launcher(at_once=1), watch=watch)
    thread.join()
    assert code == 75
    assert watch.stopped == ["SIGTERM"]
    assert [job.status for job in sweep.jobs] == ["preempted", "waiting"]
    assert sweep.jobs[0].reason == "SIGTERM: stopped before training started"  # the job does not listen by itself


def test_slurm_is_asked_for_what_the_launcher_says_and_runs_the_points(composer, folder, slurm):
    sweep = planned(composer, folder, f"seed={jobs.DONE},{jobs.NUMERICS},{jobs.KILLED}")
    launcher = Launcher(partition="gpu", mem_gb=1.5, gpus_per_node=1, timeout_min=30, signal_delay_s=60, qos="low")
    sweep, code = run(sweep, composer, launcher)
    assert code == 7
    assert [job.status for job in sweep.jobs] == ["done", "failed", "failed"]
    assert sweep.jobs[1].code == 4
    assert "ended as FAILED without a result" in sweep.jobs[2].reason
    asked = set((slurm / f"{first(slurm)}.sh").read_text().splitlines())
    assert {
        "#SBATCH --partition=gpu", "#SBATCH --mem=1536MB", "#SBATCH --gpus-per-node=1", "#SBATCH --time=30", "#SBATCH --qos=low",
        "#SBATCH --requeue", "#SBATCH --signal=USR1@60", "#SBATCH --job-name=mptrain",
    } <= asked  # fmt: skip


def test_a_job_whose_time_is_up_is_queued_again_by_itself(composer, folder, slurm):
    sweep = planned(composer, folder, "seed=0")
    sweep, code = run(sweep, composer, Launcher(), jobs.takes_two_goes)
    assert code == 0
    assert (slurm / "requeued").read_text() == f"{first(slurm)}\n"
    assert sweep.paths.log("000").read_text().count("goes on") == 2


def test_a_job_that_makes_no_step_in_its_time_is_not_queued_for_ever(composer, folder, slurm):
    sweep = planned(composer, folder, "seed=0")
    sweep, _ = run(sweep, composer, Launcher(), jobs.gets_nowhere)
    assert not (slurm / "requeued").exists()
    assert (sweep.jobs[0].status, sweep.jobs[0].reason) == (
        "preempted",
        "no step was completed within the time limit: raise timeout_min",
    )


def test_a_sweep_whose_jobs_are_still_queued_is_not_run_twice(composer, folder, slurm):
    sweep = planned(composer, folder, "seed=0")
    earlier = sweep.folder / FOLDER / "earlier"
    earlier.mkdir(parents=True)
    (slurm / "321.pid").write_text(str(os.getpid()))
    for jobs_json in ('{"jobs": ["322", "; rm", 3]}', "{", "[]", '{"jobs": ["999"]}'):
        (earlier / "jobs.json").write_text(jobs_json)
        require_none_queued(sweep.folder)
    (earlier / "jobs.json").write_text('{"jobs": ["321"]}')
    with pytest.raises(StorageError, match="are still queued or running: 321") as refused:
        run(sweep, composer, None)
    assert refused.value.hint == "wait for them, or: scancel 321"


def test_without_slurm_it_says_so(composer, folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentRefused, match="there is no srun on this machine"):
        launcher_of("slurm", None)


def test_damaged_words_of_a_job_count_as_none(tmp_path):
    path = tmp_path / "told.json"
    for text in (
        "",
        "{",
        "[]",
        "7",
        '{"status": "flown"}',
        '{"status": "done", "code": "0"}',
        '{"status": []}',
        "[" * 9999,
    ):
        path.write_text(text)
        assert read_result(path) is None
    path.write_text(json.dumps({"status": "failed", "code": 4, "reason": "x"}))
    assert read_result(path) == JobOutcome("failed", 4, "x")
