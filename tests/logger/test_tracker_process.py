"""A tracker in its own process: it gets everything, and whatever it does, the run hears of it once and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from mptrain.logger import tracker_process
from mptrain.logger.base import TrackedRun
from mptrain.logger.tracker_process import TrackerProcess
from mptrain.system.records import StepRecord
from tests.own_trackers import Loud, Own, Short
from tests.small_runs import Kept


def step(number):
    return StepRecord("main", number, number, 0, 0.5, 1024.0, False, False, float("inf"), 0.1)


def opened(tmp_path, tracker=Own, **options):
    heard = Kept()
    run = TrackedRun("name", tmp_path, tmp_path / "samples", {"a": 1}, 0)
    return TrackerProcess(tracker(**options), run, tmp_path / "logger.log", heard), heard


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]


def messages(heard):
    assert all(record.kind == "warning" for record in heard.records)
    return [record.fields["message"] for record in heard.records]


def fill(sink, seconds, count=10**9):
    """Take records as fast as a quick training makes them, for so long."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end and number < count:
        number += 1
        sink.take(step(number))
        time.sleep(0.001)
    return number


def closed_in_order(tmp_path, heard):
    """Assert that the tracker was told the end, and that nothing was warned of."""
    assert lines(tmp_path)[-1] == {"record": "closed"}
    assert messages(heard) == []
    return True


def test_every_record_arrives_in_order_and_the_end_is_told(tmp_path):
    sink, heard = opened(tmp_path, close_seconds=60.0)
    count = fill(sink, 0.5)
    sink.close()
    assert closed_in_order(tmp_path, heard)
    assert lines(tmp_path)[:-1] == [{"record": "StepRecord", **asdict(step(n))} for n in range(1, count + 1)]
    assert "I say '' to standard input" in (tmp_path / "logger.log").read_text()  # what it prints; it reads nothing


def test_a_tracker_that_says_no_time_to_wait_for_is_closed_too(tmp_path):
    sink, heard = opened(tmp_path, Short)
    sink.take(step(1))
    sink.close()
    assert closed_in_order(tmp_path, heard)


@pytest.mark.long
@pytest.mark.parametrize("place", ["open", "take"])
@pytest.mark.parametrize(
    ("way", "reason"),
    [("raises", "Own failed: ConnectionError: the server is on fire;"), ("dies", "Own was killed by SIGKILL;")],
)
def test_a_failure_on_the_way_is_one_warning(tmp_path, place, way, reason):
    sink, heard = opened(tmp_path, way=way, place=place, close_seconds=60.0)
    end = time.monotonic() + 60
    number = 0
    while not heard.records and time.monotonic() < end:
        number += 1
        sink.take(step(number))
        time.sleep(0.001)
    fill(sink, 0.2)
    sink.close()
    [message] = messages(heard)
    assert message.startswith(reason)
    assert 0 < heard.records[0].step <= number


@pytest.mark.parametrize("way", ["raises", "dies"])
def test_a_failure_while_closing_is_one_warning(tmp_path, way):
    sink, heard = opened(tmp_path, way=way, place="close", close_seconds=60.0)
    sink.take(step(1))
    sink.close()
    sink.close()
    assert len(messages(heard)) == 1


@pytest.mark.parametrize("place", ["open", "take", "close"])
def test_a_tracker_that_blocks_is_ended_after_its_time(tmp_path, place):
    sink, heard = opened(tmp_path, way="blocks", place=place, close_seconds=0.5)
    process = sink._process
    slowest = 0.0
    for number in range(1, 301):
        before = time.perf_counter()
        sink.take(step(number))
        slowest = max(slowest, time.perf_counter() - before)
        time.sleep(0.001)
    before = time.monotonic()
    sink.close()
    assert time.monotonic() - before < 3.0
    assert slowest < 0.5
    [message] = messages(heard)
    assert "did not finish within logger.close_seconds=0.5" in message
    assert process.returncode == -signal.SIGKILL


