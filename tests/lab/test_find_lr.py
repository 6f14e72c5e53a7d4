"""`mptrain.find_lr` returns what ``mptrain find lr`` prints, with the run, also of a run that its rates end."""

from __future__ import annotations

import random

import pytest
import torch

import mptrain
from mptrain.lab import range_test
from mptrain.system.errors import DataError, NumericsError, UsageError
from tests.small_runs import TINY

WORDS = (*TINY[:4], "precision=fp16_dynamic", "threads=1")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
def test_rates_are_found_and_shown_and_the_caller_keeps_its_random_numbers(tmp_path):
    states = random.getstate(), torch.get_rng_state().tolist()
    found = mptrain.find_lr(*WORDS, "optimizer=adam", show=False)
    assert (random.getstate(), torch.get_rng_state().tolist()) == states
    assert found.suggested == float(f"{found.lowest / 10:.1e}")
    assert 1e-4 < found.steepest < found.lowest < 1
    assert found.run.state.status == "done"
    assert found.run.paths.root.parts[0] == "range_tests"
    assert len(list(found.run.steps())) == 200
    assert "<svg" in found._repr_html_()
    assert "suggested rate" in found.plot().svg


def test_a_run_that_a_rate_ends_is_read_and_the_words_of_the_user_win():
    words = ("optimizer=sgd", "optimizer.lr=0.1", "schedule.last=1e6", "train.max_steps=150")
    found = mptrain.find_lr(*WORDS, *words, "run.root=elsewhere", "run.name=mine", show=False)
    assert found.run.state.status == "failed"
    assert str(found.run.paths.root) == "elsewhere/mine"
    assert found.explodes is not None
    assert repr(found).startswith(f"suggested: {found.suggested:g}, a tenth of that of the lowest loss")
    assert len(repr(found).splitlines()) == 6


class Net(torch.nn.Linear):
    def __init__(self, num_classes):
        super().__init__(2, num_classes)


def test_a_run_that_a_rate_ends_has_the_parts_of_the_program_and_any_path():
    x = torch.arange(64.0).view(32, 2) / 64
    words = ("optimizer=sgd", "optimizer.lr=10", "schedule.last=1e30", "train.batch_size=8", "precision=fp32")
    data = {"train": (x, (x[:, 0] > 0.5).long()), "val": (x, (x[:, 0] > 0.5).long())}
    found = mptrain.find_lr(*words, "run.root='my tests'", model=Net, data=data, show=False)
    assert found.run.state.status == "failed"
    assert found.run.paths.root.parts[0] == "my tests"
    assert {"model", "dataset"} <= found.run.given.keys()


def test_an_error_before_there_is_a_run_is_the_error(monkeypatch):
    def fail(*words, **arguments):
        raise NumericsError("no directory")

    monkeypatch.setattr(range_test, "train", fail)
    with pytest.raises(NumericsError, match="no directory"):
        mptrain.find_lr()


def test_what_finds_nothing_is_refused_by_name():
    with pytest.raises(UsageError, match="schedule=cosine has no effect: a range test has its own schedule"):
        mptrain.find_lr(*WORDS, "schedule=cosine")
    with pytest.raises(UsageError, match="an override is an int"):
        mptrain.find_lr(3)
    with pytest.raises(DataError, match="a range test of 5 updates says nothing"):
        mptrain.find_lr(*WORDS, "train.max_steps=5", show=False)
    with pytest.raises(DataError, match="the loss did not fall at any rate"):
        mptrain.find_lr(*WORDS, "schedule.first=1e-9", "schedule.last=1e-8", "train.max_steps=30", show=False)


def test_a_network_of_the_caller_is_not_to_be_updated(monkeypatch):
    given = []

    def stop(*words, **arguments):
        given.append(arguments)
        raise DataError("stopped")

    monkeypatch.setattr(range_test, "train", stop)
    for arguments in ({"model": torch.nn.Linear(2, 2)}, {"model": "mlp"}, {}):
        with pytest.raises(DataError, match="stopped"):
            mptrain.find_lr(**arguments)
    assert [arguments.get("update_model") for arguments in given] == [False, None, None]
