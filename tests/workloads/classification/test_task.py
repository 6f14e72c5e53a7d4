from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.classification.task import Classify
from tests.told_models import Says


def batch_of(targets):
    return Batch(torch.zeros(len(targets), 1), torch.tensor(targets))


LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, -2.0]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_trap_04_the_loss_is_a_float32_scalar_mean(dtype):
    targets = [0, 1, 2]
    rows = zip(LOGITS.tolist(), targets, strict=True)
    expected = sum(math.log(sum(map(math.exp, row))) - row[target] for row, target in rows) / 3
    logits = LOGITS.to(dtype)
    for output, heads in ((logits, 0), ((logits, logits), 1), ((logits, None, logits), 1)):
        loss = Classify(num_classes=3).loss(Says(output), batch_of(targets))
        assert (loss.dtype, loss.shape) == (torch.float32, ())
        assert loss.item() == pytest.approx(expected * (1 + 0.3 * heads), rel=1e-6)


def test_trap_04_a_batch_of_8192_half_logits_is_finite():
    logits = (torch.randn(8192, 10) * 30).half().requires_grad_()
    targets = torch.randint(10, (8192,)).tolist()
    loss = Classify(num_classes=3).loss(Says(logits), batch_of(targets))
    per_sample = F.cross_entropy(logits.detach().float(), torch.tensor(targets), reduction="none")
    assert per_sample.half().cumsum(0, dtype=torch.float16)[-1].isinf()  # what an FP16 sum over the batch would be
    assert loss.item() == pytest.approx(per_sample.double().mean().item(), rel=1e-5)
    assert (loss * 65536.0).isfinite()
    (loss * 1024.0).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.dtype == torch.float16


def test_trap_04_the_largest_half_logits_have_a_finite_loss():
    logits = torch.tensor([[65504.0, -65504.0]]).half()
    assert Classify(num_classes=2).loss(Says(logits), batch_of([1])).item() == 131008.0
    assert Classify(num_classes=2, aux_weight=1.0).loss(Says((logits, logits)), batch_of([1])).item() == 262016.0


@pytest.mark.parametrize(
    ("weight", "output", "expected"),
    [(0.4, (LOGITS, LOGITS), 1.4), (0.3, (LOGITS,) * 3, 1.6), (0.3, (LOGITS, None), 1), (0.0, (LOGITS, LOGITS), 1)],
)
def test_auxiliary_heads_are_weighted_and_absent_ones_skipped(weight, output, expected):
    batch = batch_of([0, 1, 2])
    plain = Classify(num_classes=3).loss(Says(LOGITS), batch).item()
    assert Classify(num_classes=3, aux_weight=weight).loss(Says(output), batch).item() == pytest.approx(
        expected * plain
    )
    assert Classify(num_classes=3).measure(Says((LOGITS, -LOGITS)), batch_of([0, 1, 0]))["top1"].sum().item() == 3.0


def test_counts_by_hand():
    logits = torch.tensor(
        [
            [9.0, 8.0, 7.0, 6.0, 5.0, 4.0],  # class 0 is best: top-1 and top-5
            [9.0, 8.0, 7.0, 6.0, 5.0, 4.0],  # class 4 is fifth: top-5 only
            [9.0, 8.0, 7.0, 6.0, 5.0, 4.0],  # class 5 is sixth: neither
            [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],  # class 5 is best
        ]
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sums = Classify(num_classes=6).measure(Says(logits.to(dtype)), batch_of([0, 4, 5, 5]))
        assert sums["top1"].tolist() == [1.0, 0.0, 0.0, 1.0]
        assert sums["top5"].tolist() == [1.0, 1.0, 0.0, 1.0]
        assert all(value.dtype == torch.float64 and value.shape == (4,) for value in sums.values())
    metrics = Classify(num_classes=6).summarise({name: value.sum().item() for name, value in sums.items()}, 4)
    assert (metrics["top1"], metrics["top5"]) == (0.5, 0.75)


@pytest.mark.parametrize(("classes", "measured"), [(2, False), (3, False), (5, False), (6, True)])
def test_of_five_classes_or_fewer_there_is_no_top5(classes, measured):
    sums = Classify(num_classes=classes).measure(Says(torch.arange(classes).float().repeat(2, 1)), batch_of([0, 0]))
    assert ("top5" in sums) == measured
    assert sums["top1"].tolist() == [0.0] * 2


def test_fewer_logits_than_classes_are_refused_before_an_index_is():
    with pytest.raises(ConfigError, match="Says returns 3 outputs, and the data have 4 classes, 0 to 3"):
        Classify(num_classes=4).loss(Says(LOGITS), batch_of([0, 1, 2]))
