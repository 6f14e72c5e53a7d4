from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from mptrain.engine.resources import memory_now, memory_peak
from mptrain.runlog.checkpoint_data import HashedFile
from mptrain.study.sweep.local_executor import Slots
from mptrain.system import machine
from tests.small_runs import TINY, loop_of, steps_of


@pytest.fixture
def without_linux(monkeypatch):
    """Take away what macOS lacks."""
    monkeypatch.setattr(machine, "_PROC", Path("/nonexistent"))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.delattr(signal, "sigwaitinfo")


@pytest.mark.usefixtures("without_linux")
def test_a_run_trains_without_what_only_linux_has(tmp_path):
    loop = loop_of(tmp_path, *TINY, "device=cpu", "dataset.workers=0", "train.max_steps=4")
    loop.run()
    assert len(steps_of(loop)) == 4
    assert memory_now(loop.parts.device) > 2**20
    assert memory_peak(loop.parts.device) >= memory_now(loop.parts.device)
    assert Slots.of_this_machine(2).threads >= 1


@pytest.mark.usefixtures("without_linux")
@pytest.mark.parametrize(("system", "unit"), [("darwin", 1), ("freebsd", 1024)])
def test_memory_comes_from_getrusage_in_the_units_of_the_system(monkeypatch, system, unit):
    monkeypatch.setattr(sys, "platform", system)
    largest = machine.resource.getrusage(machine.resource.RUSAGE_SELF).ru_maxrss
    assert machine.resident_memory() >= largest * unit
    assert machine.resident_peak() >= largest * unit
    machine.forget_peak()


@pytest.mark.usefixtures("without_linux")
def test_cores_are_counted_by_the_newest_call_that_there_is(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    assert machine.usable_cores() == 1
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.usable_cores() == 6
    monkeypatch.setattr(os, "process_cpu_count", lambda: 5, raising=False)
    assert machine.usable_cores() == 5


def test_a_process_is_known_to_run_with_and_without_proc(monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for _ in range(2):
        assert machine.is_running(os.getpid())
        assert machine.is_running(1)  # somebody else's
        assert not machine.is_running(ended.pid)
        monkeypatch.setattr(machine, "_PROC", Path("/nonexistent"))


def test_a_folders_place_is_known_only_where_the_system_says_it(tmp_path, monkeypatch):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert machine.path_of_descriptor(descriptor) == tmp_path
        monkeypatch.setattr(machine, "_PROC", Path("/nonexistent"))
        assert machine.path_of_descriptor(descriptor) is None
        monkeypatch.setattr(machine.fcntl, "F_GETPATH", 50, raising=False)
        monkeypatch.setattr(machine.fcntl, "fcntl", lambda *call: b"/moved/here".ljust(1024, b"\0"))
        assert machine.path_of_descriptor(descriptor) == Path("/moved/here")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("linux", [True, False])
def test_a_process_ends_with_its_parent(tmp_path, linux):
    child = (
        "import ctypes, signal, sys, time, types\n"
        "from mptrain.system import machine\n"
        f"if not {linux}: machine.ctypes = types.SimpleNamespace(CDLL=lambda *a, **k: object())\n"
        "machine.ends_with_parent(signal.SIGKILL)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline() == b'ready\\n'\n"
        "print(child.pid, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    pid, deadline = int(done.stdout), time.monotonic() + 20
    while machine.is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not machine.is_running(pid)


@pytest.mark.usefixtures("without_linux")
def test_large_files_are_written_without_advice_to_the_system(tmp_path):
    with HashedFile(tmp_path / "large", {}) as file:
        file.write(bytes(2**25))
    assert (tmp_path / "large").stat().st_size == 2**25


def test_frozen_objects_are_never_looked_at_by_the_collector(monkeypatch):
    looks = []
    gc.unfreeze()
    monkeypatch.setattr(machine, "_has_frozen", False)
    gc.callbacks.append(lambda phase, info: looks.append(phase))
    try:
        with machine.dropping_nothing():
            made = [[number] for number in range(10_000)]
        assert not looks
        assert not {id(one) for one in gc.get_objects()} & set(map(id, made))
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()
        gc.unfreeze()


def test_garbage_is_collected_before_objects_are_frozen_again():
    class Run:
        pass

    try:
        with machine.dropping_nothing():
            pass
        run = Run()
        run.itself, left = run, weakref.ref(run)
        del run
        assert left() is not None
        with machine.dropping_nothing():
            pass
        assert left() is None
    finally:
        gc.unfreeze()
