"""Optimizers of torch and timm on two ranks: all with replicated weights, those of single elements with sharded ones."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.parallel.test_equal_to_one_rank import BASE, require_same
from tests.several_ranks import trained_alone, trained_by
from tests.small_runs import run_command

TORCH = {name: ["optimizer=torch", f"optimizer.name={name}"] for name in ("RAdam", "NAdam", "Adadelta", "Muon")}
TIMM = {name: ["optimizer=timm", f"optimizer.name={name}"] for name in ("lion", "lamb")}
GROUPS = ["optimizer.groups=[{match: '*.bias', lr_factor: 0.5, weight_decay: 0.1}]", "optimizer.layer_decay=0.5"]
FROZEN = "model.freeze=['1.*']"


CASES = [
    [*TORCH["RAdam"], "precision=fp16_dynamic", "distributed=ddp"],
    [*TIMM["lion"], "precision=fp32", "distributed=fsdp2"],
    [*TORCH["RAdam"], *GROUPS, FROZEN, "precision=fp16_dynamic", "distributed=fsdp2", "train.ema_decay=0.9"],
    ["optimizer=sgd", *GROUPS, FROZEN, "precision=fp16_dynamic", "distributed=ddp"],
]
OTHERS = [
    *([*words, "precision=fp32", "distributed=ddp"] for words in {**TORCH, **TIMM}.values()),
    [*TORCH["Muon"], "precision=fp16_dynamic", "distributed=ddp"],
    *([*TORCH[name], "precision=fp32", "distributed=fsdp2"] for name in ("RAdam", "NAdam", "Adadelta")),
    ["optimizer=adamw", *GROUPS, FROZEN, "precision=amp_dynamic", "distributed=fsdp2"],
]


@pytest.mark.distributed
@pytest.mark.parametrize("cases", [CASES, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_two_ranks_equal_one(cases):
    cases = [[*BASE, *words] for words in cases]
    for case, answers in zip(cases, trained_by(2, *cases, timeout=280), strict=True):
        signs = any(name in case for name in ("optimizer.name=lion", "optimizer.name=Muon"))  # which magnify roundings
        alone = trained_alone(*(word for word in case if "distributed" not in word), "train.accumulate=2")
        require_same(alone, answers, tolerance=1e-3 if signs else 1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_a_run_on_two_ranks_resumes_bit_for_bit_and_on_one(kind, tmp_path):
    """Sharded state is gathered for one rank, and given out again to two."""
    words = [
        *BASE,
        *TORCH["NAdam"],
        "precision=fp16_dynamic",
        "checkpoint.every_steps=9",
        "seed=3",
        f"run.root={tmp_path}",
    ]
    both = [f"distributed={kind}", "distributed.procs=2"]
    done = run_command(*words, *both, "run.name=whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    half = run_command(*words, *both, "run.name=half2", "train.max_steps=10", cwd=tmp_path)
    assert half.returncode == 0, half.stderr
    shutil.copytree(tmp_path / "half2", tmp_path / "half1")
    for ranks in (2, 1):
        rest = run_command(
            "resume", str(tmp_path / f"half{ranks}"), "train.max_steps=null", f"distributed.procs={ranks}", cwd=tmp_path
        )
        assert rest.returncode == 0, rest.stderr
        assert "reset" not in rest.stdout
        steps, whole = (losses(tmp_path / one) for one in (f"half{ranks}", "whole"))
        assert len(steps) == len(whole)
        assert steps == (whole if ranks == 2 else pytest.approx(whole, rel=1e-4))


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "steps.jsonl").read_text().splitlines()]
