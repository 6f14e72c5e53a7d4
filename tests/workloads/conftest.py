"""What several rooms of the workloads need: a few steps of a whole run, and what becomes of data that cannot be used."""

from __future__ import annotations

import math

import pytest

from mptrain.engine.loop import Loop
from mptrain.engine.telemetry import NoStorage
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.errors import DataError
from mptrain.system.records import StepRecord
from tests.small_runs import Kept, parts_of


@pytest.fixture(params=["fp32", "amp_bf16", "fp16_dynamic"])
def usual_mode(request):
    """A mode in which networks of every family are tried."""
    return request.param


@pytest.fixture
def takes_three_steps(tmp_path):
    """Train three steps and require finite losses; half precision is computed the same on every CPU."""

    def run(precision, *words, scale=1):
        half = ("precision.cpu_kernels=upcast", f"scaler.init_scale={scale}") if precision.startswith("fp16") else ()
        given = (*words, "train.max_steps=3", "device=cpu", f"precision={precision}", *half)
        parts, options = parts_of(*given)
        kept = Kept()
        Loop(parts, options, NoStorage(RunPaths(tmp_path)), [kept]).run()
        steps = kept.of(StepRecord)
        assert [step.updates for step in steps] == [1, 2, 3]
        assert all(math.isfinite(step.loss) for step in steps)

    return run


@pytest.fixture
def stops_or_skips():
    """Load data with one unusable sample: stopping names it and the way out; skipping counts it. Return the data."""

    def check(load, said, skipped=1, **options):
        with pytest.raises(DataError, match=said) as caught:
            load(**options)
        assert "\n" not in str(caught.value)
        assert "dataset.on_error=skip" in caught.value.hint
        data = load(on_error="skip", **options)
        assert data.train.skipped == skipped
        return data

    return check
