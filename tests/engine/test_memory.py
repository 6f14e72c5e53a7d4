"""Memory by use, counted before training, against counts of one's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mptrain.engine.rehearsal import rehearse
from mptrain.engine.resources import saved_bytes
from mptrain.engine.step import train_step
from mptrain.system.errors import FirstBatchError
from tests.small_runs import TINY, loop_of, parts_of

NETWORKS = {
    "convolutions": ("model=cnn", "dataset.train_samples=32", "train.batch_size=8"),
    "dense": TINY,
    "recurrent": ("model=word_lstm", "dataset=python_docs", "train.batch_size=4", "model.hidden_size=16"),
    "two learners": ("model=dcgan", "dataset.train_samples=16", "train.batch_size=4"),
    "micro-batches": ("model=cnn", "dataset.train_samples=32", "train.batch_size=9", "train.accumulate=2"),
}


def by_hooks(parts, batch):
    """Return the most bytes that a pass saves, counted by torch's own hooks: each memory once, the model's left out."""
    own = {one.untyped_storage().data_ptr() for one in [*parts.model.parameters(), *parts.model.buffers()]}
    most = 0
    for learner in parts.learners:
        for micro in batch.clone().split(parts.plan.accumulate):
            seen = {}

            def pack(tensor, seen=seen):
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
                return tensor

            with saved_tensors_hooks(pack, lambda one: one), parts.plan.products.context, parts.plan.autocast:
                loss = learner.loss(parts.model, micro)
            most = max(most, sum(one.nbytes() for place, one in seen.items() if place not in own))
            del loss
    return most


@pytest.mark.long
@pytest.mark.parametrize("network", NETWORKS)
def test_memory_by_use_is_what_a_step_holds(network):
    for mode in ("fp32", "fp16_dynamic", "fp16_pure", "amp_bf16"):
        parts, _ = parts_of(*NETWORKS[network], f"precision={mode}")
        parts.model.train()
        batch = parts.prepare(next(parts.loaders["train"].batches(0)))
        found = rehearse(parts, batch).memory
        assert found["activations"] == pytest.approx(by_hooks(parts, batch), rel=0.01)
        params = [own for learner in parts.learners for own in learner.weights.params]
        held = sum(one.nbytes for one in [*parts.model.parameters(), *parts.model.buffers()])
        assert found["weights"] == held
        half = sum(2 * one.numel() for one in params if one.dtype.itemsize == 2)
        # The updates of fp16_pure need FP32 copies, which are no master weights.
        assert found["fp32_copies" if mode == "fp16_pure" else "master_weights"] == 2 * half
        assert found["gradients"] == sum(one.nbytes for one in params) + 2 * half
        for learner in parts.learners:
            train_step(learner, parts.model, batch, parts.plan)
        states = [learner.weights.updater.state_dict()["state"] for learner in parts.learners]
        made = [one for state in states for tensors in state.values() for one in tensors.values()]
        assert found["optimizer_state"] == sum(one.nbytes for one in made)


def test_memory_is_in_the_summary_and_an_optimizer_that_makes_its_state_later_is_said(tmp_path):
    loop = loop_of(tmp_path, *TINY, "optimizer=torch", "optimizer.name=RMSprop", "train.max_steps=1")
    assert (
        "optimizer_state"
        not in rehearse(loop.parts, loop.parts.prepare(next(loop.parts.loaders["train"].batches(0)))).memory
    )
    found = loop.run()["memory_by_use"]
    assert found["optimizer_state"] >= found["weights"] > 0  # the mean of squares


class Exps(nn.Module):
    """Keeps the result of each of two exponentials, or only the input of both."""

    def __init__(self, *, again):
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.ones(100)), again

    def forward(self):
        def twice(one):
            return one.exp().exp()

        return (checkpoint(twice, self.weight * 2, use_reentrant=False) if self.again else twice(self.weight * 2)).sum()


def test_what_is_computed_again_is_not_counted_nor_computed_by_counting():
    assert saved_bytes((kept := Exps(again=False))(), kept) == 808  # with the factor
    again = Exps(again=True)
    loss = again()
    assert saved_bytes(loss, again) == 8  # held by the checkpoint, not by autograd
    loss.backward()
    assert again.weight.grad is not None


def test_a_tensor_changed_in_place_is_refused_as_without_counting():
    parts, _ = parts_of(*TINY)

    def loss(model, batch):
        return model(batch.inputs).float().exp().mul_(2).sum()

    object.__setattr__(parts.learners[0].objective, "loss", loss)
    with pytest.raises(FirstBatchError, match="modified by an inplace operation"):
        rehearse(parts, parts.prepare(next(parts.loaders["train"].batches(0))))
