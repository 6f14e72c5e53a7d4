"""Whatever a job does to its process, the pool knows how it ended, and goes on."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from mptrain.config.compose import Composer
from mptrain.study.sweep import local_executor
from mptrain.study.sweep.executor import JobSpec, Listener
from mptrain.study.sweep.local_executor import LocalExecutor, Slots
from mptrain.study.sweep.processes import run_in_fork
from mptrain.system.errors import DataError, EnvironmentRefused, StorageError
from tests import jobs_that_end as jobs

COMPOSER = Composer()
ONE = Slots(1)


class Heard(Listener):
    def __init__(self):
        self.endings = {}
        self.progress = {}
        self.order = []

    def started(self, number):
        self.order.append(("started", number))

    def progressed(self, number, progress):
        self.progress.setdefault(number, []).append(progress)

    def ended(self, number, ended, seconds):
        self.order.append(("ended", number))
        self.endings[number] = ended


def specs_of(folder, *deeds, words=()):
    def words_of(number, deed):
        return (f"seed={deed}", f"run.root={folder}", f"run.name=run{number}", *words)

    return [
        JobSpec(number, words_of(number, deed), folder / f"run{number}", folder / f"{number}.log")
        for number, deed in enumerate(deeds)
    ]


def run(folder, *deeds, slots=ONE, program=None, words=()):
    heard = Heard()
    code = LocalExecutor(COMPOSER, program or jobs.program(), slots).run(specs_of(folder, *deeds, words=words), heard)
    return heard, code


def log(folder, number=0):
    return (folder / f"{number}.log").read_text()


def test_every_way_to_end_is_known_and_ends_nobody_else(tmp_path):
    deeds = (jobs.NUMERICS, jobs.BUG, jobs.LEAVES, jobs.KILLED, jobs.SILENT, jobs.DONE)
    heard, code = run(tmp_path, *deeds, slots=Slots(2))
    assert code is None
    found = [(heard.endings[n].status, heard.endings[n].code, heard.endings[n].reason) for n in range(len(deeds))]
    assert found[0] == ("failed", 4, "only overflows")
    assert found[1] == ("failed", 1, "ZeroDivisionError: oh")
    assert found[2][:2] == ("failed", 1)
    assert re.fullmatch(r"sys\.exit\(0\) in jobs_that_end\.py:\d+", found[2][2])
    assert found[3] == ("failed", -9, "killed by SIGKILL (out of memory?)")
    assert found[4] == ("failed", 1, "its process ended with exit code 0 and no message")
    assert found[5] == ("done", 0, "")


def test_what_a_job_prints_and_why_it_failed_is_in_its_log(tmp_path):
    run(tmp_path, jobs.BUG)
    text = log(tmp_path)
    assert text.startswith("seed 2\n")
    assert "Traceback" in text
    assert text.endswith("ZeroDivisionError: oh\nreported oh\n")


def test_a_job_that_was_stopped_on_its_own_does_not_stop_the_others(tmp_path):
    heard, code = run(tmp_path, jobs.STOPPED, jobs.DONE)
    assert code is None
    assert [heard.endings[n].status for n in (0, 1)] == ["preempted", "done"]


def test_a_process_that_something_holds_back_after_its_job_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(local_executor, "_LEAVING", 0.2)
    began = time.monotonic()
    heard, _ = run(tmp_path, jobs.HELD, jobs.DONE)
    assert [heard.endings[n].status for n in (0, 1)] == ["done", "done"]
    assert time.monotonic() - began < 60


def test_what_a_job_says_about_its_progress_arrives(tmp_path):
    heard, _ = run(tmp_path, jobs.SAYS)
    first, *_, last = heard.progress[0]
    assert (first.step, first.steps, first.scales, first.skipped, first.metric_name) == (0, 3, (4096.0,), 2, "")
    assert (last.step, last.metric_name, last.metric) == (2, "top1", 0.5)


def test_a_pipe_that_nobody_reads_holds_no_job_up(tmp_path):
    class Slow(Heard):
        def started(self, number):
            deadline = time.monotonic() + 30
            while "all said" not in log(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.01)

    heard = Slow()
    (tmp_path / "0.log").touch()
    LocalExecutor(COMPOSER, jobs.program(jobs.flood), ONE).run(specs_of(tmp_path, jobs.DONE), heard)
    assert "all said" in log(tmp_path)
    assert 10 < len(heard.progress[0]) < 20_000
    assert heard.endings[0].status == "done"


def test_as_many_jobs_run_at_a_time_as_there_are_slots(tmp_path):
    heard, _ = run(tmp_path, *[jobs.DONE] * 5, slots=Slots(2))
    running = most = 0
    for what, _ in heard.order:
        running += 1 if what == "started" else -1
        most = max(most, running)
    assert most == 2
    assert [number for what, number in heard.order if what == "started"] == [0, 1, 2, 3, 4]


def test_the_fork_server_has_one_thread_and_torch_ready(tmp_path):
    heard, _ = run(tmp_path, jobs.DONE, program=jobs.program(jobs.describe))
    assert heard.endings[0].status == "done", log(tmp_path)
    assert "parent threads 1\n" in log(tmp_path)
    assert "torch before True\n" in log(tmp_path)
    assert "out of memory first 500\n" in log(tmp_path)


@pytest.mark.long
def test_jobs_on_accelerator_are_fresh_processes_that_see_one_gpu_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(local_executor, "_on_accelerator", lambda config: True)
    heard, _ = run(
        tmp_path, *[jobs.DONE] * 3, slots=Slots(2, None, ("7", "GPU-8")), program=jobs.program(jobs.describe)
    )
    assert {ended.status for ended in heard.endings.values()} == {"done"}, log(tmp_path)
    logs = [log(tmp_path, number) for number in range(3)]
    assert {line for text in logs for line in text.splitlines() if line.startswith("gpus")} == {"gpus 7", "gpus GPU-8"}
    assert all("torch before False\n" in text for text in logs)
    assert all("leads its session True\n" in text for text in logs)


@pytest.mark.parametrize(
    ("count", "procs", "gpus"),
    [
        (2, 2, ["0,1", "2,3"]),
        (2, 1, ["0", "2"]),
        (4, 1, ["0", "1", "2", "3"]),
        (3, 2, ["0,1", "2,3", "0,1"]),
        (2, 3, ["0,1,2", "3,0,1"]),
        (1, 4, ["0,1,2,3"]),
    ],
)
def test_a_job_sees_a_gpu_for_each_of_its_ranks(count, procs, gpus):
    slots = Slots(count, gpus=("0", "1", "2", "3"))
    assert [slots.environment(slot, procs)["CUDA_VISIBLE_DEVICES"] for slot in range(count)] == gpus


def test_more_ranks_than_gpus_are_refused_before_the_first_job(tmp_path, monkeypatch):
    monkeypatch.setattr(local_executor, "_on_accelerator", lambda config: config.device != "cpu")
    two, heard = Slots(1, gpus=("4", "5")), Heard()
    specs = specs_of(tmp_path, jobs.DONE, words=("device=cuda", "distributed.procs=1"))
    specs += specs_of(tmp_path, jobs.DONE, words=("device=cuda", "distributed.procs=3"))
    with pytest.raises(EnvironmentRefused, match=r"distributed\.procs=3 needs 3 GPUs for a job, and this sweep has 2"):
        LocalExecutor(COMPOSER, jobs.program(), two).run(specs, heard)
    assert heard.order == []


@pytest.mark.process
def test_ranks_on_the_cpu_need_no_gpu_and_those_on_gpus_see_as_many(tmp_path, monkeypatch):
    monkeypatch.setattr(local_executor, "_on_accelerator", lambda config: config.device != "cpu")
    two, program = Slots(1, gpus=("4", "5")), jobs.program(jobs.describe)
    for name in ("cpu", "gpu"):
        (tmp_path / name).mkdir()
    heard, _ = run(tmp_path / "cpu", jobs.DONE, slots=two, words=("device=cpu", "distributed.procs=3"))
    assert heard.endings[0].status == "done"
    run(tmp_path / "gpu", jobs.DONE, slots=two, program=program, words=("device=cuda", "distributed.procs=2"))
    assert "gpus 4,5\n" in log(tmp_path / "gpu")


def test_cores_are_divided_among_jobs_unless_threads_says_otherwise(tmp_path):
    assert Slots.of_this_machine(1).threads is None
    assert Slots.of_this_machine(2).threads == max(1, len(os.sched_getaffinity(0)) // 2)
    assert Slots.of_this_machine(10_000).threads == 1
    run(tmp_path, jobs.DONE, slots=Slots(1, threads=1), program=jobs.program(jobs.threads))
    assert "threads 1\n" in log(tmp_path)


def test_a_disk_that_refuses_ends_it_and_leaves_no_process(tmp_path):
    class Refused(Heard):
        def ended(self, number, ended, seconds):
            raise StorageError("full")

    began = time.monotonic()
    with pytest.raises(StorageError, match="full"):
        LocalExecutor(COMPOSER, jobs.program(), Slots(2)).run(specs_of(tmp_path, jobs.DONE, jobs.STUCK), Refused())
    assert time.monotonic() - began < 30


def open_descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_no_descriptor_and_no_child_is_left(tmp_path):
    run(tmp_path, jobs.DONE)
    before, children = open_descriptors(), children_of_this_process()
    run(tmp_path, jobs.DONE, jobs.KILLED, jobs.BUG, jobs.DONE, slots=Slots(2))
    assert open_descriptors() == before
    assert set(children_of_this_process()) <= set(children)


@pytest.mark.process
def test_when_the_fork_server_is_killed_its_jobs_fail_and_the_others_go_on(tmp_path):
    class Murderer(Heard):
        def started(self, number):
            super().started(number)
            if number == 1:
                [server] = [pid for pid in children_of_this_process() if os.getsid(pid) == pid]
                os.kill(server, signal.SIGKILL)

    heard = Murderer()
    specs = specs_of(tmp_path, jobs.STUCK, jobs.STUCK, jobs.DONE, jobs.DONE)
    assert LocalExecutor(COMPOSER, jobs.program(), Slots(2)).run(specs, heard) is None
    assert [heard.endings[n].status for n in range(4)] == ["failed", "failed", "done", "done"]
    assert heard.endings[0].reason == "the fork server was killed, which stopped the job"


def children_of_this_process():
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_a_question_is_answered_by_another_process():
    assert run_in_fork(os.getpid, ()) != os.getpid()


def test_an_error_comes_back_as_it_was_raised_and_a_death_as_a_refusal():
    with pytest.raises(DataError, match="no data") as caught:
        run_in_fork(jobs.refuse, jobs.program().modules)
    assert caught.value.hint == "get some"
    with pytest.raises(EnvironmentRefused, match="killed by SIGKILL"):
        run_in_fork(jobs.die, jobs.program().modules)
