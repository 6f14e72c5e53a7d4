"""An evaluation that is not finite is found by doctor and diagnose, with its module, although training is finite."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_config
from mptrain.lab.doctor.check import check_scaling
from tests import faulty_networks
from tests.small_runs import run_in_process

SMALL = ("train.batch_size=16", "dataset.train_samples=64")


class Scores(nn.Module):
    """Divides by a statistic that evaluation alone takes: zero by zero."""

    def forward(self, given):
        return given if self.training else given * ((given - given).sum() / (given - given).abs().sum())


class Calibrates(nn.Module):
    """Multiplies in evaluation by a number beyond the range of FP16, and takes it away again."""

    def forward(self, given):
        return given if self.training else given * 3e6 - given * (3e6 - 1)


@pytest.fixture(params=[Scores, Calibrates])
def words(request, words_of):
    return words_of(
        lambda: nn.Sequential(nn.Tanh(), request.param()), "dataset.train_samples=64"
    ), request.param is Scores


def test_both_name_the_module_and_try_evaluation_in_fp32(words):
    words, everywhere = words
    config = compose((*words, "precision=fp16_dynamic"))
    (found,) = check_scaling(config, lambda _: None).findings
    assert (found.kind, found.where) == ("evaluation", ("odd.1",))
    assert ("precision.eval=fp32" in found.hint) is not everywhere
    assert ("in FP32 too" in found.what) is everywhere
    diagnosis = diagnose_config(config).examination
    assert (diagnosis.cause, diagnosis.module, diagnosis.verdict) == ("evaluation", "odd.1", found.what)
    (remedy,) = diagnosis.remedies
    assert (remedy.words, remedy.helped) == (((), None) if everywhere else (("precision.eval=fp32",), True))


def test_the_remedy_is_right(words):
    words, everywhere = words
    report = check_scaling(compose((*words, "precision=fp16_dynamic", "precision.eval=fp32")), lambda _: None)
    assert bool(report.findings) is everywhere


def test_a_run_in_fp32_is_not_said_to_have_diverged_nor_compared_with_fp32(words, tmp_path):
    words, everywhere = words
    done = run_in_process(*words, "precision=fp32", "train.max_steps=3", "run.name=r", cwd=tmp_path)
    assert done.returncode == (4 if everywhere else 0)
    if everywhere:
        assert "the last loss on val is nan, although no training step overflowed unexpectedly" in done.stderr
        assert "diverged" not in done.stderr
        assert "precision=fp32" not in done.stderr
        said = run_in_process(
            "diagnose", str(Path("outputs/r")), "extensions.allow=[tests.faulty_networks]", cwd=tmp_path
        )
        assert "An evaluation of one batch gives loss=nan, although the training step is finite" in said.stdout


def test_the_arithmetic_of_the_task_in_evaluation_is_examined_too():
    words = (*faulty_networks.with_fault("none"), *SMALL, "task._target_=tests.faulty_networks.LogarithmInEvaluation")
    (found,) = check_scaling(compose((*words, "precision=bf16")), lambda _: None).findings
    assert (found.kind, found.operator) == ("evaluation", "log")


def test_statistics_that_training_has_yet_to_take_are_no_fault():
    """Before the first step the norm of raw inputs lets them through as they are, and FP16 cannot hold them."""
    words = (*faulty_networks.INPUTS["raw_columns"], *SMALL)
    report = check_scaling(compose((*words, "precision=amp_dynamic")), lambda _: None)
    assert "evaluation" not in {one.kind for one in report.findings}
    assert diagnose_config(compose((*words, "precision=amp_dynamic"))).examination.cause == "none"
