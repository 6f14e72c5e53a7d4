"""What doctor and diagnose print as a remedy trains as FP32 does: each as the command that it is."""

from __future__ import annotations

import re

import pytest
from faulty_networks import FAULTS, with_fault
from small_runs import loop_of, run_in_process, steps_of

SMALL = ("dataset.train_samples=64", "train.batch_size=16")
MORE = ("train.max_steps=150", "checkpoint.every_epochs=null", "optimizer=sgd", "optimizer.lr=0.05")


def printed(command, cwd, *words):
    """The overrides that a command prints to train with."""
    done = run_in_process(command, *words, cwd=cwd)
    assert done.returncode in (0, 4), done.stderr
    said = re.sub(r"\s+", " ", done.stdout)
    pattern = r"or set (\S+=\S+)" if command == "doctor" else r"to train with the fix, add ((?:\S+=\S+ ?)+)"
    return {tuple(one.replace("'", "").split()) for one in re.findall(pattern, said)}


def trained(root, *words):
    loop = loop_of(root, *words)
    loop.run()
    last = [step["loss"] for step in steps_of(loop)][-8:]
    return sum(last) / len(last)


def check(name, precision, tmp_path):
    words = (*SMALL, *with_fault(name))
    remedies = {one for command in ("doctor", "diagnose") for one in printed(command, tmp_path, *words, precision)}
    for number, remedy in enumerate(sorted(remedies)):
        losses: dict[str, list[float]] = {"right": [], "mended": []}
        for seed in range(4):  # of a network in which rounding errors grow, one seed shows nothing
            root, more = tmp_path / f"{number}_{seed}", (*words, *MORE, f"seed={seed}")
            root.mkdir()
            losses["right"].append(trained(root / "fp32", *more, "precision=fp32"))
            losses["mended"].append(trained(root / "mended", *more, precision, *remedy))
            right, mended = (sum(several) / len(several) for several in losses.values())
            if mended == pytest.approx(right, rel=0.1, abs=0.05):
                break
        else:
            pytest.fail(f"{remedy}: {losses}")
    return remedies


@pytest.mark.parametrize("name", ["rms_norm", "clip_in_half"])
def test_a_remedy_that_is_printed_trains_as_fp32_does(name, tmp_path):
    assert check(name, "precision=fp16_dynamic", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16_dynamic", "amp_dynamic", "bf16", "bf16_pure"])
@pytest.mark.parametrize("name", FAULTS)
def test_every_remedy_that_is_printed_trains_as_fp32_does(name, precision, tmp_path):
    check(name, f"precision={precision}", tmp_path)
