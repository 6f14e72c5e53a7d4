"""Ranks that a process forks: they meet on this machine alone, and nobody waits for who does not come, or has an error to tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mptrain.parallel import launch
from tests.small_runs import environment


def test_forked_ranks_meet_where_no_other_machine_can():
    store = launch._store(None)
    other = launch._store(store.port)
    other.set("here", "yes")
    assert store.get("here") == b"yes"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = [words[1] for words in lines if words[3] == "0A" and words[1].endswith(f":{store.port:04X}")]
    assert listening == [f"0100007F:{store.port:04X}"]  # 127.0.0.1, as Linux writes it


@pytest.mark.distributed
def test_a_rank_that_dies_before_all_have_met_is_missed_at_once(tmp_path):
    script = """
import os, signal
from mptrain.parallel import launch
from mptrain.parallel.torchrun import DistributedOptions

come = launch._come
launch._come = lambda store, rank, timeout: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else come(store, rank, timeout)
try:
    with launch.launch_ranks(DistributedOptions(procs=3)):
        print("all are here")
except launch.RankLost as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "rank 1 was killed by SIGKILL before training began\n", done.stderr


@pytest.mark.distributed
def test_ranks_that_cannot_meet_leave_at_once():
    script = """
import os, time
from mptrain.parallel import launch
from mptrain.parallel.torchrun import DistributedOptions
from mptrain.system.errors import EnvironmentRefused

def refuse(port):
    raise EnvironmentRefused("no port", "")

launch._store = refuse
launch._prepare_environment(3)
before, began = os.listdir("/proc/self/fd"), time.monotonic()
try:
    with launch.launch_ranks(DistributedOptions(procs=3)):
        pass
except EnvironmentRefused:
    print(time.monotonic() - began < launch.GRACE / 2, os.listdir("/proc/self/fd") == before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.distributed
def test_others_that_wait_for_the_first_rank_do_not_hold_its_error_up():
    script = """
import time
from mptrain.parallel import launch
from mptrain.parallel.torchrun import DistributedOptions

try:
    with launch.launch_ranks(DistributedOptions(procs=2)) as ranks:
        if ranks.is_rank_zero:
            began = time.monotonic()
            raise ValueError
        ranks.all_gather_object("here")
        time.sleep(1000)
except ValueError:
    print(time.monotonic() - began < launch.GRACE / 2)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr
