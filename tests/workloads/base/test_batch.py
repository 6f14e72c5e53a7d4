"""A batch splits without losing a sample, and its parts weigh what they hold."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.workloads.base.batch import Batch


def numbered(samples: int) -> Batch:
    inputs = torch.arange(samples, dtype=torch.float32).view(-1, 1, 1, 1)
    return Batch(inputs, torch.arange(samples))


@given(st.integers(1, 70), st.integers(1, 90))
def test_parts_are_contiguous_even_and_weighed_by_terms(samples, parts):
    batch = numbered(samples)
    pieces = batch.split(parts)
    sizes = [piece.terms for piece in pieces]
    assert len(pieces) == min(parts, samples)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert parts > 1 or pieces[0] is batch
    assert all(len(piece.inputs) == len(piece.targets) == piece.terms for piece in pieces)
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), batch.targets)
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), batch.inputs)
    assert [batch.share(piece) * samples for piece in pieces] == pytest.approx(sizes)


@pytest.mark.parametrize(("whole", "shares"), [(None, [6 / 8, 2 / 8]), (16, [6 / 16, 2 / 16])])
def test_shares_count_terms_and_not_samples_of_the_whole_batch(whole, shares):
    batch = Batch(torch.zeros(3, 5), torch.zeros(3, 5), counts=(5, 1, 2), whole=whole)
    assert [batch.share(part) for part in batch.split(2)] == shares


def test_only_floating_inputs_are_cast():
    images = Batch(torch.rand(2, 3), torch.rand(2), extras={"mask": torch.rand(2)})
    half = images.cast(torch.float16)
    assert [one.dtype for one in (half.inputs, half.targets, half.extras["mask"])] == [
        torch.float16,
        *[torch.float32] * 2,
    ]
    assert images.cast(torch.float32) is images
    tokens = Batch(torch.arange(2), torch.arange(2))
    assert tokens.cast(torch.float16) is tokens


def test_one_tensor_that_is_inputs_and_targets_is_moved_once():
    pictures = torch.arange(12.0).view(3, 4)
    both = Batch(pictures, pictures, extras={"words": torch.arange(3)})
    moved = both.to(torch.device("meta"))
    assert moved.targets is moved.inputs
    assert moved.inputs.device == moved.extras["words"].device == torch.device("meta")
    apart = Batch(pictures, pictures.clone()).to(torch.device("meta"))
    assert apart.targets is not apart.inputs
    again = pickle.loads(pickle.dumps(both))  # as it comes from a worker process
    assert again.targets is again.inputs
