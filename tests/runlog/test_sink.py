"""Sinks in a row: order, and closing despite failures."""

from __future__ import annotations

import pytest

from mptrain.runlog import Fanout
from mptrain.system.records import EventRecord


class Memory:
    def __init__(self, log, name, broken=False):
        self.log, self.name, self.broken = log, name, broken

    def take(self, record):
        self.log.append((self.name, record.kind))

    def close(self):
        self.log.append((self.name, "closed"))
        if self.broken:
            raise RuntimeError(self.name)


def test_every_sink_gets_every_record_in_the_given_order():
    log = []
    fanout = Fanout([Memory(log, "a"), Memory(log, "b")])
    for kind in ("start", "end"):
        fanout.take(EventRecord(kind, 0, {}))
    assert log == [("a", "start"), ("b", "start"), ("a", "end"), ("b", "end")]


def test_a_failing_close_does_not_keep_the_others_open():
    log = []
    fanout = Fanout([Memory(log, "a", broken=True), Memory(log, "b"), Memory(log, "c", broken=True)])
    with pytest.raises(RuntimeError, match=r"^a$"):
        fanout.close()
    assert [name for name, _ in log] == ["a", "b", "c"]
