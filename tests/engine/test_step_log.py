from __future__ import annotations

import pytest

from mptrain.engine.options import LogOptions
from mptrain.engine.ring import HostValues
from mptrain.engine.step_log import LearnerLog, StepLog
from mptrain.system.records import StepRecord
from tests.small_runs import Kept

ROW = HostValues(loss=1.0, loss_scale=8.0, grad_norm=1.0, lr=0.1, next_scale=8.0, skip=0.0, applied_norm=0.0, norms=[])


class SlowRing:
    """A ring as on a device that is behind: what was sent arrives when the test says so, or when it is waited for."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.used, self.flying, self.here = [], [], []
        self.waits = 0

    @property
    def full(self):
        return len(self.used) == self.capacity

    @property
    def unread(self):
        return len(self.used) + len(self.flying) + len(self.here)

    @property
    def arrived(self):
        return bool(self.here)

    def record(self, row):
        self.used.append(row)

    def land(self):
        self.here, self.flying = self.here + self.flying, []

    def send(self):
        if not self.used:
            return
        self.waits += bool(self.flying)
        self.land()
        self.flying, self.used = self.used, []

    def take(self, *, wait):
        if wait:
            self.send()
            self.land()
        rows, self.here = self.here, []
        return rows

    def give_back(self, rows):
        self.here = rows + self.here


def account(ring, name="main"):
    return LearnerLog(name, ("weight",), ring)


def test_a_full_ring_is_sent_once_however_long_it_takes_to_arrive():
    ring, kept = SlowRing(4), Kept()
    step_log = StepLog([account(ring)], kept, LogOptions(ring=4, seconds=1e9))
    for step in range(1, 8):
        ring.record(ROW)
        step_log.note(step, 0)
    assert (ring.waits, len(ring.flying), len(ring.used), kept.records) == (0, 4, 3, [])
    ring.land()
    ring.record(ROW)
    step_log.note(8, 1)
    step_log.flush()
    assert [(record.step, record.epoch) for record in kept.of(StepRecord)] == [(s, s // 8) for s in range(1, 9)]
    assert ring.waits == 0


def test_records_of_two_learners_stay_in_step_order_when_their_rows_arrive_apart():
    rings, kept = (SlowRing(2), SlowRing(2)), Kept()
    step_log = StepLog([account(rings[0], "g"), account(rings[1], "d")], kept, LogOptions(ring=2, seconds=1e9))
    for step in range(1, 4):
        for ring in rings:
            ring.record(ROW)
        step_log.note(step, 0)
        rings[0].land()  # the other one is late
    step_log.flush()
    assert [(record.step, record.learner) for record in kept.of(StepRecord)] == [
        (step, name) for step in (1, 2, 3) for name in ("g", "d")
    ]


def test_after_a_sink_failed_no_row_is_recorded_under_the_number_of_another_step():
    class Failing(Kept):
        def take(self, record):
            super().take(record)
            if record.step == 2:
                raise OSError("full")

    ring, kept = SlowRing(8), Failing()
    step_log = StepLog([account(ring)], kept, LogOptions(ring=8, seconds=1e9))
    for step in range(1, 5):
        ring.record(ROW._replace(loss=float(step)))
        step_log.note(step, 0)
    with pytest.raises(OSError, match="full"):
        step_log.flush()
    ring.record(ROW._replace(loss=5.0))
    step_log.note(5, 0)
    step_log.flush()
    assert all(record.loss == record.step for record in kept.records)
    assert [record.step for record in kept.records] == [1, 2, 5]


def test_an_account_remembers_its_last_step_over_a_restart():
    ring = SlowRing(1)
    before, after = account(ring), account(ring)
    after.load_state_dict(before.state_dict())
    assert after.last is None
    before.digest(1, 0, ROW, Kept())
    after.load_state_dict(before.state_dict())
    assert after.last == before.last
    assert after.last.lr == 0.1


def test_a_look_sends_for_everything_and_writes_what_is_there_without_waiting():
    ring, kept = SlowRing(8), Kept()
    step_log = StepLog([account(ring)], kept, LogOptions(ring=8, seconds=1e9))
    ring.record(ROW)
    step_log.note(1, 0)
    step_log.request_rows()
    assert (len(ring.flying), kept.records) == (1, [])
    ring.land()
    step_log.request_rows()
    assert [record.step for record in kept.of(StepRecord)] == [1]
    assert ring.waits == 0
