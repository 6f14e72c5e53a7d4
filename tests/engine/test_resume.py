from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.engine.checkpointing import take_snapshot
from mptrain.engine.loop import Loop
from mptrain.run.build.parts import build
from mptrain.system.errors import CheckpointError, Preempted
from mptrain.system.records import EpochRecord
from tests.small_runs import TINY, Kept, continue_loop, interrupt_after, loop_of, steps_of, whole_and_resumed

MODES = [
    "fp32", "amp_static", "amp_dynamic", "amp_bf16", "fp16_static", "fp16_dynamic", "fp16_noscale", "fp16_pure", "bf16",
    "bf16_pure", "bf16_stochastic", "bf16_kahan", "fp8_current_emulated", "mxfp8_emulated", "nvfp4_emulated",
]  # fmt: skip


def interrupt_when_evaluating(loop, *, evaluated):
    """Ask for the end when an evaluation begins: the validation of new weights, or after it the test."""

    def show(doing):
        if doing == "evaluating" and (loop.progress.evaluated_at == loop.progress.step) == evaluated:
            loop.interrupts.received = "SIGTERM"

    loop.telemetry.show = show
    with pytest.raises(Preempted):
        loop.run()


@pytest.mark.long
@pytest.mark.parametrize("precision", MODES)
def test_trap_37_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, precision):
    dynamic = ("scaler.init_scale=1048576", "scaler.growth_interval=7") if "dynamic" in precision else ()
    words = ("model=cnn", "dataset.train_samples=160", "train.batch_size=16", "train.epochs=2", "dataset.val_samples=40",
             f"precision={precision}", "checkpoint.every_epochs=null", *dynamic)  # fmt: skip
    whole, rest = whole_and_resumed(tmp_path, *words, after=13)  # inside an epoch of 10 steps, and a growth window
    assert steps_of(whole) == steps_of(rest)
    assert len(steps_of(rest)) == 20
    one, other = whole.parts.full_precision(), rest.parts.full_precision()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(a, b) for a, b in zip(whole.parts.model.buffers(), rest.parts.model.buffers(), strict=True))
    if dynamic:
        assert len({step["loss_scale"] for step in steps_of(whole)}) > 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "adagrad"])
def test_trap_37_holds_for_every_optimizer_and_with_dropout(tmp_path, optimizer):
    words = (*TINY, f"optimizer={optimizer}", "precision=fp16_dynamic", "model.dropout=0.2", "train.max_steps=12")
    whole, resumed = whole_and_resumed(tmp_path, *words, after=5)
    assert steps_of(whole) == steps_of(resumed)


def test_trap_37_holds_for_operands_that_are_rounded_at_random(tmp_path):
    words = (*TINY, "precision=nvfp4_emulated", "model.dropout=0.2", "train.accumulate=2", "train.max_steps=8")
    whole, resumed = whole_and_resumed(tmp_path, *words, after=5)
    assert steps_of(whole) == steps_of(resumed)
    one, other = whole.parts.full_precision(), resumed.parts.full_precision()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_epoch_whose_evaluation_was_interrupted_has_the_same_row(tmp_path):
    words = (*TINY, "precision=amp_dynamic")
    undisturbed, rows = Kept(), Kept()
    loop_of(tmp_path, *words, kept=undisturbed).run()
    loop = loop_of(tmp_path, *words)
    interrupt_when_evaluating(loop, evaluated=False)
    assert loop.progress.step == 6
    continue_loop(loop, *words, kept=rows).run()
    timeless = [
        [replace(row, seconds=0, terms_per_second=0) for row in kept.of(EpochRecord)] for kept in (undisturbed, rows)
    ]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) == 3


def test_the_best_checkpoint_is_still_known_after_the_last_evaluation_was_interrupted(tmp_path):
    loop = loop_of(tmp_path, *TINY)
    interrupt_when_evaluating(loop, evaluated=True)
    assert loop.progress.step == loop.planned
    metric = loop.progress.last["val"]["top1"]
    assert "test" not in loop.progress.last
    best = loop.storage.store.load("best").manifest
    assert (best.step, best.metric) == (loop.planned, metric)


def test_scaler_state_in_a_checkpoint_is_complete(tmp_path):
    words = (*TINY, "precision=amp_dynamic", "scaler.hysteresis=3", "scaler.growth_interval=5")
    loop = loop_of(tmp_path, *words)
    interrupt_after(loop, 8)
    own = loop.parts.learners[0].scale_state
    saved = loop.storage.store.load_latest().state["learners"]["main"]["scaler"]
    assert saved.keys() == own.keys() == {"scale", "growth_tracker", "hysteresis_tracker"}
    assert {key: value.item() for key, value in saved.items()} == {
        "scale": 131072,
        "growth_tracker": 3,
        "hysteresis_tracker": 3,
    }


