"""A job of a sweep, forked from a warm server, trains bit for bit like the same command in a fresh process."""

from __future__ import annotations

import pytest
from small_runs import run_command

pytestmark = pytest.mark.process

WORDS = (
    "model=cnn", "precision=fp16_dynamic", "scaler.init_scale=16777216", "dataset.image_size=8",
    "dataset.train_samples=160", "train.batch_size=16", "train.epochs=2", "threads=1",
)  # fmt: skip


def test_a_forked_job_and_a_fresh_process_write_the_same_records(tmp_path):
    swept = run_command("-m", *WORDS, "seed=3,4", "run.name=swept", "--jobs", "2", cwd=tmp_path)
    assert swept.returncode == 0, swept.stderr
    for number, seed in enumerate((3, 4)):
        alone = run_command(*WORDS, f"seed={seed}", f"run.name=alone{seed}", cwd=tmp_path)
        assert alone.returncode == 0, alone.stderr
        (job,) = (tmp_path / "outputs" / "swept").glob(f"{number:03d}-*/steps.jsonl")
        expected = (tmp_path / "outputs" / f"alone{seed}" / "steps.jsonl").read_bytes()
        assert expected.count(b"\n") == 20
        assert b'"overflow": true' in expected
        assert job.read_bytes() == expected
