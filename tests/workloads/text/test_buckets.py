from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.workloads.text.tokens import bucketed_order

LENGTHS = torch.tensor([(37 * index) % 101 for index in range(1000)])


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=200),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_sample_comes_once(lengths: list[int], batch_size: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = bucketed_order(torch.tensor(lengths), batch_size, seed, epoch, shuffle=shuffle)
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_batches_hold_samples_of_similar_length() -> None:
    order = bucketed_order(LENGTHS, 8, 0, 0, shuffle=True)
    spans = [int(LENGTHS[batch].max() - LENGTHS[batch].min()) for batch in torch.split(order, 8)]
    assert max(spans) <= 6  # 100 within one batch of a plain shuffle
    order = bucketed_order(torch.arange(10), 4, 0, 0, shuffle=True)  # the short batch is the last
    assert [int(part.max() - part.min()) for part in torch.split(order, 4)][:2] == [3, 3]


def test_batches_have_another_order_for_each_epoch_and_seed() -> None:
    orders = [tuple(bucketed_order(LENGTHS, 8, *when, shuffle=True).tolist()) for when in ((0, 0), (0, 1), (1, 0))]
    assert len(set(orders)) == 3
    firsts = [LENGTHS[order[0]] for order in (bucketed_order(LENGTHS, 8, 0, epoch, shuffle=True) for epoch in range(9))]
    assert len({int(first) for first in firsts}) > 3  # not the shortest batch first


def test_without_shuffling_the_order_is_fixed() -> None:
    orders = [bucketed_order(LENGTHS, 8, seed, epoch, shuffle=False) for seed, epoch in ((0, 0), (5, 7))]
    assert torch.equal(*orders)
    assert int(LENGTHS[orders[0][:8]].max()) > int(LENGTHS.sort().values[8])
    spans = [int(LENGTHS[batch].max() - LENGTHS[batch].min()) for batch in torch.split(orders[0], 8)]
    assert max(spans) <= 6
