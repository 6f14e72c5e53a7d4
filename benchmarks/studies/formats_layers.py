"""Are the layers that `mptrain formats --keep` names those that must stay in FP32? The runs and their table.

    python -m benchmarks.studies.formats_layers run RESULTS.json      # half an hour on two cores
    python -m benchmarks.studies.formats_layers analyse RESULTS.json

The plan is in `formats.md`; what is below was committed with it before the first run.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.formats import DIVERGED, LOOKS, MODELS, SEEDS, STEPS, loss_after, main
from mptrain.config.compose import compose
from mptrain.lab.formats.examine import formats_of_config

NETWORKS = ("plain16", "char_lstm", "transformer", "resnext_small")
FORMATS = ("mxfp4", "fp8_unscaled")

#: Largest share of the FLOPs that the named layers may have.
BUDGET = 0.2

ARMS = ("all in the format", "named", "head", "first and last", "others")


def choices(name: str, emulate: str) -> dict[str, list[str]]:
    """Return the modules that each arm keeps in FP32, chosen with the first seed."""
    words = [*MODELS[name], "precision=fp32", f"seed={SEEDS[0]}", "threads=1", f"train.max_steps={STEPS}"]
    report = formats_of_config(compose(words), LOOKS[:1], [emulate], BUDGET, lambda _: None)
    modules = list(dict.fromkeys(layer.rpartition(".")[0] for layer in report.last.coverage.layers))
    named = list(report.keep(emulate))
    rest = [module for module in modules if module not in named]
    others = random.Random(0).sample(rest, min(len(named), len(rest)))
    kept: tuple[list[str], ...] = ([], named, modules[-1:], [modules[0], modules[-1]], others)
    return dict(zip(ARMS, kept, strict=True))


def unit(job: tuple[str, str]) -> dict[str, Any]:
    """Return the losses of all arms of a network in a format, and what each arm keeps."""
    name, emulate = job
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="formats-"))
    try:
        kept = choices(name, emulate)
        losses: dict[str, list[float]] = {"fp32": [loss_after(MODELS[name], seed, None, root) for seed in SEEDS]}
        for arm, modules in kept.items():
            quoted = ",".join(f"'{module}'" for module in modules)
            words = [*MODELS[name], f"precision.keep_fp32=[{quoted}]"]
            losses[arm] = [loss_after(words, seed, emulate, root) for seed in SEEDS]
        return {"model": name, "format": emulate, "kept": kept, "losses": losses}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def analyse(results: dict[str, Any]) -> str:
    """Return the damage of each arm, in nats: the mean over the seeds, with the smallest and the largest."""
    lines = [f"| model | format | {' | '.join(ARMS)} | named |", f"|{'---|' * (len(ARMS) + 3)}"]
    for unit in sorted(results["units"], key=lambda unit: (NETWORKS.index(unit["model"]), unit["format"])):
        cells = []
        for arm in ARMS:
            pairs = zip(unit["losses"][arm], unit["losses"]["fp32"], strict=True)
            damage = [min(loss - wide, DIVERGED) if loss == loss else DIVERGED for loss, wide in pairs]
            cells.append(f"{statistics.fmean(damage):+.3f} ({min(damage):+.2f} to {max(damage):+.2f})")
        named = ", ".join(unit["kept"]["named"]) or "none"
        lines.append(f"| {unit['model']} | {unit['format']} | {' | '.join(cells)} | {named} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(unit, [(name, emulate) for name in NETWORKS for emulate in FORMATS], analyse)
