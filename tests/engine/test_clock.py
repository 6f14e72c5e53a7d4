from __future__ import annotations

import torch

from mptrain.engine.progress import Progress
from mptrain.engine.resources import WARM_UP, Clock, NoMeter, NvmlMeter


def test_what_lies_behind_the_warm_up_alone_is_steady():
    clock = Clock(Progress(), torch.device("cpu"))
    ends = [clock.lap(5, 0.25, 1.0) for _ in range(WARM_UP + 3)]
    assert ends == [False] * (WARM_UP - 1) + [True, False, False, False]
    progress = clock.progress
    assert (progress.terms, progress.seconds, progress.waited) == (65, 13.0, 3.25)
    assert (progress.steady_terms, progress.steady_seconds) == (15, 3.0)


def test_waiting_for_the_device_at_the_end_of_the_warm_up_is_not_steady():
    clock = Clock(Progress(), torch.device("cpu"))
    for _ in range(WARM_UP):
        clock.lap(5, 0.0, 1.0)
    clock.add(7.0)
    assert clock.progress.steady_seconds == 0
    clock.lap(5, 0.0, 1.0)
    clock.add(0.5)
    assert clock.progress.steady_seconds == 1.5
    assert clock.progress.seconds == 18.5


def test_energy_is_that_of_training_alone():
    clock = Clock(Progress(), torch.device("cpu"))
    assert clock.progress.joules is None
    readings = iter([1000, 4000, 90_000, 91_000])
    clock._meter = NvmlMeter(lambda: next(readings))
    for _ in range(2):
        clock.begin()
        clock.end()
        clock.save()  # outside of training there is nothing to save
    assert clock.progress.joules == 4.0  # 3 J and 1 J; what came between belongs to an evaluation


def test_energy_is_up_to_date_in_a_checkpoint_amid_an_epoch():
    clock = Clock(Progress(), torch.device("cpu"))
    readings = iter([1000, 4000, 6000])
    clock._meter = NvmlMeter(lambda: next(readings))
    clock.begin()
    clock.save()
    assert clock.progress.joules == 3.0
    clock.end()
    assert clock.progress.joules == 5.0


def test_energy_of_which_a_part_is_unknown_is_unknown():
    clock = Clock(Progress(joules=5.0), torch.device("cpu"))
    clock._meter = NoMeter()
    clock.begin()
    clock.end()
    assert clock.progress.joules != clock.progress.joules


def test_an_energy_counter_that_fails_costs_no_run():
    def broken() -> int:
        raise RuntimeError("NVMLError_NotSupported")

    assert NvmlMeter(broken).read() is None


def test_the_throughput_stays_while_no_step_is_counted():
    clock = Clock(Progress(learners={}), torch.device("cpu"))
    clock.lap(terms=32, waited=0.0, seconds=0.5)
    clock.read()
    assert clock.rate == 64
    clock.add(0.1)  # waiting for the device, at the end of an epoch
    clock.read()
    assert clock.rate == 64
    clock.lap(terms=32, waited=0.0, seconds=0.3)
    clock.read()
    assert clock.rate == 80  # 32 in 0.4 s
