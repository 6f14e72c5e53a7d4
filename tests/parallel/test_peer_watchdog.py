"""A rank that has ended is noticed although the host waits for its device, by real ranks whose device is pretended."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta

import pytest
import torch
from small_runs import environment, run_command
from torch.distributed import HashStore

from mptrain.parallel import peer_watchdog
from mptrain.parallel.communicator import DistributedCommunicator, RankLost
from mptrain.parallel.peer_watchdog import PeerWatchdog

#: The device is waiting from the step on in which the last rank is killed.
STUCK = """
import os, signal, time
from pathlib import Path
from mptrain.parallel.communicator import DistributedCommunicator, RankLost
from mptrain.engine.loop import Loop
from mptrain.workloads.classification.models.perceptron import mlp as net

stuck = False

def use(group, device, inner=DistributedCommunicator.use):
    inner(group, device)
    group.watch_peers(lambda: not stuck)

class Never:
    def query(self):
        return False

def attempt(loop, batch, inner=Loop.attempt):
    global stuck
    ranks = loop.parts.comm
    if loop.progress.step == 5:
        if ranks.rank == ranks.world_size - 1:
            Path("killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        stuck = True
        if os.environ["WAITS_IN"] == "an event":
            try:
                ranks.wait_for(Never())
            except RankLost as error:
                Path(f"noticed-{ranks.rank}").write_text(str(error))
                raise
        time.sleep(1000)
    return inner(loop, batch)

DistributedCommunicator.use, Loop.attempt = use, attempt
"""
WORDS = (
    *("model=mlp", "model._target_=stuck.net", "dataset.train_samples=96", "train.batch_size=12", "run.name=r"),
    *("train.epochs=3", "distributed.procs=3", "extensions.allow=[stuck.*]"),
)


def lose_a_rank(folder, waits_in):
    (folder / "stuck.py").write_text(STUCK)
    path = f"{environment()['PYTHONPATH']}:{folder}"
    ended = run_command(*WORDS, cwd=folder, PYTHONPATH=path, WAITS_IN=waits_in)
    assert ended.returncode == 75, ended.stderr
    seconds = time.time() - float((folder / "killed").read_text())
    print(f"noticed and ended within {seconds:.1f} s")
    assert seconds < 15
    assert "rank 2 was killed by SIGKILL" in ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


@pytest.mark.distributed
def test_a_killed_rank_is_noticed_by_all_that_wait_for_an_event(tmp_path):
    ended = lose_a_rank(tmp_path, "an event")
    for rank in (0, 1):  # the second has not begun the third, and hears of it
        assert (tmp_path / f"noticed-{rank}").read_text() == "rank 2 was killed by SIGKILL"
    assert re.search(r"continue with: PYTHONPATH=\S+ mptrain resume outputs/r", ended.stderr)


@pytest.mark.distributed
def test_a_process_that_does_not_come_back_from_its_device_is_ended(tmp_path):
    ended = lose_a_rank(tmp_path, "the driver")
    assert "only the last checkpoint is available" in ended.stderr


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_a_killed_rank_is_noticed_every_time(tmp_path, attempt):
    lose_a_rank(tmp_path, "an event")


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in {"LOOK": 0.01, "PATIENCE": 0.2, "GLANCE": 0.001, "END": 60.0}.items():
        monkeypatch.setattr(peer_watchdog, name, seconds)
    monkeypatch.setattr(peer_watchdog, "SILENT", 5)


class Watched:
    """A watchdog of the first of two ranks, whose device is idle or not."""

    def __init__(self, ended="", others=(1,), store=None, silence=str):
        self.store, self.given_up, self.busy = store or HashStore(), threading.Event(), True
        self.peer_watchdog = PeerWatchdog(
            0, list(others), self.store, lambda: ended, lambda: not self.busy, silence, self.given_up.set, speaks=False
        )
        self.peer_watchdog.begin()

    def until_lost(self, seconds=5.0):
        self.given_up.wait(seconds)
        return self.peer_watchdog.lost

    def close(self):
        self.peer_watchdog.end()
        self.peer_watchdog._thread.join(5)
        assert not self.peer_watchdog._thread.is_alive()


def test_a_rank_without_signs_of_life_is_missed_by_a_device_that_waits(quick):
    store = HashStore()
    store.set("alive/1", "7")
    watched = Watched(store=store)
    assert watched.until_lost() == "rank 1 sends no heartbeat"
    assert store.get("gone") == b"rank 1 sends no heartbeat"
    watched.close()


def test_signs_of_life_are_believed(quick):
    watched = Watched()
    for count in range(60):
        watched.store.set("alive/1", str(count))
        time.sleep(0.01)
    assert not watched.peer_watchdog.lost
    watched.close()


def test_a_rank_that_has_done_its_work_is_not_missed_by_a_device_that_is_busy(quick):
    """Its heartbeat has ended; that of a rank that has failed is missed."""
    store = HashStore()
    for rank, done in ((1, True), (2, False)):
        ended = PeerWatchdog(rank, [], store, str, bool, str, bool, speaks=False)
        ended._said(1)
        ended.end(done=done)
    watched = Watched(store=store)
    assert not watched.until_lost(0.5)
    watched.close()
    watched = Watched(store=store, others=(1, 2))
    assert watched.until_lost() == "rank 2 sends no heartbeat"
    watched.close()


def test_a_heartbeat_that_is_late_does_not_undo_that_a_rank_has_done_its_work(quick):
    """Its thread may still be in the store when the wait for it ends."""
    store, writing, go_on = HashStore(), threading.Event(), threading.Event()

    class Slow:
        def set(self, key, value):
            if threading.current_thread() is ended._thread:
                writing.set()
                go_on.wait(5)
            store.set(key, value)

        def check(self, keys):
            return store.check(keys)

    ended = PeerWatchdog(1, [], Slow(), str, bool, str, bool, speaks=False)
    ended.begin()
    assert writing.wait(5)
    ended.end(done=True)
    go_on.set()
    ended._thread.join(5)
    assert store.check(["alive/1"])
    watched = Watched(store=store)
    assert not watched.until_lost(0.5)
    watched.close()


def test_who_has_ended_is_not_missed_where_the_device_is_idle_now_and_then(quick):
    """As at a run's end, where ranks end one after the other."""
    watched = Watched(ended="rank 1 exited with exit code 3")
    for _ in range(60):
        watched.busy = False
        time.sleep(0.005)
        watched.busy = True
        time.sleep(0.005)
    assert not watched.peer_watchdog.lost
    assert watched.until_lost() == "rank 1 exited with exit code 3"  # it is busy for good now
    watched.close()


def test_a_device_that_fails_waits_for_nobody(quick):
    watched = Watched(ended="rank 1 exited with exit code 1")

    def failing():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    watched.peer_watchdog._idle = failing
    time.sleep(0.3)
    assert watched.peer_watchdog._thread.is_alive()
    assert not watched.peer_watchdog.lost
    watched.close()


def test_what_the_first_rank_says_is_believed(quick):
    store = HashStore()
    store.set("gone", "rank 3 was killed by SIGKILL")
    watched = Watched(store=store, others=())
    assert watched.until_lost() == "rank 3 was killed by SIGKILL"
    watched.close()


def test_ranks_that_live_and_do_not_answer_for_too_long_are_missed_by_a_device_that_waits(quick):
    said = ["no rank has responded for 5 s"]
    watched = Watched(silence=lambda: said[0])
    watched.busy = False
    time.sleep(0.3)
    assert not watched.peer_watchdog.lost
    said[0] = ""  # they answer again
    watched.busy = True
    time.sleep(0.5)
    assert not watched.peer_watchdog.lost
    said[0] = "no rank has responded for 5 s"
    assert watched.until_lost() == "no rank has responded for 5 s"
    watched.close()


def test_an_exchange_on_the_host_is_an_answer():
    group = DistributedCommunicator.__new__(DistributedCommunicator)
    group._timeout, group._heard = timedelta(seconds=5), time.monotonic() - 6
    assert group._silence() == "no rank has responded for 5 s"
    with group._noticing_loss():
        pass
    assert not group._silence()


def test_a_device_that_comes_to_events_is_no_silence():
    """As in a long evaluation, in which nothing is exchanged."""
    group = DistributedCommunicator.__new__(DistributedCommunicator)
    group._timeout, group._heard = timedelta(seconds=5), time.monotonic() - 6
    group.wait_for(Event())
    assert not group._silence()


class Event:
    def __init__(self, group=None):
        self.group = group

    def query(self):
        if self.group is not None:
            self.group._peer_watchdog.lost = "rank 1 was killed by SIGKILL"
        return True


def test_what_a_device_came_to_after_it_was_given_up_is_not_used(quick):
    group = DistributedCommunicator.__new__(DistributedCommunicator)
    group._peer_watchdog = PeerWatchdog(0, [], HashStore(), str, bool, str, bool, speaks=False)
    group.wait_for(Event())
    with pytest.raises(RankLost, match="rank 1"):
        group.wait_for(Event(group))
    assert group._peer_watchdog._noticed.is_set()
    assert group.is_lost(RuntimeError("Invalid process group specified"))
    assert group.is_lost(ValueError("Invalid process group specified"))
    assert not group.is_lost(KeyboardInterrupt())


def test_one_process_waits_in_the_driver():
    from mptrain.parallel.communicator import SINGLE_PROCESS

    asked = []
    event = type("Event", (), {"synchronize": lambda self: asked.append(self)})()  # noqa: PLW0108
    SINGLE_PROCESS.wait_for(event)
    assert asked == [event]
    assert not SINGLE_PROCESS.is_lost(torch.distributed.DistError("lost"))