def test_trap_39_an_fp32_checkpoint_goes_on_in_fp16_with_a_fresh_scale(tmp_path):
    loop = loop_of(tmp_path, *TINY, "precision=fp32")
    interrupt_after(loop, 8)
    weights = {name: value.clone() for name, value in loop.parts.full_precision().items()}
    parts, options = build(compose((*TINY, "precision=fp16_dynamic")))
    fresh = Loop(parts, options, loop.storage)
    notes = fresh.checkpointing.restore(loop.storage.store.load_latest().state, forgive=False)
    assert notes == ["the checkpoint was saved with another scaler: the loss scale starts again at 65536"]
    for name, value in parts.full_precision().items():
        assert torch.equal(value, weights[name])
    for name, parameter in parts.model.named_parameters():
        assert torch.equal(parameter, weights[name].half())
    fresh.run()
    assert fresh.progress.step == fresh.planned


def test_trap_38_constants_of_the_configuration_win_over_the_checkpoint_and_are_reported(tmp_path):
    words = (*TINY, "precision=amp_dynamic", "scaler.init_scale=262144", "scaler.hysteresis=3")
    loop = loop_of(tmp_path, *words)
    interrupt_after(loop, 3)
    capped = continue_loop(loop, *TINY, "precision=amp_dynamic", "scaler.max_scale=65536", "scaler.hysteresis=2")
    assert capped.parts.learners[0].scale.item() == 65536
    assert capped.notes == [
        "the scaler's scale continues at 65536; it was 262144 in the checkpoint",
        "the scaler's hysteresis_tracker continues at 2; it was 3 in the checkpoint",
    ]
    static = continue_loop(capped, *TINY, "precision=amp_static", "scaler.scale=8")
    assert static.parts.learners[0].scale.item() == 8
    assert static.notes == ["the loss scale continues at 8; it was 2^18 in the checkpoint"]


def test_a_changed_batch_size_is_refused_and_another_accumulation_is_not(tmp_path):
    loop = loop_of(tmp_path, *TINY)
    interrupt_after(loop, 3)
    with pytest.raises(CheckpointError, match="batch_size was 16 and is now 32"):
        continue_loop(loop, *TINY, "train.batch_size=32")
    again = continue_loop(loop, *TINY, "train.accumulate=2")
    again.run()
    assert [step["step"] for step in steps_of(again)] == list(range(1, 19))


def test_every_step_is_on_record_with_exactly_these_keys(tmp_path):
    loop = loop_of(tmp_path, *TINY)
    loop.run()
    steps = steps_of(loop)
    assert [step["step"] for step in steps] == list(range(1, 19))
    for step in steps:
        assert list(step) == [
            "learner", "step", "updates", "epoch", "loss", "loss_scale", "overflow", "skipped", "grad_norm", "lr",
        ]  # fmt: skip


def test_evaluation_leaves_the_buffers_and_the_random_numbers_of_training_alone(tmp_path):
    loop = loop_of(tmp_path, *TINY, "train.epochs=1")
    model = loop.parts.model
    counter = torch.zeros(1)
    model.register_buffer("batches_seen", counter)
    loop.parts.plan.guard.__init__(model)
    model.register_forward_hook(lambda m, args, out: m.batches_seen.add_(1) and None)
    before = torch.get_rng_state()
    loop._validation.run("val", 0, loop._move_on, intervals=False)
    assert model.batches_seen.item() == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_saved_values_that_another_precision_cannot_hold_are_clamped_and_named(tmp_path):
    state = half = None
    for precision in ("fp32", "fp16_dynamic"):
        loop = loop_of(tmp_path, *TINY, f"precision={precision}")
        first = next(module for module in loop.parts.model.modules() if isinstance(module, nn.Linear))
        first.register_buffer("offset", torch.tensor([1e5, -float("inf")]).to(first.weight.dtype))
        if state is None:
            first.weight.data[0, :3] = -7e4
            state = take_snapshot(loop.parts, loop.telemetry.step_log, loop.progress)
        else:
            half = first
            first.offset.zero_()
            notes = loop.checkpointing.restore(state, forgive=False)
    assert any(note.startswith("4 values in weights and buffers are beyond 65504") for note in notes), notes
    assert half.weight[0, :3].tolist() == [-65504] * 3
    assert half.offset.tolist() == [65504, -float("inf")]


@pytest.mark.long
def test_a_network_that_asks_for_the_version_of_its_weights_goes_on(tmp_path):
    words = (
        *("model=torchvision", "model.name=mnasnet0_5", "dataset.image_size=32", "dataset.train_samples=16"),
        *("train.batch_size=8", "train.epochs=1", "checkpoint.every_epochs=null", "checkpoint.every_steps=1"),
    )
    whole, resumed = whole_and_resumed(tmp_path, *words, after=1)
    assert steps_of(resumed) == steps_of(whole)


class Drawing(nn.Module):
    """A network that draws from every generator of a process in its forward pass."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images):
        drawn = torch.rand(()) + random.random() + np.random.rand() + np.random.randn()
        return self.head(images.flatten(1)) * drawn


def test_every_generator_is_seeded_saved_and_left_alone_by_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("mptrain.run.build.parts.build_model", lambda *_: Drawing())

    def losses(root):
        np.random.seed(len(str(root)))  # whatever the process has drawn before
        whole, resumed = whole_and_resumed(root, *TINY, after=7)
        return [[step["loss"] for step in steps_of(loop)] for loop in (whole, resumed)]

    one, other = losses(tmp_path / "a"), losses(tmp_path / "other")
    assert one[0] == one[1] == other[0] == other[1]
    assert len(one[0]) == 18
