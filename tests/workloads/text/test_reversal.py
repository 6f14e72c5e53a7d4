"""Sequences of different lengths, read from behind."""

from __future__ import annotations

import pytest
import torch

from mptrain.workloads.text.subwords import reverse_padded


def test_turning_round_twice_changes_nothing():
    sequence, lengths = torch.arange(12.0).view(2, 6, 1), torch.tensor([6, 2])
    turned = reverse_padded(sequence, lengths)
    assert turned[:, :, 0].tolist() == [[5, 4, 3, 2, 1, 0], [7, 6, 8, 9, 10, 11]]
    assert torch.equal(reverse_padded(turned, lengths), sequence)


@pytest.mark.parametrize("length", [0, 1])
def test_a_sequence_of_one_place_or_of_none_stays_what_it_is(length):
    sequence = torch.randn(1, 4, 3)
    assert torch.equal(reverse_padded(sequence, torch.tensor([length])), sequence)
