"""The lock of a run: one writer, across processes, released by the kernel."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from mptrain.runlog.directory import hold_lock, holder_of
from mptrain.system.errors import StorageError

HOLD = """
import sys, pathlib
from mptrain.runlog.directory import hold_lock
with hold_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

FORK_AND_DIE = """
import os, sys, time, signal, pathlib
from mptrain.runlog.directory import hold_lock
with hold_lock(pathlib.Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        print("forked", os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sigkill_releases_what_a_second_process_is_refused(tmp_path, python):
    child = python(HOLD, tmp_path / "run.lock")
    assert child.stdout.readline() == "held\n"
    words = rf"process {child.pid} on {re.escape(socket.gethostname())} since "
    with pytest.raises(StorageError, match=words), hold_lock(tmp_path / "run.lock"):
        pytest.fail("two writers")
    holder = holder_of(tmp_path / "run.lock")
    assert (holder.pid, holder.host) == (child.pid, socket.gethostname())
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert holder_of(tmp_path / "run.lock") is None
    with hold_lock(tmp_path / "run.lock"):
        assert holder_of(tmp_path / "run.lock").pid == os.getpid()


def test_a_second_writer_in_the_same_process_is_refused_too(tmp_path):
    with hold_lock(tmp_path / "run.lock"), pytest.raises(StorageError, match=f"process {os.getpid()} "):
        hold_lock(tmp_path / "run.lock").__enter__()


def test_a_forked_worker_keeps_no_lock_of_its_killed_parent(tmp_path, python):
    parent = python(FORK_AND_DIE, tmp_path / "run.lock")
    word, worker = parent.stdout.readline().split()
    try:
        assert word == "forked"
        assert holder_of(tmp_path / "run.lock").pid == parent.pid  # the worker's closing did not release it
        assert parent.wait() == -signal.SIGKILL
        os.kill(int(worker), 0)  # the worker lives on
        with hold_lock(tmp_path / "run.lock"):
            pass
    finally:
        os.kill(int(worker), signal.SIGKILL)


def test_leaving_releases_it_also_after_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match="inside"), hold_lock(tmp_path / "run.lock"):
        raise RuntimeError("inside")
    assert holder_of(tmp_path / "run.lock") is None


def test_looking_makes_no_file_and_finds_nobody(tmp_path):
    assert holder_of(tmp_path / "run.lock") is None
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_has_not_said_its_name_is_another_process(tmp_path):
    with hold_lock(tmp_path / "run.lock"):
        os.truncate(tmp_path / "run.lock", 0)
        assert str(holder_of(tmp_path / "run.lock")) == "another process"


def test_a_lock_in_a_missing_directory_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot lock"), hold_lock(tmp_path / "gone" / "run.lock"):
        pass
