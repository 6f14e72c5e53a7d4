"""`mptrain.train` raises and never exits, leaves everything of its caller as it was, and takes data and callbacks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import mptrain
from mptrain.system.errors import ConfigError, DataError, Preempted, UsageError
from mptrain.system.records import EpochRecord, StepRecord
from tests.small_runs import TINY, environment, run_in_process

NAMED = (*TINY, "run.name=run", "threads=1", "train.deterministic=true")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Callback:
    def __init__(self, at=0, act=lambda: None):
        self.records, self.closed, self.at, self.act = [], 0, at, act

    def take(self, record):
        self.records.append(record)
        if isinstance(record, StepRecord) and record.step == self.at:
            self.act()

    def close(self):
        self.closed += 1


def state():
    """Everything of the process that a run may set."""
    cuda, cudnn, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mha
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "sums": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "products": (cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        "attention": (mha.get_fastpath_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "handlers": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)],
        "folder": Path.cwd(),
        "variables": dict(os.environ),
        "warnings": list(warnings.filters),
    }


def test_a_run_is_that_of_the_command_line_and_nothing_else_changes(tmp_path, capsys):
    before = state()
    run = mptrain.train(*NAMED, "precision=amp_dynamic")
    assert state() == before
    assert "run.name" not in capsys.readouterr().err
    (tmp_path / "line").mkdir()
    done = run_in_process(*NAMED, "precision=amp_dynamic", cwd=tmp_path / "line")
    assert done.returncode == 0
    other = mptrain.open_run(tmp_path / "line/outputs/run")
    assert [one.loss for one in run.steps()] == [one.loss for one in other.steps()]
    assert (run.summary["top1" if "top1" in run.summary else "metric"]) == other.summary["metric"]


def test_callbacks_get_the_records_and_nothing_is_printed_unless_asked_for(capsys):
    callback = Callback()
    run = mptrain.train(*NAMED, callbacks=[callback], show=False)
    assert capsys.readouterr().out == ""
    steps = [one for one in callback.records if isinstance(one, StepRecord)]
    assert [one.loss for one in steps] == [one.loss for one in run.steps()]
    assert sum(isinstance(one, EpochRecord) for one in callback.records) == 3
    assert callback.closed >= 1


def test_an_interrupt_saves_and_the_same_call_goes_on(capsys):
    whole = mptrain.train(*NAMED, "run.name=whole", show=False)
    before = state()
    stop = Callback(7, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Preempted, match="after step"):
        mptrain.train(*NAMED, callbacks=[stop], show=False)
    assert state() == before
    run = mptrain.train(*NAMED, "run.resume=auto", show=False)
    assert [one.loss for one in run.steps()] == [one.loss for one in whole.steps()]


@pytest.mark.parametrize(
    ("words", "more", "error", "said"),
    [
        (("modl=cnn",), {}, ConfigError, "modl"),
        (("train.epochs=-1",), {}, ConfigError, "train.epochs"),
        (("distributed.procs=2",), {}, ConfigError, "from Python a run has one process"),
        (("dataset=digits",), {"data": [1]}, UsageError, "dataset=digits has no effect beside data="),
        ((), {"data": 3}, UsageError, "data is an int: it has no samples that a run could take"),
        ((), {"callbacks": Callback()}, UsageError, "callbacks is no list of sinks"),
        ((), {"callbacks": [Callback]}, UsageError, "callbacks is no list of sinks"),
        (("extensions.sinks=[os.system]",), {}, ConfigError, "is not in an allowed package"),
        (("dataset=from_python",), {}, DataError, "the data are in a Python program"),
    ],
)
def test_what_is_wrong_is_raised(words, more, error, said, tmp_path):
    before = state()
    with pytest.raises(error, match=said):
        mptrain.train(*words, **more, show=False)
    assert state() == before
    assert not (tmp_path / "outputs").exists()


def test_a_run_that_fails_says_why_in_its_directory():
    before = state()
    with pytest.raises(mptrain.MptrainError, match=r"not finite|non-finite|diverged"):
        mptrain.train(*NAMED, "precision=fp32", "optimizer.lr=1e30", "run.name=bad", show=False)
    assert state() == before
    assert mptrain.open_run("bad").state.status == "failed"


def pairs(count, seed):
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, 8, 8, generator=draws)
    return torch.utils.data.TensorDataset(inputs, (inputs.mean((1, 2, 3)) > 0).long())


def test_datasets_of_torch_are_trained_on_and_resumed_from(tmp_path):
    data = (pairs(96, 0), pairs(32, 1), pairs(32, 2))
    words = ("model=cnn", "train.batch_size=16", "train.epochs=2", "run.name=own", "threads=1")
    run = mptrain.train(*words, data=data, show=False)
    assert run.summary["metric_name"] == "top1"
    assert run.model()(torch.randn(5, 3, 8, 8)).shape == (5, 2)
    stop = Callback(7, lambda: os.kill(os.getpid(), signal.SIGINT))
    words = (*words[:3], "run.name=cut", "threads=1")
    with pytest.raises(Preempted):
        mptrain.train(*words, data=data, callbacks=[stop], show=False)
    resumed = mptrain.train(*words, "run.resume=auto", data=data, show=False)
    assert [one.loss for one in resumed.steps()] == [one.loss for one in run.steps()]
    done = run_in_process("eval", "own", cwd=tmp_path)
    assert done.returncode == 6
    assert "the data are in a Python program" in done.stderr
    with pytest.raises(DataError, match="it is a text, and the network takes tensors"):
        run.predict("a.png")


def test_classes_of_the_users_configuration_get_the_records(tmp_path, monkeypatch):
    (tmp_path / "my_sinks.py").write_text(
        "def nothing(): return 3\n"
        "class Lines:\n"
        "    def __init__(self): self.file = open('lines', 'w')\n"
        "    def take(self, record): print(type(record).__name__, file=self.file)\n"
        "    def close(self): self.file.close()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("extensions.allow=[my_sinks]", "extensions.sinks=[my_sinks.Lines]")
    mptrain.train(*NAMED, *words, show=False)
    assert (tmp_path / "lines").read_text().count("StepRecord") == 18
    with pytest.raises(ConfigError, match=r"my_sinks\.nothing returned an int without take and close"):
        mptrain.train(*NAMED, words[0], "extensions.sinks=[my_sinks.nothing]", "run.name=odd", show=False)


@pytest.mark.long
def test_parts_and_classes_are_not_guessed(recwarn, capsys):
    one = torch.utils.data.TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 3)
    words = ("model=cnn", "train.batch_size=8", "train.epochs=1", "threads=1")
    run = mptrain.train(*words, data={"train": one, "valid": one}, show=False)
    assert run.summary["metric_split"] == "val"
    with pytest.raises(DataError, match="data has the part 'foo'"):
        mptrain.train(*words, data={"train": one, "foo": one}, show=False)
    shifted = torch.utils.data.TensorDataset(one.tensors[0], one.tensors[1] + 1)
    mptrain.train(*words, data=(shifted, shifted))
    assert "no training sample has class 0 of 4: classes are numbered from 0" in capsys.readouterr().err
    below = torch.utils.data.TensorDataset(one.tensors[0], one.tensors[1] - 1)
    with pytest.raises(DataError, match="a target is -1"):
        mptrain.train(*words, data=(below, one), show=False)


TWO_RUNS = """
import mptrain

for seed in (1, 2):
    run = mptrain.train(*WORDS, f"seed={seed}", f"run.name=run{seed}", show=False)
    print(run.state.status)
"""


@pytest.mark.distributed
def test_a_program_of_torchrun_trains_one_run_after_the_other(tmp_path):
    words = (*TINY, "precision=fp32", "threads=1", "distributed.timeout=30")
    (tmp_path / "two.py").write_text(TWO_RUNS.replace("WORDS", repr(words)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "two.py"]
    done = subprocess.run(
        torchrun, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 4
    losses = [[step.loss for step in mptrain.open_run(tmp_path / f"outputs/run{seed}").steps()] for seed in (1, 2)]
    assert losses[0] != losses[1]
    assert len(losses[0]) == len(losses[1]) == 18
