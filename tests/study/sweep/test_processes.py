"""What the fork server needs for itself does not reach the jobs, nor the processes that come from elsewhere."""

from __future__ import annotations

import os
import signal

import pytest

from mptrain.study.sweep import processes
from mptrain.study.sweep.processes import OF_THE_SERVER, describe_exit_code, run_in_fork
from tests import jobs_that_end as jobs


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)


class Started:
    """A process that notes its parent's environment where it is started."""

    def start(self):
        self.found = dict(os.environ)


def test_a_job_does_not_inherit_the_variables_of_the_fork_server():
    found = run_in_fork(jobs.environment, jobs.program().modules)
    assert "OPENBLAS_NUM_THREADS" not in found
    assert OF_THE_SERVER not in found


def test_the_server_begins_with_one_thread_and_the_callers_environment_stays(monkeypatch):
    monkeypatch.setattr(processes, "_is_forked", lambda process: True)
    process = processes.start(Started())
    assert process.found["OPENBLAS_NUM_THREADS"] == "1"
    assert process.found[OF_THE_SERVER] == "OPENBLAS_NUM_THREADS"
    assert os.environ.keys().isdisjoint({"OPENBLAS_NUM_THREADS", OF_THE_SERVER})


def test_what_the_user_set_is_neither_changed_nor_dropped(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    monkeypatch.setattr(processes, "_is_forked", lambda process: True)
    process = processes.start(Started())
    assert (process.found["OPENBLAS_NUM_THREADS"], process.found[OF_THE_SERVER]) == ("3", "")
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"


def test_a_fresh_process_begins_with_the_users_environment():
    assert processes.start(Started()).found.keys().isdisjoint({"OPENBLAS_NUM_THREADS", OF_THE_SERVER})


def test_a_death_without_a_name_is_told_by_its_number():
    assert describe_exit_code(3) == "its process ended with exit code 3 and no message"
    assert describe_exit_code(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe_exit_code(-99) == "killed by signal 99"


def test_only_the_named_variables_are_dropped(monkeypatch):
    monkeypatch.setenv(OF_THE_SERVER, "ONE_OF_OURS GONE_ALREADY")
    monkeypatch.setenv("ONE_OF_OURS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    processes.reset_after_fork()
    assert os.environ.keys().isdisjoint({OF_THE_SERVER, "ONE_OF_OURS"})
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
