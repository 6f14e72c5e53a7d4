"""What mixed precision is about, on a network that really needs it."""

from __future__ import annotations

import math

import pytest
from small_runs import Kept, loop_of

from mptrain.system.records import EvalRecord, StepRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def outcome(tmp_path, precision, seed, *extra):
    kept = Kept()
    loop_of(tmp_path, "model=plain16", f"precision={precision}", f"seed={seed}", *extra, kept=kept).run()
    steps = kept.of(StepRecord)
    losses = [step.loss for step in steps]
    return losses, kept.of(EvalRecord)[-1].metrics["top1"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plain16_needs_loss_scaling_in_fp16(tmp_path, seed):
    _, reference = outcome(tmp_path, "fp32", seed)
    assert reference > 0.9
    stuck, _ = outcome(tmp_path, "fp16_noscale", seed)
    tail = stuck[-20:]
    assert abs(sum(tail) / len(tail) - math.log(10)) < 0.01
    _, static = outcome(tmp_path, "fp16_static", seed, "scaler.scale=1024")
    _, dynamic = outcome(tmp_path, "fp16_dynamic", seed)
    assert abs(static - reference) < 0.05
    assert abs(dynamic - reference) < 0.05
