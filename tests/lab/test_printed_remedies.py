"""What doctor and diagnose print as a remedy trains as FP32 does: each as the command that it is."""

from __future__ import annotations

import functools
import math
import re
import tempfile
from pathlib import Path

import pytest

from mptrain.system.errors import NumericsError
from tests.faulty_networks import FAULTS, INPUTS, with_fault
from tests.small_runs import loop_of, run_in_process, steps_of

SMALL = ("dataset.train_samples=64", "train.batch_size=16")
MORE = ("train.max_steps=100", "checkpoint.every_epochs=null", "optimizer=sgd", "optimizer.lr=0.05")
SEEDS = range(3)


def printed(command, cwd, *words):
    """The overrides that a command prints to train with."""
    done = run_in_process(command, *words, cwd=cwd)
    assert done.returncode in (0, 3, 4), done.stderr
    said = re.sub(r"\s+", " ", done.stdout)
    pattern = (
        r"(?:or|hint:) set ((?:\S+=\S+ ?)+)" if command == "doctor" else r"to train with the fix, add ((?:\S+=\S+ ?)+)"
    )
    found = {tuple(one.replace("'", "").rstrip(", ").split()) for one in re.findall(pattern, said)}
    return found | {
        (f"precision.keep_fp32=[norms,{one}]",) for one in re.findall(r"add (\S+) to precision", done.stderr)
    }


def losses(*words):
    """The mean loss of the last steps of a run with each seed; inf where it ends as one whose numerics fail."""
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            loop = loop_of(Path(folder), *MORE, *words, f"seed={seed}")
            try:
                loop.run()
                loop.require_success()
            except NumericsError:
                found.append(math.inf)
                continue
            last = [step["loss"] for step in steps_of(loop)][-8:]
            found.append(sum(last) / len(last))
    return found


of_fp32 = functools.cache(losses)


def check(words, precision, tmp_path):
    """No remedy trains worse than FP32 does by more than FP32 itself differs between seeds."""
    words = (*SMALL, *words)
    remedies = {one for command in ("doctor", "diagnose") for one in printed(command, tmp_path, *words, precision)}
    for remedy in sorted(remedies):
        right, mended = of_fp32(*words, "precision=fp32"), losses(*words, precision, *remedy)
        if math.inf in right:
            assert math.inf in mended, (remedy, right, mended)
            continue
        spread = max(right) - min(right)
        assert sum(mended) / len(mended) <= sum(right) / len(right) + spread, (remedy, right, mended)
    return remedies


@pytest.mark.long
@pytest.mark.parametrize("name", ["rms_norm", "clip_in_half"])
def test_a_remedy_that_is_printed_trains_as_fp32_does(name, tmp_path):
    assert check(with_fault(name), "precision=fp16_dynamic", tmp_path)


def words_of(name):
    adaptive = ("optimizer=adamw", "optimizer.lr=0.003")  # no matter how large the loss is
    return (*INPUTS[name], *adaptive) if name == "summed_loss" else INPUTS[name]


@pytest.mark.workload
@pytest.mark.parametrize("name", INPUTS)
def test_small_inputs_as_people_have_them_get_a_remedy_that_trains(name, tmp_path):
    assert check(words_of(name), "precision=fp16_dynamic", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["amp_dynamic", "bf16", "bf16_pure"])
@pytest.mark.parametrize("name", INPUTS)
def test_small_inputs_get_a_remedy_that_trains_in_every_precision(name, precision, tmp_path):
    check(words_of(name), f"precision={precision}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16_dynamic", "bf16_pure"])
@pytest.mark.parametrize("name", FAULTS)
def test_every_remedy_that_is_printed_trains_as_fp32_does(name, precision, tmp_path):
    check(with_fault(name), f"precision={precision}", tmp_path)
