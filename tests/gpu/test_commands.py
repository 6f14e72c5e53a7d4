"""Whole commands on a CUDA device, as a user types them: train, resume, sweep, judge, compile, and ranks with NCCL."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch

import mptrain
from mptrain.runlog import read_run
from tests.lab.test_loop_checks import loss_of, small
from tests.small_runs import TINY, command, environment, run_command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]

MODES = ["fp32", "tf32", "amp_dynamic", "amp_static", "amp_bf16", "fp16_dynamic", "fp16_static", "fp16_pure", "bf16"]
NAME = torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def trained(folder, *words, name="run"):
    done = run_command(*words, f"run.name={name}", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(folder / "outputs" / name)
    assert NAME in run.state.device
    return run


@pytest.mark.parametrize("precision", MODES)
def test_the_default_command_learns_in_every_precision_and_commands_read_its_run(tmp_path, precision):
    run = trained(tmp_path, "train.epochs=3", f"precision={precision}", "diagnostics=histograms", "diagnostics.every=5")
    assert run.summary["metric"] > 0.93
    losses = [one.loss for one in run.steps() if not one.skipped]
    assert losses[-1] < 0.5 * losses[0]
    for name in ("report", "recommend", "diagnose", "eval", "replay"):
        done = run_command(name, "outputs/run", cwd=tmp_path)
        codes = (0, 6) if name == "recommend" else (0,)  # 6: too few steps to be sure
        assert done.returncode in codes, name + done.stdout + done.stderr
        assert not done.stderr, name


def test_the_network_of_the_first_page_trains_in_less_memory(tmp_path):
    words = ("model=resnet50", "dataset=synthetic", "dataset.image_size=64", "dataset.train_samples=1280", "train.batch_size=64",
             "train.epochs=1", "checkpoint.every_epochs=null")  # fmt: skip
    half = trained(tmp_path, *words, "precision=amp_dynamic", name="half")
    full = trained(tmp_path, *words, "precision=fp32", name="full")
    assert half.summary["peak_memory"] < 0.75 * full.summary["peak_memory"]
    assert len([*half.steps()]) == len([*full.steps()]) == 20
    assert all(one.loss < 20 for one in half.steps())


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic", "amp_bf16"])
def test_a_compiled_run_trains_like_one_that_is_not(tmp_path, precision):
    words = ("train.epochs=2", f"precision={precision}")
    eager = trained(tmp_path, *words, name="eager")
    compiled = trained(tmp_path, *words, "train.compile=true", name="compiled")
    assert compiled.summary["metric"] == pytest.approx(eager.summary["metric"], abs=0.04)


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=torch", "optimizer.name=AdamW"),
        ("optimizer=torch", "optimizer.name=AdamW", "+optimizer.foreach=true"),
        ("optimizer=torch", "optimizer.name=SGD", "+optimizer.momentum=0.9"),
        ("optimizer=adam", "train.ema_decay=0.9", "train.accumulate=2"),
        ("train.engine=graph",),
        ("train.deterministic=true",),
        ("train.cudnn_benchmark=true", "train.channels_last=false"),
        ("scaler=torch",),
        ("model=mlp", "train.engine=graph", "optimizer=adamw"),
    ],
    ids=" ".join,
)
def test_options_of_the_first_pages_train(tmp_path, words):
    run = trained(tmp_path, "train.epochs=2", "precision=amp_dynamic", *words)
    assert run.summary["metric"] > 0.5


def test_a_sweep_of_jobs_that_share_one_device_is_compared(tmp_path):
    words = ("-m", *TINY, "precision=amp_dynamic,fp32", "seed=range(3)", "run.root=outputs/sweep")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = run_command("compare", "outputs/sweep", cwd=tmp_path)
    assert found.returncode in (0, 1), found.stdout + found.stderr
    assert "Traceback" not in found.stderr


def test_an_overflow_is_diagnosed_with_the_operator(tmp_path):
    words = (*TINY, "precision=fp16_static", "scaler.scale=16777216", "train.max_steps=4", "run.name=run")
    assert run_command(*words, cwd=tmp_path).returncode == 4  # no update was applied
    done = run_command("diagnose", "outputs/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a cast in the backward pass of the loss returns inf in float16 at loss scale 2^24" in " ".join(
        done.stdout.split()
    )
    assert "helps: a dynamic loss scale" in done.stdout


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path):
    words = (*TINY, "train.epochs=60", "checkpoint.every_steps=20", "precision=amp_dynamic", "model.dropout=0.1")
    whole = trained(tmp_path, *words, name="whole")
    again = (*words, "run.name=broken", "run.resume=auto")
    process = subprocess.Popen(command(*again), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    steps = tmp_path / "outputs" / "broken" / "steps.jsonl"
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end and not (steps.exists() and steps.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    done = run_command(*again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [*read_run(tmp_path / "outputs" / "broken").steps()] == [*whole.steps()]


@pytest.mark.parametrize("distributed", ["ddp", "fsdp2"])
def test_one_rank_with_nccl_trains_like_none(tmp_path, distributed):
    words = (*TINY, "precision=amp_dynamic", f"distributed={distributed}")
    alone = trained(tmp_path, *words, name="alone")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run([*launcher, "-m", "mptrain", *words, "run.name=ranks"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = read_run(tmp_path / "outputs" / "ranks")
    assert [one.loss for one in ranks.steps()] == pytest.approx([one.loss for one in alone.steps()], rel=1e-2)


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic", "bf16"])
def test_the_doctor_knows_a_sound_network(tmp_path, precision):
    done = run_command("doctor", "model=cnn", f"precision={precision}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_doctor_of_a_loop_on_the_device():
    model, batch = small()
    found = mptrain.doctor(model.cuda(), loss_of, tuple(one.cuda() for one in batch), "amp_dynamic")
    assert not found.findings
