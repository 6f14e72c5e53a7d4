"""Draws are functions of their arguments: spread out, independent of each other and of the process."""

from __future__ import annotations

import torch

from mptrain.workloads.base.random_streams import mix, permutation, uniforms


def test_mix_is_splitmix64():
    # The first two outputs of the published generator from state 0.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_the_vectorised_finaliser_equals_the_scalar_one():
    # One draw for sample s adds two steps: finalise(finalise(s + key) + constant).
    key = mix(3, 5)
    for index in (0, 1, 12345):
        expected = mix(_finalised(index + key)) >> 11
        assert uniforms(3, 5, [index], 1).item() == expected * 2.0**-53


def _finalised(word: int) -> int:
    return mix((word - 0x9E3779B97F4A7C15) % 2**64)


def test_a_sample_draws_the_same_whatever_its_company():
    together = uniforms(7, 2, [4, 9, 1], 5)
    assert torch.equal(together[1], uniforms(7, 2, [9], 5)[0])
    assert torch.equal(together[:, :2], uniforms(7, 2, [4, 9, 1], 2))


def test_seed_epoch_and_index_each_change_the_draws():
    base = uniforms(0, 0, [0], 4)
    for other in (uniforms(1, 0, [0], 4), uniforms(0, 1, [0], 4), uniforms(0, 0, [1], 4)):
        assert not (base == other).any()


def test_draws_are_uniform():
    draws = uniforms(11, 3, range(20000), 3)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert (draws.mean(0) - 0.5).abs().max() < 0.01  # five standard errors
    counts = torch.histc(draws, bins=10, min=0, max=1)
    assert (counts / 6000 - 1).abs().max() < 0.07
    assert torch.corrcoef(draws.T).fill_diagonal_(0).abs().max() < 0.035


def test_a_permutation_is_whole_and_depends_on_each_word():
    first = permutation(500, 1, 2)
    assert torch.equal(first.sort().values, torch.arange(500))
    assert torch.equal(first, permutation(500, 1, 2))
    assert not torch.equal(first, permutation(500, 2, 1))
    assert not torch.equal(first, permutation(500, 1, 3))