def test_records_beyond_the_bound_are_left_out_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_process, "MOST_WAITING", 20_000)
    monkeypatch.setattr(tracker_process, "PAUSE", 0.0)
    sink, heard = opened(tmp_path, way="blocks", place="open", close_seconds=0.5)
    for number in range(1, 5001):
        sink.take(step(number))
    assert len(sink._waiting) < 40_000
    sink.close()
    [message] = messages(heard)
    assert "does not keep up" in message


def test_a_slow_tracker_gets_what_the_pipe_does_not_hold(tmp_path):
    sink, heard = opened(tmp_path, close_seconds=60.0)
    for number in range(1, 20_001):  # before the tracker has started, and far more than a pipe takes
        sink.take(step(number))
    sink.close()
    assert [line.get("step") for line in lines(tmp_path)] == [*range(1, 20_001), None]
    assert messages(heard) == []


@pytest.mark.parametrize("way", ["print", "write", "child", "thread", "orphan"])
def test_what_a_tracker_prints_is_kept_up_to_a_bound_and_every_record_arrives(tmp_path, way):
    sink, heard = opened(tmp_path, Loud, way=way, close_seconds=60.0)
    for number in range(1, 1001):
        sink.take(step(number))
    sink.close()
    assert [line.get("step") for line in lines(tmp_path)] == [*range(1, 1001), None]
    assert messages(heard) == []
    log = tmp_path / "logger.log"
    assert log.stat().st_size <= tracker_process.MOST_PRINTED + 100
    if way != "orphan":
        assert log.stat().st_size > tracker_process.MOST_PRINTED
        assert log.read_bytes().endswith(b"[more output is left out]\n")


def test_signals_to_the_process_group_do_not_reach_the_tracker(tmp_path):
    sink, heard = opened(tmp_path, close_seconds=60.0)
    process = sink._process
    assert os.getpgid(process.pid) == process.pid != os.getpgrp()
    sink.take(step(1))
    end = time.monotonic() + 60
    while not (tmp_path / "own.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.05)
        sink.take(step(2))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):  # as a batch system sends them
        process.send_signal(number)
    sink.close()
    assert closed_in_order(tmp_path, heard)


def test_the_end_is_told_although_forked_workers_hold_the_pipe_open(tmp_path):
    sink, heard = opened(tmp_path, close_seconds=60.0)
    copy = os.dup(sink._process.stdin.fileno())  # what a fork does
    try:
        sink.take(step(1))
        sink.close()
    finally:
        os.close(copy)
    assert closed_in_order(tmp_path, heard)


def test_the_tracker_ends_in_order_when_training_is_killed(tmp_path):
    code = f"""
import os, signal, sys, time
sys.path[:] = {sys.path!r}
from pathlib import Path
from tests.own_trackers import Own
from mptrain.logger.tracker_process import TrackerProcess
from mptrain.logger.base import TrackedRun
from mptrain.system.records import EventRecord
folder = Path({str(tmp_path)!r})
sink = TrackerProcess(Own(), TrackedRun("n", folder, folder, {{}}, 0), folder / "logger.log", None)
while not (folder / "own.jsonl").exists():
    sink.take(EventRecord("x", 1, {{}}))
    time.sleep(0.05)
print(sink._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    end = time.monotonic() + 30
    while not (closed := '"closed"' in (tmp_path / "own.jsonl").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert closed


def test_a_tracker_that_cannot_be_started_or_sent_to_a_process_is_a_warning(tmp_path, monkeypatch):
    class Local(Own):
        pass

    first = opened(tmp_path, Local)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    for name, (sink, heard) in (("Local", first), ("Own", opened(tmp_path))):
        sink.take(step(1))
        sink.close()
        [message] = messages(heard)
        assert message.startswith(f"{name} cannot be started: ")


def test_a_tracker_that_ends_too_early_is_a_warning(tmp_path):
    sink, heard = opened(tmp_path, way="exits", close_seconds=60.0)
    end = time.monotonic() + 60
    while not heard.records and time.monotonic() < end:
        fill(sink, 0.1)
    sink.close()
    [message] = messages(heard)
    assert message.startswith("Own ended before the run;")


def test_importing_the_package_imports_no_tracker_and_no_torch():
    code = (
        "import sys, mptrain.logger; print([m for m in ('torch','tensorboard','wandb','mlflow') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
