"""Splits are disjoint, complete, balanced, and the same in every run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.errors import ConfigError
from mptrain.workloads.base.train_val_split import hold_out, stratified_order


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_every_prefix_of_the_order_is_balanced(labels):
    targets = torch.tensor(labels)
    order = stratified_order(targets)
    assert torch.equal(order.sort().values, torch.arange(len(labels)))
    counts = torch.bincount(targets, minlength=5)
    for length in range(1, len(labels) + 1):
        got = torch.bincount(targets[order[:length]], minlength=5)
        assert (got - counts * length / len(labels)).abs().max() <= 2.5  # half a sample for each of five classes


def test_held_out_samples_are_disjoint_and_do_not_depend_on_how_many_are_trained_on():
    targets = torch.arange(100) % 4
    train, held, _ = hold_out(targets, 20, None)
    few, held_again, _ = hold_out(targets, 20, 10)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(100))
    assert torch.equal(held, held_again)
    assert torch.equal(few, train[:10])
    assert torch.bincount(targets[held]).tolist() == [5, 5, 5, 5]


def test_the_partition_ignores_the_process_generator():
    targets = torch.arange(50) % 3
    torch.manual_seed(1)
    first = stratified_order(targets)
    torch.manual_seed(2)
    assert torch.equal(first, stratified_order(targets))


@pytest.mark.parametrize(
    ("val", "train", "says"),
    [(100, None, "dataset.val_samples=100"), (20, 81, "dataset.train_samples=81"), (0, 101, "at most 100")],
)
def test_asking_for_more_samples_than_there_are_is_refused(val, train, says):
    with pytest.raises(ConfigError) as caught:
        hold_out(torch.arange(100) % 4, val, train)
    assert says in f"{caught.value} {caught.value.hint}"
