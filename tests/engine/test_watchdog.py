"""A run that stands still says where, once, and goes on if it can."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from mptrain.engine.telemetry import LOOKS, Watchdog
from mptrain.system.records import EventRecord
from tests.small_runs import TINY, Kept, environment, loop_of, steps_of


def hang_in_a_place_that_is_named(seconds):
    time.sleep(seconds)


@pytest.mark.long
def test_a_run_that_stands_still_says_where_once_for_each_time(tmp_path, capsys):
    path = tmp_path / "stalls.txt"
    with Watchdog(path, 0.2) as dog:
        hang_in_a_place_that_is_named(0.9)
        assert dog.stalls == 1
        dog.heartbeat()
        hang_in_a_place_that_is_named(0.6)
        assert dog.stalls == 2
    text = path.read_text()
    assert text.count("no progress for 0.2 s") == 2
    assert "hang_in_a_place_that_is_named" in text
    assert (
        capsys.readouterr().err.count(f"warning: no progress for 0.2 s; the stacks of all threads are in {path}") == 2
    )


def test_progress_is_no_standing_still(tmp_path):
    with Watchdog(tmp_path / "stalls.txt", 0.4) as dog:
        for _ in range(40):
            time.sleep(0.02)
            dog.heartbeat()
    assert not dog.stalls
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_process_that_was_stopped_and_goes_on_did_not_hang(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from mptrain.engine.telemetry import Watchdog\n"
        "with Watchdog(Path('stalls.txt'), 1.0) as dog:\n"
        "    print('ready', flush=True)\n"
        "    for _ in range(30):\n"
        "        time.sleep(0.05); dog.heartbeat()\n"
        "sys.exit(dog.stalls)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    assert process.wait(20) == 0
    process.stdout.close()
    assert not (tmp_path / "stalls.txt").exists()


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_loop_has_it_on_record_and_trains_on(tmp_path, monkeypatch, where):
    kept = Kept()
    words = (*TINY, "precision=fp32", "train.epochs=1", "log.stall_report_after=0.3")
    loop = loop_of(tmp_path, *words, kept=kept)
    split = loop.parts.loaders["train" if where == "training" else "val"].split
    fetch, calls = split.fetch, []

    def slow(*given):
        calls.append(given)
        if len(calls) == 2 if where == "training" else len(calls) == 1:
            hang_in_a_place_that_is_named(0.3 + 3 * 0.3 / LOOKS + 0.3)
        return fetch(*given)

    monkeypatch.setattr(split, "fetch", slow)
    loop.run()
    assert len(steps_of(loop)) == loop.planned
    (event,) = [one for one in kept.of(EventRecord) if one.kind == "stalled"]
    assert event.fields == {"seconds": 0.3, "file": "stalls.txt"}
    assert event.step == (1 if where == "training" else 6)
    assert "hang_in_a_place_that_is_named" in loop.storage.paths.stalls.read_text()
