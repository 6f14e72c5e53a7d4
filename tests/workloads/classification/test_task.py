from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.classification.task import Classify


class Says(nn.Module):
    """A model that answers what it was told."""

    def __init__(self, output) -> None:
        super().__init__()
        self.output = output

    def forward(self, inputs):
        return self.output


def batch_of(targets):
    return Batch(torch.zeros(len(targets), 1), torch.tensor(targets))


LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, -2.0]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_trap_04_the_loss_is_a_float32_scalar_whatever_the_logits_are(dtype):
    for output in (LOGITS.to(dtype), (LOGITS.to(dtype), LOGITS.to(dtype)), (LOGITS.to(dtype), None, LOGITS.to(dtype))):
        loss = Classify(num_classes=3).loss(Says(output), batch_of([0, 1, 2]))
        assert loss.dtype == torch.float32
        assert loss.shape == ()


def test_trap_04_a_batch_of_8192_half_logits_has_a_finite_loss_and_finite_scaled_gradients():
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
    assert Classify(num_classes=3).loss(Says(logits), batch_of([1])).item() == 131008.0
    assert Classify(num_classes=3, aux_weight=1.0).loss(Says((logits, logits)), batch_of([1])).item() == 262016.0


def test_the_loss_is_the_mean_negative_log_likelihood():
    loss = Classify(num_classes=3).loss(Says(LOGITS), batch_of([0, 1, 2]))
    expected = [
        math.log(sum(math.exp(value) for value in row)) - row[target]
        for row, target in zip(LOGITS.tolist(), [0, 1, 2], strict=True)
    ]
    assert loss.item() == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_auxiliary_heads_are_weighted_and_absent_ones_skipped():
    batch = batch_of([0, 1, 2])
    plain = Classify(num_classes=3).loss(Says(LOGITS), batch)
    assert Classify(num_classes=3, aux_weight=0.4).loss(Says((LOGITS, LOGITS)), batch).item() == pytest.approx(
        1.4 * plain.item()
    )
    assert Classify(num_classes=3).loss(Says((LOGITS, LOGITS, LOGITS)), batch).item() == pytest.approx(
        1.6 * plain.item()
    )
    assert Classify(num_classes=3).loss(Says((LOGITS, None)), batch).item() == plain.item()
    assert Classify(num_classes=3, aux_weight=0.0).loss(Says((LOGITS, LOGITS)), batch).item() == plain.item()


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


def test_sums_over_parts_make_the_metrics_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(50, 10, generator=generator), torch.randint(10, (50,), generator=generator)
    task, sums = Classify(num_classes=3), {}
    for part in (slice(0, 20), slice(20, 21), slice(21, 50)):
        for name, value in task.measure(Says(logits[part]), batch_of(targets[part].tolist())).items():
            sums[name] = sums.get(name, 0.0) + value.sum().item()
    metrics = task.summarise(sums, 50)
    by_hand = sum(row.index(max(row)) == target for row, target in zip(logits.tolist(), targets.tolist(), strict=True))
    assert metrics["top1"] == by_hand / 50
    assert metrics["loss"] == pytest.approx(F.cross_entropy(logits.double(), targets).item(), rel=1e-6)


def test_measuring_takes_the_first_of_several_outputs():
    first = Classify(num_classes=3).measure(Says((LOGITS, -LOGITS)), batch_of([0, 1, 0]))
    assert first["top1"].sum().item() == 3.0


def test_there_is_one_objective_for_all_parameters():
    (objective,) = Classify(num_classes=3).objectives()
    assert objective.learner == "main"
    assert "any.name".startswith(objective.modules)
    sums = Classify(num_classes=6).measure(Says(LOGITS), batch_of([0, 1, 2]))
    assert Classify.metric in sums
    assert set(Classify.shares) == set(sums) - {"loss"}
