"""A run that diverges from its learning rate is told from others, with the step and a rate that was tried."""

from __future__ import annotations

import math
import re

import pytest

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import explain_divergence, rises_at
from tests.small_runs import TINY, run_in_process


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.3, 2.2, 1.9, 1.5], None),
        ([2.3, 50.0, 900.0, 2.0], None),  # it came back
        ([2.3, 2.2, math.nan, 1.0], None),
        ([math.inf, 2.0, 1.0], None),
        ([], None),
        ([2.3, 50.0, 2.2, 90.0, 91.0], 4),
        ([2.3, 2.2, 40.0, math.inf, math.nan], 3),
        ([2.3, math.nan], 2),
    ],
)
def test_the_step_after_which_the_loss_never_comes_back_is_found(losses, step):
    assert rises_at(losses) == step


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16_dynamic", "amp_bf16", "fp32"])
def test_a_rate_that_is_too_high_is_named_with_a_lower_one_that_was_tried(precision, tmp_path):
    words = ("model=mlp", "dataset.image_size=8", f"precision={precision}", "train.max_steps=60", "seed=3")
    run_in_process(*words, "optimizer.lr=30", "run.name=r", cwd=tmp_path)
    before = (tmp_path / "outputs/r/config.yaml").read_bytes()
    done = run_in_process("diagnose", "outputs/r", cwd=tmp_path)
    assert (tmp_path / "outputs/r/config.yaml").read_bytes() == before
    said = re.sub(r"\s+", " ", done.stdout)
    assert re.search(
        r"The run diverged because optimizer\.lr=30 is too high, in any precision: the loss was 2\.\d+ at step 1, \S+ at step [2-9],",
        said,
    )
    assert "mptrain resume" not in said
    (fix,) = re.findall(r"to train with the fix, start another run and add (optimizer\.lr=\S+)", said)
    assert run_in_process(*words, fix, cwd=tmp_path).returncode == 0


def test_a_fault_of_the_network_is_no_divergence():
    """A lower rate does not help where FP32 breaks at every rate, and is not needed where FP32 does not break."""
    config = compose((*TINY, "precision=fp16_dynamic"))
    losses = [2.3, 2.2, 2.0, math.nan, math.nan]
    assert explain_divergence(config, losses) is None
    assert explain_divergence(compose((*TINY, "precision=fp16_dynamic", "inject.step=4")), losses) is None


def test_a_divergence_after_many_steps_is_said_and_not_tried(tmp_path):
    losses = [2.3] * 500 + [1e6] * 20
    found = explain_divergence(compose((*TINY, "precision=fp32")), losses)
    assert (found.step, found.remedy) == (501, None)
    assert found.cause.what == "the loss was 2.3 at step 1, 1e+06 at step 501, and never came back"
