"""What one step in FP32 foretells of FP16 is what FP16 then does, at every scale."""

from __future__ import annotations

import pytest

from mptrain.engine.histograms import HistogramWatch
from mptrain.engine.step import train_step
from mptrain.numerics.exponents import merged, zero_share
from mptrain.numerics.forecast import GradientHistory
from mptrain.system.records import HistogramRecord
from tests.small_runs import Kept, loop_of, parts_of

pytestmark = pytest.mark.workload


class _NoRing:
    def record(self, *values):
        pass


def first_step(*overrides):
    parts, _ = parts_of("model=plain16", *overrides)
    parts.model.train()
    batch = parts.prepare(next(parts.loaders["train"].batches(0, start=0)))
    watch = HistogramWatch("main", 1)
    _NoRing().record(train_step(parts.learners[0], parts.model, batch, parts.plan, watch))
    return watch.records()[0]


@pytest.fixture(scope="module")
def foretold():
    history = GradientHistory()
    history.add(first_step("precision=fp32"))
    return history.forecast()


@pytest.mark.parametrize("exponent", [0, 3, 7, 10, 15])
def test_the_share_of_zero_gradients_is_the_one_that_fp32_foretold(foretold, exponent):
    measured = first_step("precision=fp16_static", f"scaler.scale={2**exponent}")
    zeros = zero_share(merged(measured.tensors["activation_gradients"].values()))
    assert zeros == pytest.approx(foretold.scales[exponent].zeros, abs=0.02)
    assert not measured.overflow
    assert not foretold.scales[exponent].overflowing


def test_overflows_begin_at_the_scale_that_fp32_foretold(foretold):
    overflowing = [exponent for exponent in range(17, 24) if foretold.scales[exponent].overflowing]
    for exponent in (overflowing[0] - 1, overflowing[0]):
        record = first_step("precision=fp16_static", f"scaler.scale={2**exponent}")
        assert record.overflow == (exponent in overflowing)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (("precision=fp32",), True),
        (("precision=fp16_dynamic",), True),
        (("precision=fp16_noscale",), False),
        (("precision=amp_static", "scaler.scale=1"), False),
        (("precision=fp16_static", "scaler.scale=8"), False),
    ],
)
def test_a_network_whose_gradients_vanish_in_fp16_bounds_no_scale(tmp_path, words, seen):
    kept = Kept()
    few = ("dataset.train_samples=64", "train.batch_size=16", "train.max_steps=3", "checkpoint.every_epochs=null")
    looks = ("diagnostics=histograms", "diagnostics.every=1")
    loop_of(tmp_path, "model=plain16", "precision.cpu_kernels=upcast", *few, *looks, *words, kept=kept).run()
    history = GradientHistory()
    for record in kept.of(HistogramRecord):
        history.add(record)
    found = history.forecast()
    assert (found.unseen == ()) == seen
    assert (found.lowest is not None) == (found.highest is not None) == seen
    if not seen:
        assert found.unseen[0].all_zero >= 2
