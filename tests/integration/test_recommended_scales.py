"""A scale that is recommended trains another seed as FP32 does, and skips next to nothing; where that is not sure, none is."""

from __future__ import annotations

import pytest

from mptrain.numerics.forecast import GradientHistory
from mptrain.system.records import EvalRecord, HistogramRecord, StepRecord
from tests.small_runs import Kept, loop_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: Words, metric and margin of a network without norms, a recurrent one, and a residual one with norms; each trains for 300 steps or more.
NETWORKS = {
    "plain16": (("model=plain16",), "top1", 0.05),
    "lstm": (
        ("model=word_lstm", "train.batch_size=16", "dataset.sequence_length=32", "train.epochs=300", "train.max_steps=320"),
        "loss",
        0.05,
    ),
    "residual": (("model=resnext_small", "train.batch_size=16", "train.epochs=300", "train.max_steps=320"), "top1", 0.05),
}  # fmt: skip


def trained(root, words, *more):
    kept = Kept()
    loop_of(root, *words, "precision.cpu_kernels=upcast", "checkpoint.every_epochs=null", *more, kept=kept).run()
    return kept


def after(looks, kept):
    """Return the forecast from so many looks, spread evenly over the run, and from the whole record of its steps."""
    seen = [one for one in kept.of(HistogramRecord) if one.step == 1 or looks > 1]
    history = GradientHistory()
    for record in seen[:: max(len(seen) // looks, 1)][:looks]:
        history.add(record)
    return history.forecast(kept.of(StepRecord))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("network", list(NETWORKS))
def test_a_recommended_scale_skips_less_than_one_step_in_a_hundred_and_ends_as_fp32_does(tmp_path, network, seed):
    words, metric, margin = NETWORKS[network]
    looked_at = trained(
        tmp_path, words, "precision=fp16_dynamic", f"seed={seed}", "diagnostics=histograms", "diagnostics.every=10"
    )
    assert len(looked_at.of(StepRecord)) >= 300
    forecasts = {looks: after(looks, looked_at) for looks in (1, 3, 10, 30)}
    assert (forecasts[1].too_few, forecasts[1].recommended) == (True, None)
    assert all(one.too_few or one.recommended is not None for one in forecasts.values())
    assert forecasts[30].recommended is not None
    named = sorted({one.recommended for one in forecasts.values() if one.recommended is not None})
    print(network, seed, {looks: one.recommended for looks, one in forecasts.items()})
    another = f"seed={seed + 10}"
    # FP32 itself ends anywhere in a range: plain16 at 0.85 to 0.95 here.
    references = [
        trained(tmp_path, words, "precision=fp32", f"seed={seed + more}").of(EvalRecord)[-1].metrics[metric]
        for more in (10, 20, 30)
    ]
    for exponent in {named[0], named[-1]}:
        kept = trained(tmp_path, words, "precision=fp16_static", f"scaler.scale={2**exponent}", another)
        steps = kept.of(StepRecord)
        found = kept.of(EvalRecord)[-1].metrics[metric]
        print(exponent, sum(one.skipped for one in steps), found, references)
        assert sum(one.skipped for one in steps) < 0.01 * len(steps)
        assert min(references) - margin < found < max(references) + margin
