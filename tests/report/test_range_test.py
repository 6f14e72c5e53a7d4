"""A range test reads where the loss falls, is lowest and explodes, and suggests nothing where it does not fall."""

from __future__ import annotations

import math
import random
import shlex

import pytest

from mptrain.cli.blocks import block_lines
from mptrain.lab.pages.rate_range import range_test_page, read_range_test, result_blocks
from mptrain.report.html_and_markdown import html
from mptrain.runlog.run_reader import read_run
from mptrain.system.errors import DataError
from mptrain.system.records import StepRecord
from tests.small_runs import TINY, run_in_process


def steps(loss_at, count=200, low=1e-5, high=10.0):
    """Records of a test whose loss is a function of the learning rate."""
    names = StepRecord.__annotations__
    for at in range(count):
        rate = low * (high / low) ** (at / (count - 1))
        skipped = not math.isfinite(loss_at(rate))
        fields = {"step": at + 1, "learner": "main", "loss": loss_at(rate), "lr": rate, "skipped": skipped}
        yield StepRecord(**{name: fields.get(name, 0) for name in names})


def test_the_rates_are_those_of_the_curve():
    found = read_range_test(
        steps(lambda rate: 2.3 if rate < 1e-3 else 0.5 if rate < 0.1 else math.inf if rate > 3 else 9.0)
    )
    assert 0.05 < found.lowest < 0.1
    assert found.suggested == float(f"{found.lowest / 10:.1e}")
    assert 1e-3 < found.steepest < 2e-3
    assert 0.1 < found.explodes < 1
    assert max(found.rates) <= 3
    found = read_range_test(steps(lambda rate: 2.3 if rate < 1e-3 else 0.5 if rate < 0.1 else math.nan))
    assert 0.1 < found.explodes < 0.11


def test_a_loss_that_never_explodes_is_said_and_one_that_does_not_fall_suggests_nothing():
    found = read_range_test(steps(lambda rate: 2.3 - math.log10(rate / 1e-5) / 10))
    assert found.explodes is None
    assert "at no rate that was tried" in html(range_test_page("<run>", found, "mptrain"))
    cut = "the loss was still falling at the highest rate tried: raise schedule.last."
    shown = html(range_test_page("run", found, "")), repr(found), " ".join(block_lines(result_blocks(found, "mptrain")))
    assert [text.lower().count(cut) for text in shown] == [1, 1, 1]
    assert (
        cut not in repr(read_range_test(steps(lambda rate: 2.3 if rate < 1e-3 else 0.5 if rate < 1 else 0.9))).lower()
    )
    falls = steps(lambda rate: 2.3 - rate / 100 if rate < 9 else math.inf)  # until it explodes
    assert cut not in repr(read_range_test(falls)).lower()
    with pytest.raises(DataError, match="the loss did not fall at any rate"):
        read_range_test(steps(lambda rate: 2.3))
    with pytest.raises(DataError, match="a range test of 15 updates says nothing"):
        read_range_test(steps(lambda rate: 2.3, count=15))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_the_steepest_fall_is_none_of_noise(noise):
    """Beyond 1e-3 the loss falls by 1 within two decades, the fastest at 1e-2, and by nothing before."""
    chance = random.Random(1)

    def loss(rate):
        share = min(max(math.log10(rate / 1e-3) / 2, 0.0), 1.0)
        return 2.3 - share**2 * (3 - 2 * share) + chance.gauss(0, noise) + 5 * (rate > 1)

    found = read_range_test(steps(loss))
    if noise < 0.5:
        assert 3e-3 < found.steepest < 3e-2
    else:  # ten losses beside one another differ by 0.22
        assert found.steepest is None
        assert "falls fastest: not clear" in repr(found)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.long)])
def test_a_network_trains_with_the_rate_that_is_suggested(optimizer, tmp_path):
    words = (*TINY[:4], f"optimizer={optimizer}", "precision=fp16_dynamic", "threads=1")
    done = run_in_process("find", "lr", *words, "run.name=test", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rate = float(done.stdout.split("suggested: ")[1].split(",")[0])
    assert (tmp_path / "range_tests/test/range-test.html").exists()
    assert f"optimizer.lr={rate:g}" in done.stdout
    done = run_in_process(*words, f"optimizer.lr={rate}", "train.epochs=30", "run.name=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "outputs/run").summary["metric"] > 0.6


def test_the_command_that_is_printed_trains(tmp_path, capsys):
    words = (*TINY[:4], "train.max_steps=60", "schedule.last=2", "run.name=test", "run.resume=auto", "threads=1")
    for _ in range(2):  # the second finds the test done
        done = run_in_process("find", "lr", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (line,) = (shlex.split(one) for one in done.stdout.splitlines() if one.strip().startswith("mptrain "))
    assert line[:-1] == ["mptrain", *TINY[:4], "threads=1"], line
    assert run_in_process(*line[1:], "train.epochs=1", cwd=tmp_path).returncode == 0


def test_what_cannot_be_found_is_said(tmp_path):
    for words, said in (
        (("momentum",), "find takes what to find"),
        (("lr", "schedule=cosine"), "a range test has its own schedule"),
        (("lr", "model=nothing"), "nothing"),
    ):
        done = run_in_process("find", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
