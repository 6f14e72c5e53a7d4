"""Ranks that are threads of one process, for tests of what they tell each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from mptrain.distributed.ranks import Group


class Pretended(Group):
    """A rank whose exchanges go through a table that all threads share."""

    def __init__(self, rank, count, table, barrier):
        self.rank, self.count, self.local = rank, count, rank
        self._table, self._barrier = table, barrier

    def everyones(self, value):
        self._table[self.rank] = value
        self._barrier.wait(20)
        found = list(self._table)
        self._barrier.wait(20)
        return found

    def added(self, numbers):
        return [sum(column) for column in zip(*self.everyones(list(numbers)), strict=True)]

    def side_by_side(self, tensor):
        return torch.stack(self.everyones(tensor.clone()))

    def sum_(self, tensor):
        return tensor.copy_(self.side_by_side(tensor).sum(0))

    def firsts(self, value):
        return self.everyones(value)[0]


def each_rank(count, action):
    """What an action gives on each of as many ranks."""
    table, barrier = [None] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(action, Pretended(rank, count, table, barrier)) for rank in range(count)]
        return [future.result(30) for future in futures]
