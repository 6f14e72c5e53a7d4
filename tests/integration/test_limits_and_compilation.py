"""A run ends when its time is up, in order; compiled models train to the same records when they are resumed."""

from __future__ import annotations

import shutil

import pytest
import torch

from mptrain.config.compose import compose
from mptrain.run.build.parts import build
from mptrain.system.errors import EnvironmentRefused
from mptrain.system.records import EpochRecord
from mptrain.workloads.classification.task import Classify
from tests.small_runs import TINY, Kept, continue_loop, loop_of, run_in_process, steps_of


class TestMaxMinutes:
    def test_the_run_ends_with_an_evaluation_and_a_checkpoint(self, tmp_path):
        kept = Kept()
        loop = loop_of(tmp_path, *TINY, "train.epochs=100000", "train.max_minutes=0.003", kept=kept)
        summary = loop.run()
        loop.require_success()
        assert 0.18 <= summary["train_seconds"] < 10
        assert 0 < summary["steps"] < 600000
        assert summary["test"] is not None
        assert kept.of(EpochRecord)[-1].step == summary["steps"]
        assert loop.storage.store.load_latest().manifest.step == summary["steps"]

    def test_a_longer_limit_goes_on_where_it_ended(self, tmp_path):
        words = (*TINY, "train.epochs=2000", "train.max_minutes=0.003")
        first = loop_of(tmp_path, *words)
        first.run()
        steps = first.progress.step
        second = continue_loop(first, *words[:-1], f"train.max_steps={steps + 3}")
        second.run()
        assert [step["step"] for step in steps_of(second)] == list(range(1, steps + 4))

    def test_the_command_line_says_done(self, tmp_path):
        done = run_in_process(*TINY, "train.epochs=100000", "train.max_minutes=0.003", "run.name=r", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "mptrain resume outputs/r train.max_minutes=0.006\n" in done.stdout


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


class TestCompile:
    def test_products_that_are_widened_cannot_be_compiled_and_the_refusal_says_what_can(self):
        with pytest.raises(EnvironmentRefused, match=r"cannot be compiled") as caught:
            build(compose([*TINY, "precision=amp_dynamic", "precision.cpu_kernels=upcast", "train.compile=true"]))
        assert "precision=fp32" in caught.value.hint

    @pytest.mark.filterwarnings("ignore")  # the compiler's own
    def test_a_compiled_model_trains_and_its_first_step_is_compiled_too(self, tmp_path, monkeypatch):
        compiling, really = [], Classify.loss
        compiler = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda *a, **k: compiler(*a, **{**k, "backend": "eager"})
        )  # takes seconds less
        monkeypatch.setattr(
            Classify, "loss", lambda *a: compiling.append(a[1]._compiled_call_impl is not None) or really(*a)
        )
        words = (*TINY, "precision=fp32", "train.epochs=1", "dataset.train_samples=40", "dataset.val_samples=8")
        plain, compiled = loop_of(tmp_path, *words), loop_of(tmp_path, *words, "train.compile=true")
        for loop in (plain, compiled):
            del loop.parts.loaders["val"], loop.parts.loaders["test"]
            compiling.clear()
            loop.run()
        assert compiling == [False, True, True, True]  # the rehearsal, and three steps
        for one, other in zip(steps_of(plain), steps_of(compiled), strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        torch.testing.assert_close(
            dict(compiled.parts.model.named_parameters()),
            dict(plain.parts.model.named_parameters()),
            rtol=1e-3,
            atol=1e-5,
        )

    @needs_compiler
    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        ("words", "steps", "broken"),
        [
            (("model=cnn", "model.widths=[8,16]", "dataset.train_samples=72"), 12, 5),
            (
                ("model=dcgan", "dataset.image_size=8", "model.width=4", "model.latent=4", "dataset.train_samples=112"),
                6,
                1,
            ),
        ],
        ids=["cnn", "gan"],
    )
    def test_a_resumed_compiled_run_has_the_records_of_another(self, tmp_path, words, steps, broken):
        words = (*words, "precision=fp32", "train.compile=true", "schedule=constant")
        whole = loop_of(tmp_path, *words, f"train.max_steps={steps}")
        whole.run()
        first = loop_of(tmp_path, *words, f"train.max_steps={broken}")
        first.run()
        torch._dynamo.reset()  # as a new process
        second = continue_loop(first, *words, f"train.max_steps={steps}")
        second.run()
        assert {step["step"] for step in steps_of(second)} == {*range(1, steps + 1)}
        assert steps_of(second) == steps_of(whole)
