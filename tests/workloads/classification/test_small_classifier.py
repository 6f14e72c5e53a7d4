from __future__ import annotations

import pytest
import torch

from mptrain.precision.apply import autocast
from mptrain.precision.policy import Policy
from mptrain.workloads.classification.task import train_classifier
from mptrain.workloads.images.datasets.digits import load_digits

CPU = torch.device("cpu")
MIXED = Policy("mixed", "float32", "float16", autocast=True, master_weights=False)


@pytest.fixture(scope="module")
def digits():
    return load_digits(normalise="symmetric")


@pytest.fixture(scope="module")
def classifier(digits):
    return train_classifier(digits, CPU)


def test_it_learns_the_digits_and_is_in_evaluation_mode(digits, classifier):
    batch = digits.prepare(digits.val.fetch(range(200), 0, 0), CPU, torch.contiguous_format)
    assert not classifier.training
    assert (classifier(batch.inputs).argmax(1) == batch.targets).float().mean() > 0.94


def test_it_is_the_same_wherever_and_draws_no_random_numbers(digits, classifier):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.no_grad(), autocast(MIXED, CPU):
        again = train_classifier(digits, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    one, other = classifier.state_dict(), again.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
