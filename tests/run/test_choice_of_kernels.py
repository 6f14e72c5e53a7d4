"""Keys that choose torch's kernels, and errors that only kernels raise: named in one line, with what to do."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.system.errors import ConfigError
from tests.small_runs import TINY, loop_of, run_in_process, steps_of

WORDS = ("model=mlp", "model.hidden=[16]", "dataset.train_samples=64", "train.epochs=1", "run.name=run")


@pytest.fixture(autouse=True)
def _settings_of_the_process_end_with_the_test(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


class Putting(nn.Module):
    """Calls an operator that torch counts as not deterministic, always or in evaluation only."""

    def __init__(self, classes, *, always):
        super().__init__()
        self.last, self.always = nn.Linear(64, classes), always

    def forward(self, images):
        if self.always or not self.training:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        return self.last(images.flatten(1))


def test_torch_keeps_its_settings_unless_a_key_is_given(tmp_path):
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    loop_of(tmp_path / "none", *TINY)
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == (True, True)
    loop_of(tmp_path / "false", *TINY, "train.deterministic=false", "train.cudnn_benchmark=false")
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == (False, False)
    loop_of(tmp_path / "timed", *TINY, "train.cudnn_benchmark=true")
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_a_deterministic_run_has_the_numbers_of_another_on_a_cpu(tmp_path, precision):
    """torch fills new memory with NaN in it: no number may come from memory that was not written."""
    words = (*TINY, f"precision={precision}", "optimizer=adamw", "train.ema_decay=0.9", "train.accumulate=2")
    plain = loop_of(tmp_path / "plain", *words)
    plain.run()
    deterministic = loop_of(tmp_path / "deterministic", *words, "train.deterministic=true")
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    deterministic.run()
    assert steps_of(plain) == steps_of(deterministic)


def test_the_users_workspace_of_cublas_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    loop_of(tmp_path, *TINY, "train.deterministic=true")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_timing_convolutions_is_not_deterministic():
    with pytest.raises(ConfigError, match=r"train\.deterministic=true with train\.cudnn_benchmark=true, which"):
        compose([*WORDS, "train.deterministic=true", "train.cudnn_benchmark=true"])


@pytest.mark.parametrize("always", [True, False], ids=["in the first batch", "in evaluation"])
def test_an_operator_that_is_not_deterministic_is_refused_by_name(tmp_path, monkeypatch, always):
    def putting(config, dataset):
        return Putting(dataset.facts()["num_classes"], always=always)

    monkeypatch.setattr("mptrain.run.build.parts.build_model", putting)
    ended = run_in_process(*WORDS, "train.deterministic=true", cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    assert "train.deterministic=true: put_ of torch may give other bits each time" in ended.stderr
    assert "hint: set train.deterministic=false" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert run_in_process(*WORDS, "run.name=other", cwd=tmp_path).returncode == 0


def settings():
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads()


@pytest.mark.long
def test_settings_of_one_command_do_not_reach_the_next_in_the_same_process(tmp_path):
    before = settings()
    words = ("train.deterministic=true", f"threads={before[2] + 1}")
    for command in (
        WORDS,
        ("resume", "run", "train.epochs=2", *words),
        ("eval", "run"),  # the keys are in the run's own configuration now
        ("diagnose", "run"),
        ("diagnose", *WORDS[:-1], *words),
        ("doctor", *WORDS[:-1], *words),
    ):
        ended = run_in_process(*command, *(words if command is WORDS else ()), cwd=tmp_path)
        assert ended.returncode == 0, (command, ended.stderr)
        assert settings() == before, command
    run_in_process(*WORDS[:-1], "train.cudnn_benchmark=true", cwd=tmp_path)
    assert settings() == before


@pytest.mark.parametrize("place", ["mptrain.engine.rehearsal", "mptrain.engine.step"])
@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
def test_an_index_out_of_range_on_a_device_is_an_error_about_data(tmp_path, monkeypatch, place, kind):
    def failing(*given):
        raise kind("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(f"{place}.accumulate_gradients", failing)
    ended = run_in_process(*WORDS, cwd=tmp_path)
    assert ended.returncode == 6, ended.stderr
    assert "device-side assert): usually an index is out of range, such as a label beyond the number" in ended.stderr
    assert "hint: device=cpu names the operator" in ended.stderr
    assert "Traceback" not in ended.stderr
    state = json.loads((tmp_path / "outputs/run/run.json").read_text())
    assert (state["status"], state["exit_code"]) == ("failed", 6)
