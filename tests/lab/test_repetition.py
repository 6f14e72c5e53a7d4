"""A step done again is the step that was trained, of every learner, and leaves everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from mptrain.lab.step.repetition import observe_step, saved_step_at
from mptrain.system.records import StepRecord
from tests.small_runs import TINY, loop_of, parts_of

GAN = ("model=dcgan", "dataset.train_samples=32", "train.batch_size=8", "precision=amp_static", "train.max_steps=3")


def trained(root, *words):
    """Losses by learner and step of a run."""
    from tests.small_runs import Kept

    kept = Kept()
    loop_of(root, *words, kept=kept).run()
    return {(one.learner, one.step): one.loss for one in kept.of(StepRecord)}


def everything(parts):
    state = {
        "model": parts.model.state_dict(),
        "full": parts.full_precision(),
        "learners": {learner.name: learner.state_dict() for learner in parts.learners},
        "buffers": dict(parts.model.named_buffers()),
    }
    return copy.deepcopy(torch.utils._pytree.tree_leaves(state))


def same(left, right):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(left, right, strict=True))


@pytest.mark.long
def test_each_learner_is_seen_behind_the_updates_of_those_before_it(tmp_path):
    losses = trained(tmp_path, *GAN)
    parts, options = parts_of(*GAN)
    saved_step = saved_step_at(parts, options, None, 3)
    for _ in range(2):  # looking once changes nothing for the second look
        seen = observe_step(parts, saved_step)
        assert {one.learner: one.loss for one in seen} == {
            name: losses[name, 3] for name in ("discriminator", "generator")
        }


@pytest.mark.parametrize(
    "words",
    [GAN, (*TINY, "precision=fp16_dynamic", "inject.step=3", "inject.tensor=weight:3.bias", "inject.value=nan")],
)
def test_a_look_leaves_weights_optimizers_scales_and_buffers_as_they_were(words):
    parts, options = parts_of(*words)
    saved_step = saved_step_at(parts, options, None, 3)
    before, state = everything(parts), copy.deepcopy(saved_step.state)
    observe_step(parts, saved_step)
    assert same(before, everything(parts))
    leaves = torch.utils._pytree.tree_leaves
    assert same(leaves(state), leaves(saved_step.state))
