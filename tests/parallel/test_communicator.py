from __future__ import annotations

import random

import torch

from tests.pretended_ranks import Pretended


def drawn(seed, step, rank):
    """The first numbers that a rank of three draws in a step."""
    Pretended(rank, 3, None, None).begin_step(seed, step)
    return random.random(), torch.rand(1).item()


def test_ranks_draw_other_numbers_than_each_other_and_than_in_other_steps_and_the_same_again():
    places = [(seed, step, rank) for seed in (0, 1) for step in (1, 2, 3) for rank in range(3)]
    first = [drawn(*place) for place in places]
    assert all(len(set(numbers)) == len(places) for numbers in zip(*first, strict=True))
    assert [drawn(*place) for place in places] == first
