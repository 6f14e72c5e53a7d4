"""Where ranks meet that torchrun, or somebody by hand, has begun: who does not come is missed, and in time."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time

import pytest
from torch.distributed import HashStore, TCPStore

from mptrain.parallel import torchrun
from mptrain.parallel.torchrun import (
    RankLost,
    count_run,
    ranks_store,
    remember_run,
    rendezvous,
    run_before_restart,
    store_of_torchrun,
    tell_refusal,
)
from mptrain.system.errors import ConfigError, EnvironmentRefused, MptrainError


@pytest.fixture
def port(monkeypatch):
    """A port of this machine at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = free.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return found


def test_a_first_rank_that_does_not_answer_is_waited_for_no_longer_than_was_asked(port):
    began = time.monotonic()
    with pytest.raises(RankLost, match=f"rank 0 has not responded at 127.0.0.1:{port} for 0.5 s"):
        store_of_torchrun(0.5)
    assert 0.4 < time.monotonic() - began < 5


def test_a_signal_ends_the_wait(port):
    class Asked(Exception):
        pass

    def hear(*_):
        raise Asked

    before = signal.signal(signal.SIGALRM, hear)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        began = time.monotonic()
        with pytest.raises(Asked):
            store_of_torchrun(60)
        assert time.monotonic() - began < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_port_that_is_taken_is_told(port, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        with pytest.raises(EnvironmentRefused, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            store_of_torchrun(5)


def test_ranks_that_do_not_come_are_counted(port):
    store = HashStore()

    def come_too():
        with contextlib.suppress(RankLost):
            rendezvous(store, 2, 3, 0.5)

    other = threading.Thread(target=come_too)
    other.start()
    with pytest.raises(RankLost, match=f"2 of 3 ranks joined at 127.0.0.1:{port} within 0.5 s"):
        rendezvous(store, 0, 3, 0.5)
    other.join()


def test_all_who_come_go_on(port):
    store, met = HashStore(), []
    threads = [
        threading.Thread(target=lambda rank=rank: met.append(rendezvous(store, rank, 3, 30))) for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [None] * 3


def test_a_second_run_of_a_program_meets_under_other_keys_and_finds_no_run_to_resume(port, monkeypatch):
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(torchrun, "_number_of_run", -1)
    for name in ("first", "second"):
        count_run()
        store = ranks_store(30)
        assert not store.check(["all"])
        assert run_before_restart() is None
        store.set("all", "")
        remember_run(name)
    monkeypatch.setattr(torchrun, "_number_of_run", -1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for name in ("first", "second"):  # the same program again
        count_run()
        assert not ranks_store(30).check(["all"])
        assert run_before_restart() == name
    del agent


def test_a_second_run_of_ranks_that_no_agent_has_started_is_refused(port, monkeypatch):
    monkeypatch.setattr(torchrun, "_number_of_run", -1)
    count_run()
    with pytest.raises(EnvironmentRefused, match="train one run in a program"):
        count_run()


def test_the_first_rank_tells_why_another_did_not_come(port, monkeypatch):
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    error = ConfigError("optimizer.lr=-1: must be a number, at least 0", "write a number")
    telling = threading.Thread(target=lambda: tell_refusal(error))
    telling.start()
    store = ranks_store(30)
    try:
        with pytest.raises(MptrainError, match=r"rank 1: optimizer\.lr=-1: must be a number, at least 0") as refused:
            rendezvous(store, 0, 2, 30)
        assert (refused.value.exit_code, refused.value.hint) == (2, "write a number")
        assert telling.is_alive()  # until torchrun ends it
    finally:
        store.set("all", "")
        telling.join(10)
    assert not telling.is_alive()
    began = time.monotonic()
    tell_refusal(error)  # all have met: an error of the run, which the ranks exchange themselves
    assert time.monotonic() - began < 5
    del agent
