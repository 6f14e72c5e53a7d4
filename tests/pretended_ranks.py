"""Ranks that are threads of one process, for tests of what they tell each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from mptrain.parallel.communicator import DistributedCommunicator


class Pretended(DistributedCommunicator):
    """A rank whose exchanges go through a table that all threads share."""

    def __init__(self, rank, count, table, barrier):
        self.rank, self.world_size, self.local_rank = rank, count, rank
        self._table, self._barrier = table, barrier

    def all_gather_object(self, value):
        self._table[self.rank] = value
        self._barrier.wait(20)
        found = list(self._table)
        self._barrier.wait(20)
        return found

    def all_reduce_ints(self, numbers):
        return [sum(column) for column in zip(*self.all_gather_object(list(numbers)), strict=True)]

    def all_gather(self, tensor):
        return torch.stack(self.all_gather_object(tensor.clone()))

    def all_reduce_(self, tensor):
        return tensor.copy_(self.all_gather(tensor).sum(0))

    def broadcast_object(self, value):
        return self.all_gather_object(value)[0]


def each_rank(count, action):
    """What an action gives on each of as many ranks."""
    table, barrier = [None] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(action, Pretended(rank, count, table, barrier)) for rank in range(count)]
        return [future.result(30) for future in futures]
