"""What one step in FP32 foretells of FP16 is what FP16 then does, at every scale."""

from __future__ import annotations

import pytest
from small_runs import parts_of

from mptrain.engine.step import train_step
from mptrain.numerics.exponents import merged, zero_share
from mptrain.numerics.forecast import GradientHistory
from mptrain.probe.histograms import HistogramWatch

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
