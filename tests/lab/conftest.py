from dataclasses import replace

import pytest

from mptrain.config.compose import compose
from mptrain.lab.doctor.check import check_scaling
from tests import faulty_networks


@pytest.fixture
def words_of(monkeypatch):
    """Function from what makes a module to the words of a network that has it between its first two layers."""

    def words(make, *more):
        monkeypatch.setitem(faulty_networks.FAULTS, "own", replace(faulty_networks.FAULTS["none"], make=make))
        return (*faulty_networks.with_fault("own"), "train.batch_size=16", *more)

    return words


@pytest.fixture
def examined(words_of):
    """Function from what makes a module to what doctor reports of its network in FP16."""

    def check(make, *more):
        return check_scaling(compose(words_of(make, "precision=fp16_dynamic", *more)), lambda _: None)

    return check
