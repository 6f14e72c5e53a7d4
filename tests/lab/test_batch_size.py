"""The largest batch: the search against all sizes, counted memory against other batches."""

from __future__ import annotations

import pytest
import torch

from mptrain.config.compose import compose
from mptrain.engine.rehearsal import rehearse
from mptrain.lab.commands import find
from mptrain.lab.commands.find import largest_batch, largest_that_fits
from mptrain.lab.doctor.check import first_batch
from mptrain.system.errors import ConfigError
from tests.small_runs import TINY, run_in_process


def test_the_search_is_within_3_percent_of_the_largest_and_tries_few_sizes():
    for true in (0, 1, 2, 3, 31, 33, 100, 999, 1200):
        for guess in (1, 7, 500, 5000):
            tried = []
            found = largest_that_fits(
                lambda size, true=true, tried=tried: tried.append(size) or size <= true, guess, 1200
            )
            assert true - true // 32 - 1 < found <= true
            assert (found == 1200) == (true == 1200)
            assert len(tried) < 20
            assert max(tried) <= 1200


@pytest.mark.long
def test_counted_memory_foretells_that_of_another_batch():
    for mode in ("fp32", "amp_dynamic", "fp16_dynamic"):
        words = (
            "model=cnn",
            "dataset.train_samples=96",
            f"precision={mode}",
            "optimizer=torch",
            "optimizer.name=RMSprop",
        )
        found = largest_batch(compose([*words, "train.batch_size=16"]))
        assert not found.tried
        parts, batch = first_batch(compose([*words, "train.batch_size=64"]))
        parts.model.train()
        memory = rehearse(parts, parts.prepare(batch)).memory
        state = sum(one.nbytes for one in parts.model.parameters() if one.dtype == torch.float32)  # or of the copies
        expected = sum(memory.values()) + max(state, memory["master_weights"])
        assert found.fixed + 64 * found.each == pytest.approx(expected, rel=0.03)
        assert found.samples == int((found.memory - found.fixed) / found.each)


def test_sizes_that_run_out_of_memory_do_not_fit_and_other_errors_are_raised(monkeypatch):
    config, real = compose([*TINY, "precision=fp16_dynamic"]), find.train_step

    def step(learner, model, batch, plan):
        if batch.samples > 23:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(learner, model, batch, plan)

    monkeypatch.setattr(find, "train_step", step)
    assert largest_that_fits(lambda size: find._fits(config, size), 16, 100) == 23
    monkeypatch.setattr(find, "train_step", lambda *given: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        find._fits(config, 4)


def test_a_batch_that_is_too_small_to_see_what_a_sample_needs_is_refused():
    with pytest.raises(ConfigError, match="too small to see") as refused:
        largest_batch(compose([*TINY, "train.batch_size=1"]))
    assert "train.batch_size=8" in refused.value.hint


def test_the_command_says_that_nothing_was_tried(tmp_path):
    done = run_in_process("find", "batch", *TINY, "precision=fp16_static", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "counted and not tried" in done.stdout
    assert "\u00d7 the batch of fp32" in done.stdout
    assert not (tmp_path / "outputs").exists()
