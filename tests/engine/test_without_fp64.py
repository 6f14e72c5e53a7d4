"""Runs on a CPU that is taken to have no FP64, no fused optimizers, no graphs, page-locked memory or streams: as MPS is."""

from __future__ import annotations

import math

import pytest
import torch

from tests.capability import NoFP64, without
from tests.small_runs import TINY, continue_loop, interrupt_after, loop_of, steps_of, whole_and_resumed

#: Files of mptrain whose tensors are in host memory on any device: samples and their order, and what the host has read.
HOST = ("/mptrain/workloads/", "/mptrain/engine/sample_metrics.py")
#: Largest relative difference of a loss; sixteen times that of a gradient's norm. Measured: 1e-7 in FP32 and amp_bf16, 4e-6 of a
#: loss and 2e-5 of a norm in FP16, where a weight that rounds to its neighbour moves by 2^-11.
BOUNDS = {"fp32": 2.0**-20, "amp_dynamic": 2.0**-14, "fp16_dynamic": 2.0**-14, "amp_bf16": 2.0**-12}

RUNS = {
    "fp32 adamw": ("precision=fp32", "optimizer=adamw"),
    "amp_bf16 adamw": ("precision=amp_bf16", "optimizer=adamw", "train.clip_norm=0.5"),
    "amp_dynamic sgd": ("precision=amp_dynamic", "optimizer=sgd", "scaler.growth_interval=3"),
    "fp16_dynamic sgd": ("precision=fp16_dynamic", "optimizer=sgd", "scaler.init_scale=16777216", "train.clip_norm=0.5"),
    "fp16_dynamic adagrad": ("precision=fp16_dynamic", "optimizer=adagrad", "scaler.hysteresis=2"),
    "logmax": ("precision=fp16_dynamic", "scaler=logmax"),
    "smooth": ("precision=fp16_dynamic", "scaler=smooth"),
    "fairseq": ("precision=fp16_dynamic", "scaler=fairseq", "scaler.init_scale=16777216"),
    "als": ("precision=fp16_dynamic", "scaler=als"),
}  # fmt: skip


def bound_of(words):
    return BOUNDS[next(word for word in words if word.startswith("precision="))[len("precision=") :]]


def agree(one, other, bound):
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        assert (mine["overflow"], mine["updates"]) == (theirs["overflow"], theirs["updates"])
        assert math.isclose(mine["loss_scale"], theirs["loss_scale"], rel_tol=2.0**-7)
        assert math.isclose(mine["loss"], theirs["loss"], rel_tol=bound)
        if not mine["overflow"]:
            assert math.isclose(mine["grad_norm"], theirs["grad_norm"], rel_tol=16 * bound)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_device_without_fp64_trains_to_the_same_losses_within_rounding(tmp_path, name):
    words = (*TINY, "train.max_steps=12", *RUNS[name])
    usual = loop_of(tmp_path / "usual", *words)
    usual.run()
    with without(fp64=False, fused=False), NoFP64(HOST) as mode:
        lacking = loop_of(tmp_path / "lacking", *words)
        lacking.run()
    assert mode.seen > 100
    agree(steps_of(usual), steps_of(lacking), bound_of(RUNS[name]))
    if "scaler.init_scale=16777216" in words:
        assert {step["overflow"] for step in steps_of(lacking)} == {True, False}
    states = [learner.scale_state.values() for learner in lacking.parts.learners]
    assert all(value.dtype != torch.float64 for state in states for value in state)


@pytest.mark.parametrize(
    "model",
    [
        "dcgan",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("char_lstm", "edsr_small", "dncnn_small", "seq2seq_small")
        ),
    ],
)
def test_other_tasks_train_and_are_evaluated_without_fp64(tmp_path, model):
    on_host = (
        "/mptrain/workloads/enhancement/task.py",
        "/mptrain/workloads/translation/task",
        *HOST,
    )  # what was measured in host memory
    with without(fp64=False, fused=False), NoFP64(on_host):
        loop = loop_of(tmp_path, f"model={model}", "train.max_steps=2")
        loop.run()
    assert all(math.isfinite(step["loss"]) for step in steps_of(loop))


@pytest.mark.parametrize("name", ["fp16_dynamic sgd", "logmax"])
def test_a_run_without_fp64_is_resumed_bit_for_bit(tmp_path, name):
    words = (*TINY, "train.max_steps=12", *RUNS[name])
    with without(fp64=False, fused=False), NoFP64(HOST):
        whole, resumed = whole_and_resumed(tmp_path, *words, after=5)
    assert steps_of(whole) == steps_of(resumed)


def test_a_run_goes_on_on_a_device_without_fp64(tmp_path):
    words = (*TINY, "train.max_steps=12", *RUNS["logmax"])
    whole = loop_of(tmp_path / "whole", *words)
    whole.run()
    broken = loop_of(tmp_path / "broken", *words)
    interrupt_after(broken, 5)
    with without(fp64=False, fused=False), NoFP64(("/mptrain/scaler/base.py", "/mptrain/runlog/", *HOST)):
        resumed = continue_loop(broken, *words)
        resumed.run()
    agree(steps_of(whole), steps_of(resumed), BOUNDS["fp16_dynamic"])


def test_the_mode_notices_a_tensor_of_fp64(monkeypatch, tmp_path):
    """So that the runs above cannot pass by accident."""
    monkeypatch.setattr(
        "mptrain.numerics.overflow_check.gradient_norms", lambda grads: [grad.double().norm() for grad in grads]
    )
    with without(fp64=False), NoFP64(HOST), pytest.raises(TypeError, match="no float64"):
        loop_of(tmp_path, *TINY).run()
