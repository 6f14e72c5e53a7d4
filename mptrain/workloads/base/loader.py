"""Loader of a split's batches in an order that depends on (seed, epoch) only, starting at any position.

The position counts the batches yielded, not those prefetched, so a resumed run continues with the batches that the
interrupted run would have had. The loader must not draw from, or seed, the process's random number generators.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mptrain.system.errors import DataError
from mptrain.system.machine import usable_cores
from mptrain.system.torch_private import end_workers
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import Split

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_Key = tuple[int, list[int], list[int]]
_Fetched = tuple[Batch | None, Faults, DataError | None]


class Loader:
    """Loader of the batches of a data set split, for one rank of a run. Supports one iteration at a time.

    Args:
        batch_size: Samples per batch over all ranks; the last batch of an epoch may be smaller.
        shuffle: Whether the split shuffles its order by (seed, epoch); False keeps the split's own order.
        workers: Number of prefetching processes, limited to the cores of this process; a split in memory uses none.
        pin: Whether to put the batches into page-locked memory, for copies to a CUDA device.
        one_batch: Whether every epoch is the first batch of the first epoch, to test whether a model can overfit it.
        rank: Rank of this process. Each rank gets a contiguous part of every batch; their sizes differ by at most one.
            If a batch has fewer samples than there are ranks, some ranks get a dummy of weight 0.
        here: Number of ranks that share the cores of this machine.
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
        self._planned = _Plan()
        self._processes: DataLoader[_Fetched] | None = None

    def first_batch(self) -> Loader:
        """Return a loader of the first batch only, which it reads in this process."""
        first = copy.copy(self)
        first.one_batch, first.steps_per_epoch, first.workers = True, 1, 0
        return first

    def order(self, epoch: int) -> Tensor:
        """Return the sample indices of an epoch in the order in which its batches take them, int64 ``[N]``."""
        return self.split.order(self.seed, 0 if self.one_batch else epoch, shuffle=self.shuffle)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's parts of an epoch's batches on the host, from batch ``start`` on; others are not read.

        A part without a usable sample is a dummy (``is_dummy``). The errors are those of `Split.fetch`.
        """
        parts = self._parts(self.order(epoch), start)
        epoch = 0 if self.one_batch else epoch
        if self.workers == 0:
            for indices, others in parts:
                fetched = fetch_part(self.split, indices, others, epoch, self.seed)
                yield fetched.pin_memory() if self.pin else fetched
            return
        self._planned.keys = ((epoch, *part) for part in parts)
        for batch, news, error in self._fetched():
            self.split.faults.add(news)
            if error is not None:
                raise error
            assert batch is not None
            yield batch

    def _parts(self, order: Tensor, start: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield `_part` of each batch of an epoch on demand; Python lists of a whole epoch would be large."""
        for first in range(start * self.batch_size, self.steps_per_epoch * self.batch_size, self.batch_size):
            yield self._part(order[first : first + self.batch_size])

    def _part(self, chunk: Tensor) -> tuple[list[int], list[int]]:
        """Return the indices of this rank's samples of a batch, possibly none, and those of the other ranks."""
        small, larger = divmod(len(chunk), self.world_size)
        first = self.rank * small + min(self.rank, larger)
        last = first + small + (self.rank < larger)
        return chunk[first:last].tolist(), [*chunk[:first].tolist(), *chunk[last:].tolist()]

    def whole_batch(self, epoch: int, number: int = 0) -> Batch:
        """Return one batch with the samples of all ranks, fetched in this process and not page-locked."""
        indices = self.order(epoch)[number * self.batch_size :][: self.batch_size].tolist()
        return self.split.fetch(indices, 0 if self.one_batch else epoch, self.seed)

    def close(self) -> None:
        """End the worker processes that prefetch batches; the next iteration starts others."""
        if self._processes is not None:
            end_workers(self._processes)
        self._processes = None

    def _fetched(self) -> Iterator[_Fetched]:
        """Iterate over the results of the worker processes in the planned order. The workers persist across epochs."""
        if self._processes is None:
            self._processes = self._start()
        # The workers inherit the mask, so that no signal reaches them before `_leave_signals_to_the_parent` has run.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 and later warn about a fork in a process with threads; the workers do not use torch's.
                warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
                return iter(self._processes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start(self) -> DataLoader[_Fetched]:
        return DataLoader(
            _Fetcher(self.split, self.seed),  # type: ignore[arg-type]
            batch_size=None,  # one key selects a whole batch
            sampler=self._planned,
            num_workers=self.workers,
            # The default in a sweep job is a fork server of that job, whose processes outlive the job.
            multiprocessing_context="fork",
            persistent_workers=True,
            pin_memory=self.pin,
            collate_fn=lambda fetched: fetched,
            worker_init_fn=_leave_signals_to_the_parent,
            generator=torch.Generator(),  # by default the loader draws from the process's generator
        )


class _Plan:
    """Sampler of torch's loader, which iterates over it once an epoch: the keys of that epoch's batches."""

    keys: Iterator[_Key] = iter(())

    def __iter__(self) -> Iterator[_Key]:
        return self.keys


class _Fetcher:
    """Data set of the worker processes: converts a key to a batch and the faults found while reading it."""

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
            # An error raised here would reach the parent with a traceback as its message, and without its hint.
            return None, faults.since(before), error
        return batch, faults.since(before), None


def fetch_part(split: Split, indices: list[int], others: list[int], epoch: int, seed: int) -> Batch:
    """Return one rank's part of a batch, or a dummy with a sample of another rank if the part has no usable sample.

    A rank without samples still needs an input for its forward and backward pass. ``others`` has the indices of the
    other ranks' samples of the batch.

    Raises:
        DataError: No sample is usable, or one is unusable and ``split.faults.on_error`` is ``stop``.
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
    """Ignore signals to the process group, as the run finishes its step; only the parent's SIGTERM ends the worker."""
    # The signals are blocked at this point. SIGTERM stays blocked, and the thread waits for it to learn its sender.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(target=_leave_when_the_parent_says, daemon=True).start()


def _leave_when_the_parent_says() -> None:
    if hasattr(signal, "sigwaitinfo"):
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
    else:  # macOS does not report the sender
        signal.sigwait({signal.SIGTERM})
    os._exit(0)
