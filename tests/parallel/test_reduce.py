"""Places of gradients in DDP's buckets: the same in a process's first step as in all later ones."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mptrain.parallel.reduce import data_parallel


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(group=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("width", [4, 800], ids=["one bucket", "several buckets"])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_summed_in_the_given_order_from_the_first_pass_on(one_rank, width, seed):
    net = nn.Sequential(*(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(4)))
    order, sums = list(net.parameters()), []
    random.Random(seed).shuffle(order)
    wrapped = data_parallel(net, one_rank, sums, wide=True, order=order)
    for _ in range(3):
        sums.clear()
        wrapped(torch.ones(2, width, dtype=torch.bfloat16)).sum().backward()
        assert [id(parameter) for parameter, _ in sums] == [id(parameter) for parameter in order]


def test_without_an_order_places_do_not_change_either(one_rank):
    net = nn.ModuleDict({name: nn.Linear(4, 4, dtype=torch.bfloat16) for name in "abc"})
    net.forward = lambda x: net["a"](net["c"](x))
    sums, found = [], []
    wrapped = data_parallel(net, one_rank, sums, wide=True, order=None)
    for _ in range(3):
        sums.clear()
        wrapped(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        found.append([id(parameter) for parameter, _ in sums])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 6
