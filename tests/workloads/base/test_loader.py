"""The order is a function of (seed, epoch), the position what was handed out, the workers invisible."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import tracemalloc

import pytest
import torch

from mptrain.system.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.random_streams import sample_order
from tests.small_runs import environment


class Numbers:
    """Samples that are their own labels; remembers what was fetched."""

    def __init__(self, count, in_memory=True, unusable=(), on_error="skip"):
        self.count = count
        self.in_memory = in_memory
        self.unusable = set(unusable)
        self.faults = Faults(on_error)
        self.fetched = []

    def __len__(self):
        return self.count

    @property
    def skipped(self):
        return len(self.faults.unusable)

    def order(self, seed, epoch, *, shuffle):
        return sample_order(len(self), seed, epoch, shuffle=shuffle)

    def fetch(self, indices, epoch, seed):
        self.fetched += indices
        self.faults.report({f"file{i}": "empty" for i in indices if i in self.unusable})
        targets = torch.tensor([i for i in indices if i not in self.unusable])
        return Batch(torch.zeros(len(targets), 1, 1, 1), targets)


def order(loader, epoch, start=0):
    return [batch.targets.tolist() for batch in loader.batches(epoch, start)]


def flat(batches):
    return [number for batch in batches for number in batch]


def test_the_order_is_reproducible_and_every_epoch_has_its_own():
    epochs = [order(Loader(Numbers(50), 8, 3, shuffle=True), epoch) for epoch in range(4)]
    assert epochs == [order(Loader(Numbers(50), 8, 3, shuffle=True), epoch) for epoch in range(4)]
    assert len({tuple(flat(epoch)) for epoch in epochs}) == 4
    assert all(sorted(flat(epoch)) == list(range(50)) for epoch in epochs)
    assert order(Loader(Numbers(50), 8, 4, shuffle=True), 0) != epochs[0]


def test_the_last_short_batch_is_kept_and_counted():
    loader = Loader(Numbers(50), 8, 0, shuffle=False)
    batches = order(loader, 5)
    assert flat(batches) == list(range(50))
    assert loader.steps_per_epoch == len(batches) == 7
    assert [len(batch) for batch in batches] == [8] * 6 + [2]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_process_generators_neither_matter_nor_move(workers):
    loader = Loader(Numbers(30, in_memory=False), 8, 1, shuffle=True, workers=workers)
    torch.manual_seed(123)
    random.seed(123)
    before = torch.get_rng_state(), random.getstate()
    first = order(loader, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(77)
    assert order(loader, 0) == first
    loader.close()


@pytest.mark.parametrize("start", [0, 3, 6, 7])
def test_a_resumed_epoch_is_the_tail_and_fetches_no_more(start):
    whole = order(Loader(Numbers(50), 8, 9, shuffle=True), 2)
    split = Numbers(50)
    assert order(Loader(split, 8, 9, shuffle=True), 2, start) == whole[start:]
    assert sorted(split.fetched) == sorted(flat(whole[start:]))


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_epoch_begins_without_lists_of_all_its_samples(in_memory):
    class Many(Numbers):
        def __len__(self):
            return 3_000_000

        def order(self, seed, epoch, *, shuffle):
            return torch.arange(len(self))

    loader = Loader(Many(8, in_memory=in_memory), 8, 0, shuffle=True, workers=1)
    tracemalloc.start()
    next(loader.batches(0, start=5))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    loader.close()
    assert peak < 2**23


def test_workers_change_nothing_after_an_abandoned_epoch():
    alone = Loader(Numbers(50), 8, 9, shuffle=True)
    loader = Loader(Numbers(50, in_memory=False), 8, 9, shuffle=True, workers=2)
    if loader.workers < 1:
        pytest.skip("no core to spare")
    assert order(loader, 0) == order(alone, 0)
    abandoned = loader.batches(1)
    assert next(abandoned).targets.tolist() == order(alone, 1)[0]
    assert order(loader, 1, start=1) == order(alone, 1)[1:]
    assert order(loader, 2) == order(alone, 2)
    loader.close()


def test_workers_are_no_more_than_cores_and_none_for_memory():
    assert Loader(Numbers(10, in_memory=False), 4, 0, shuffle=True, workers=1000).workers == len(
        os.sched_getaffinity(0)
    )
    assert Loader(Numbers(10), 4, 0, shuffle=True, workers=4).workers == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_counted_once_whoever_found_them(workers):
    split = Numbers(20, in_memory=False, unusable=[3, 11])
    loader = Loader(split, 4, 0, shuffle=True, workers=workers)
    for epoch in range(3):
        assert sorted(flat(order(loader, epoch))) == [i for i in range(20) if i not in (3, 11)]
    assert split.skipped == 2
    assert set(split.faults.unusable) == {"file3", "file11"}
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_reaches_the_caller_with_its_message_and_hint(workers):
    loader = Loader(Numbers(20, False, unusable=[3], on_error="stop"), 4, 0, shuffle=True, workers=workers)
    with pytest.raises(DataError, match=r"(?m)^file3: empty$") as caught:
        order(loader, 0)
    assert "dataset.on_error=skip" in caught.value.hint
    assert caught.value.exit_code == 6
    loader.close()


@pytest.mark.process
def test_workers_outlive_signals_but_not_their_process():
    script = """
        import signal, sys
        from mptrain.workloads.base import Loader
        from tests.workloads.base.test_loader import Numbers
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        batches = Loader(Numbers(40, in_memory=False), 2, 0, shuffle=True, workers=2).batches(0)
        next(batches)
        print("started", flush=True)
        sys.stdin.readline()
        print(1 + sum(1 for _, batch in zip(range(14), batches)))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment(), text=True, start_new_session=True, **pipes) as process:
        assert process.stdout.readline() == "started\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.killpg(process.pid, number)
        # Batches are left over at the end, so the workers are alive and waiting when the interpreter ends.
        out, errors = process.communicate("go on\n", timeout=60)
    assert (process.returncode, out) == (0, "15\n"), errors


@pytest.mark.parametrize("workers", [0, 2])
def test_one_batch_is_the_first_again_and_again(workers):
    whole = order(Loader(Numbers(50), 8, 3, shuffle=True), 0)
    loader = Loader(Numbers(50, in_memory=not workers), 8, 3, shuffle=True, workers=workers, one_batch=True)
    assert loader.steps_per_epoch == 1
    assert [order(loader, epoch) for epoch in range(3)] == [whole[:1]] * 3
    assert order(loader, 1, start=1) == []
    loader.close()


def test_workers_are_forked_from_the_process_of_the_run():
    """In a job of a sweep the default is a fork server, whose processes would not end with the job."""
    torch.multiprocessing.set_start_method("forkserver", force=True)
    try:
        loader = Loader(Numbers(8, in_memory=False), 2, 0, shuffle=False, workers=1)
        assert sorted(flat(order(loader, 0))) == list(range(8))
        [worker] = loader._processes._iterator._workers
        assert type(worker).__name__ == "ForkProcess"
        loader.close()
        worker.join(10)
        assert worker.exitcode is not None
    finally:
        torch.multiprocessing.set_start_method(None, force=True)
