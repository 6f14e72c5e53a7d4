"""Batches in an order that depends on (seed, epoch) alone, from any position on.

The position is the number of batches handed out; what worker processes have fetched ahead does not count.
Must not draw from, or seed, the process's random number generators.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mptrain.errors import DataError
from mptrain.machine import usable_cores
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.dataset import Split
from mptrain.workloads.base.faulty_samples import Faults

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_Key = tuple[int, list[int], list[int]]
_Fetched = tuple[Batch | None, Faults, DataError | None]


class Loader:
    """Hands out a split batch by batch. One iteration at a time.

    Args:
        split: Where the samples come from.
        batch_size: Samples of a batch; the last one of an epoch may be shorter.
        seed: The run's seed.
        shuffle: Ask the split for an order drawn from (seed, epoch); False for its own.
        workers: Processes that fetch ahead, at most as many as this process may use cores. None are started
            for a split in memory.
        pin: Put the batches into page-locked memory, for copies to a CUDA device.
        one_batch: Hand out the first batch of the first epoch, and that in every epoch.
        rank: Which of several ranks this loader is of. Each gets its contiguous part of every batch; the parts' sizes differ by
            at most one. Where there are more ranks than samples in a batch, some get a dummy, which counts nothing.
        world_size: Number of ranks.
        here: How many of them share the cores of this machine.

    Attributes:
        steps_per_epoch: Batches of one epoch, the last short one included.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        workers: int = 0,
        pin: bool = False,
        one_batch: bool = False,
        rank: int = 0,
        world_size: int = 1,
        here: int = 1,
    ) -> None:
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank, self.world_size = rank, world_size
        cores = max(1, usable_cores() // here)
        self.workers = 0 if split.in_memory else min(workers, cores)
        self.pin = pin
        self.one_batch = one_batch
        self.steps_per_epoch = 1 if one_batch else -(-len(split) // batch_size)
        self._planned: list[_Key] = []  # torch's loader iterates over it anew in each epoch
        self._processes: DataLoader[_Fetched] | None = None

    def order(self, epoch: int) -> Tensor:
        """The sample numbers of an epoch in their order, int64 ``[N]``."""
        return self.split.order(self.seed, 0 if self.one_batch else epoch, shuffle=self.shuffle)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on, or this rank's parts of them; the ones before are not read.

        Raises:
            DataError: A sample cannot be used (see `Split.fetch`).
        """
        chunks = torch.split(self.order(epoch), self.batch_size)
        parts = [self._part(chunk) for chunk in chunks[start : self.steps_per_epoch]]
        epoch = 0 if self.one_batch else epoch
        if self.workers == 0:
            for indices, others in parts:
                fetched = fetch_part(self.split, indices, others, epoch, self.seed)
                yield fetched.pin_memory() if self.pin else fetched
            return
        self._planned[:] = [(epoch, *part) for part in parts]
        for batch, news, error in self._fetched():
            self.split.faults.add(news)
            if error is not None:
                raise error
            assert batch is not None
            yield batch

    def _part(self, chunk: Tensor) -> tuple[list[int], list[int]]:
        """The samples of a batch that are this rank's, perhaps none, and those of the others."""
        small, larger = divmod(len(chunk), self.world_size)
        first = self.rank * small + min(self.rank, larger)
        last = first + small + (self.rank < larger)
        return chunk[first:last].tolist(), [*chunk[:first].tolist(), *chunk[last:].tolist()]

    def whole_batch(self, epoch: int, number: int = 0) -> Batch:
        """A batch of an epoch, from 0, with the parts of all ranks, fetched in this process and not pinned.

        Raises:
            DataError: A sample cannot be used (see `Split.fetch`).
        """
        indices = self.order(epoch)[number * self.batch_size :][: self.batch_size].tolist()
        return self.split.fetch(indices, 0 if self.one_batch else epoch, self.seed)

    def close(self) -> None:
        """Let go of the worker processes, which end with the last iteration over them."""
        self._processes = None

    def _fetched(self) -> Iterator[_Fetched]:
        """What the worker processes fetch, in the planned order. They outlive the epoch."""
        if self._processes is None:
            self._processes = self._start()
        # The workers inherit the mask, so that no signal finds them before `_leave_signals_to_the_parent` has run.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 and later warn of a fork beside torch's threads, which the workers do not touch.
                warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
                return iter(self._processes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start(self) -> DataLoader[_Fetched]:
        return DataLoader(
            _Fetcher(self.split, self.seed),  # type: ignore[arg-type]
            batch_size=None,  # a key stands for a whole batch
            sampler=self._planned,
            num_workers=self.workers,
            # In a job of a sweep it would else be a fork server of the job's own, whose processes outlive the job.
            multiprocessing_context="fork",
            persistent_workers=True,
            pin_memory=self.pin,
            collate_fn=lambda fetched: fetched,
            worker_init_fn=_leave_signals_to_the_parent,
            generator=torch.Generator(),  # without one of its own it would draw from the process's
        )


class _Fetcher:
    """Runs in the worker processes: turns a key into a batch and what was learned about its samples."""

    def __init__(self, split: Split, seed: int) -> None:
        self.split = split
        self.seed = seed

    def __getitem__(self, key: _Key) -> _Fetched:
        epoch, indices, others = key
        faults = self.split.faults
        before = faults.counts()
        try:
            batch = fetch_part(self.split, indices, others, epoch, self.seed)
        except DataError as error:
            # Raised here, it would arrive with a traceback for a message and without its hint.
            return None, faults.since(before), error
        return batch, faults.since(before), None


def fetch_part(split: Split, indices: list[int], others: list[int], epoch: int, seed: int) -> Batch:
    """A rank's part of a batch, or where it has none, or none that can be used, another sample of the batch as a stand-in.

    Raises:
        DataError: No sample can be used, or one cannot and ``split.faults`` says stop.
    """
    error: DataError | None = None
    if indices:
        try:
            return split.fetch(indices, epoch, seed)
        except DataError as raised:
            if split.faults.on_error == "stop" or not others:
                raise
            error = raised
    for index in others:
        try:
            return replace(split.fetch([index], epoch, seed), is_dummy=True)
        except DataError as raised:
            if split.faults.on_error == "stop":
                raise
            error = error or raised
    assert error is not None
    raise error


def _leave_signals_to_the_parent(worker: int) -> None:
    """Signals reach the whole process group, but the run wants to finish its step before it ends.

    Only a SIGTERM from the parent itself ends the worker: so `multiprocessing` does it at the very end.
    """
    # They arrive blocked. SIGTERM stays so, here and in the thread, which waits for it and sees who sent it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(target=_leave_when_the_parent_says, daemon=True).start()


def _leave_when_the_parent_says() -> None:
    if hasattr(signal, "sigwaitinfo"):
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
    else:  # macOS does not say who sent it
        signal.sigwait({signal.SIGTERM})
    os._exit(0)
