"""Splits are disjoint, complete, balanced, and the same in every run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.splits import hold_out, hold_out_by_name, share_sizes, stratified_order


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_every_prefix_of_the_order_is_balanced(labels):
    targets = torch.tensor(labels)
    order = stratified_order(targets)
    assert torch.equal(order.sort().values, torch.arange(len(labels)))
    counts = torch.bincount(targets, minlength=5)
    for length in range(1, len(labels) + 1):
        got = torch.bincount(targets[order[:length]], minlength=5)
        assert (got - counts * length / len(labels)).abs().max() <= 2.5  # half a sample for each of five classes


def test_held_out_samples_do_not_depend_on_the_training_size():
    targets = torch.arange(100) % 4
    train, held = hold_out(stratified_order(targets), {"train": None, "val": 20}).values()
    few, held_again = hold_out(stratified_order(targets), {"train": 10, "val": 20}).values()
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(100))
    assert torch.equal(held, held_again)
    assert torch.equal(few, train[:10])
    assert torch.bincount(targets[held]).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("val", "train", "says"),
    [
        (100, None, "holding out 100 for val leaves none of 100 samples to train on"),
        (100, None, "choose a smaller dataset.val_samples (0 for no such part)"),
        (20, 81, "dataset.train_samples=81"),
        (0, 101, "at most 100"),
    ],
)
def test_more_samples_than_there_are_is_refused(val, train, says):
    with pytest.raises(ConfigError) as caught:
        hold_out(torch.arange(100), {"train": train, "val": val}, key="samples")
    assert says in f"{caught.value} {caught.value.hint}"


def test_parts_follow_one_another_in_the_order_of_their_sizes():
    parts = hold_out(torch.arange(9, -1, -1), {"test": 2, "train": 3, "other": 0, "val": 1})
    assert {part: indices.tolist() for part, indices in parts.items()} == {
        "test": [9, 8],
        "train": [7, 6, 5],
        "val": [0],
    }


def test_a_share_is_rounded_is_at_least_one_sample_and_keeps_groups_whole():
    shares = {"val": 0.1, "none": 0.0, "test": 0.26}
    assert share_sizes(shares, 10) == {"val": 1, "none": 0, "test": 3}
    assert share_sizes(shares, 2) == {"val": 1, "none": 0, "test": 1}
    assert share_sizes(shares, 10, [4, 5, 10]) == {"val": 4, "none": 0, "test": 6}
    assert share_sizes({"val": 0.5, "test": 0.9}, 10) == {"val": 5, "test": 5}  # all that is left


def by_name(targets, val, test, seed=0):
    names = [f"{target}/{number}" for number, target in enumerate(targets.tolist())]
    return hold_out_by_name(names, targets, val, test, seed)


def test_shares_held_out_by_name_hold_in_every_class():
    targets = torch.arange(8000) % 4
    train, val, test = by_name(targets, 0.1, 0.2)
    assert torch.cat([train, val, test]).sort().values.tolist() == list(range(8000))
    for part, share in ((val, 0.1), (test, 0.2)):
        spread = (2000 * share * (1 - share)) ** 0.5
        assert ((targets[part].bincount() - 2000 * share).abs() < 4 * spread).all()
    assert set(by_name(targets, 0.2, 0.2)[2].tolist()) == set(test.tolist())  # a larger val takes none from test
    assert set(by_name(targets, 0.2, 0.2)[1].tolist()) > set(val.tolist())
    assert set(by_name(targets, 0.1, 0.2, seed=1)[1].tolist()) != set(val.tolist())
    assert len(by_name(targets, 321, 0.2)[1]) == 321


@pytest.mark.parametrize("seed", range(5))
def test_every_class_keeps_a_sample_and_a_share_has_one(seed):
    targets = torch.arange(600) // 3  # classes of three
    train, val, _ = by_name(targets, 0.4, 0.4, seed)
    assert targets[train].bincount(minlength=200).min() == 1
    assert len(val) > 100
    few = by_name(torch.arange(12) // 6, 0.001, 0.001, seed)
    assert [len(part) for part in few] == [10, 1, 1]
    assert [len(part) for part in by_name(targets, 0, 0)] == [600, 0, 0]
