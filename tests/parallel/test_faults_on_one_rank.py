"""An overflow on any one rank, wherever it begins, is an overflow on all: same records, same weights."""

from __future__ import annotations

import pytest

from tests.several_ranks import trained_by

pytestmark = pytest.mark.distributed

BASE = [
    "model=mlp",
    "dataset.image_size=8",
    "dataset.train_samples=96",
    "train.batch_size=16",
    "train.epochs=2",
    "checkpoint.every_epochs=null",
    "precision=fp16_dynamic",
    "inject.step=4",
    "inject.count=2",
]
TENSORS = ("input", "activation:3", "gradient:3.weight", "reduced_gradient:3.weight")
KINDS = (pytest.param("ddp", marks=pytest.mark.slow), "fsdp2")


@pytest.mark.parametrize("kind", KINDS)
def test_trap_28_all_ranks_agree_on_every_step(kind):
    """On three ranks, so that shares are no powers of two; the last of them alone holds its part of the weights."""
    cases = [[*BASE, f"distributed={kind}", f"inject.tensor={tensor}", "inject.rank=2"] for tensor in TENSORS]
    for answers in trained_by(3, *cases):
        first = answers[0]
        assert [step["step"] for step in first["steps"] if step["overflow"]] == [4, 5]
        assert [step["step"] for step in first["steps"] if step["skipped"]] == [4, 5]
        for answer in answers[1:]:
            assert str(answer["steps"]) == str(first["steps"])  # NaN included
            assert answer["weights"] == first["weights"]
        assert first["steps"][-1]["updates"] == len(first["steps"]) - 2
