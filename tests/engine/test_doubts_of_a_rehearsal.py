"""What a rehearsal says of gradients that hooks clamp, and of whole numbers that a cast changes."""

from __future__ import annotations

import torch

from mptrain.engine.rehearsal import rehearse, rounded_numbers
from mptrain.workloads.base.batch import Batch
from tests.engine.plain_loops import Net, first_batches, new_loop


class Clamped(Net):
    limit = 1.0

    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad.clamp(-self.limit, self.limit))


def test_hooks_that_clamp_scaled_gradients_are_named(monkeypatch):
    for mode, limit, said in (("amp_dynamic", 1.0, True), ("amp_dynamic", 1e9, False), ("fp32", 1.0, False)):
        monkeypatch.setattr(Clamped, "limit", limit)
        loop = new_loop(Clamped, monkeypatch, f"precision={mode}")
        loop.parts.model.train()
        doubts = rehearse(loop.parts, first_batches(loop)[0]).doubts
        assert [doubt.startswith("gradients of head.weight do not grow with the loss scale") for doubt in doubts] == (
            [True] * said
        ), mode


class ClampedWithin(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "module":
            self.head.register_full_backward_hook(lambda module, inward, outward: tuple(one * 0 + 1 for one in inward))

    def forward(self, images):
        hidden = self.features(images)
        if self.how == "activation" and hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-1e-6, 1e-6))
        if self.how == "noted" and hidden.requires_grad:
            hidden.register_hook(lambda grad: None)
        return self.head(hidden)


def test_hooks_of_modules_and_activations_that_clamp_are_named(monkeypatch):
    for how, said in (("module", True), ("activation", True), ("noted", False)):
        loop = new_loop(lambda how=how: ClampedWithin(how), monkeypatch, "precision=fp16_dynamic")
        loop.parts.model.train()
        doubts = rehearse(loop.parts, first_batches(loop)[0]).doubts
        assert [doubt.startswith("gradients of body.weight") for doubt in doubts] == [True] * said, how
    assert torch.Tensor.register_hook.__module__ == "torch._tensor"


def test_whole_numbers_that_a_cast_changes_are_named():
    raw = Batch(torch.tensor([[0.123, 7.0, 3001.0], [5.7, 9.0, 12.0]]), torch.zeros(2))
    [sentence] = rounded_numbers(raw, raw.cast(torch.float16))
    assert "to torch.float16 changes whole numbers in column 2:" in sentence
    assert rounded_numbers(raw, raw) == []
    small = Batch(raw.inputs[:, :2], raw.targets)
    assert rounded_numbers(small, small.cast(torch.bfloat16)) == []
