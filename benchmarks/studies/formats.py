"""Does one emulated step tell what a number format does to a training? The plan, the runs and the analysis.

    python -m benchmarks.studies.formats run RESULTS.json      # about an hour on two cores
    python -m benchmarks.studies.formats analyse RESULTS.json

The plan is in `formats.md`; what is below was committed with it before the first run.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mptrain
from benchmarks.machine import facts
from mptrain.config.compose import compose
from mptrain.engine.parts import Parts
from mptrain.lab.formats.examine import formats_of_config
from mptrain.lab.formats.look import emulated_gradients
from mptrain.lab.step.repetition import restore_step, saved_step_at
from mptrain.numerics.quantization import RULES, Rule
from mptrain.precision.emulation import ProductCall
from mptrain.run.build.parts import build
from mptrain.workloads.base.batch import Batch

#: Networks, all with a cross-entropy as loss, in nats, and data that comes with the packages.
MODELS = {
    "plain16": ["model=plain16"],  # that of the recipe two_cliffs
    "word_lstm": ["model=word_lstm", "train.batch_size=16"],
    "char_lstm": ["model=char_lstm"],
    "transformer": ["model=transformer"],
    "resnext_small": ["model=resnext_small"],  # batch norm
    "cnn": ["model=cnn"],
    "translation": ["model=transformer_small_translation"],
    "classifier": ["model=sequence_classifier"],
}
FORMATS = ("bf16", "fp8_unscaled", "fp8_tensor", "fp8_block", "mxfp8", "mxfp8_floor", "mxfp4", "nvfp4")
SEEDS = (0, 1, 2)
STEPS = 120

#: Steps that are looked at. The first one, the command's default, is the forecast; the other is reported beside it.
LOOKS = (21, 61)

#: Changes of the loss below it are no damage, in nats, and that of a run whose loss is not finite.
MARGIN, DIVERGED = 0.03, 3.0

#: Error above which the forecast is damage: the end of the band "little or no damage expected".
FORECAST = 0.30

#: Formats of four bits, for the rule "four bits hurt, eight do not".
FOUR_BITS = ("mxfp4", "nvfp4")

RESAMPLES = 4000


def loss_after(words: list[str], seed: int, emulate: str | None, root: Path) -> float:
    """Return the validation loss, computed in FP32, after `STEPS` steps in a format; NaN if training failed."""
    mode = ["precision=fp32"] if emulate is None else ["precision=mxfp8_emulated", f"precision.emulate={emulate}"]
    rest = [f"train.max_steps={STEPS}", "precision.eval=fp32", f"seed={seed}", "threads=1", f"run.root={root}"]
    try:
        run = mptrain.train(*words, *mode, *rest, "checkpoint.every_epochs=null", show=False)
    except mptrain.MptrainError:
        return math.nan
    return float(run.summary["val"]["loss"])


def errors_at_looks(words: list[str], seed: int) -> list[dict[str, float]]:
    """Return the error of each format at each of `LOOKS`, of the network trained in FP32."""
    config = compose([*words, "precision=fp32", f"seed={seed}", "threads=1", f"train.max_steps={STEPS}"])
    report = formats_of_config(config, LOOKS, FORMATS, 0.0, lambda _: None)
    return [{errors.name: errors.error if errors.finite else 2.0 for errors in step.formats} for step in report.steps]


def forward_errors(words: list[str], seed: int) -> dict[str, float]:
    """Return the mean relative error of all layers' outputs in the forward pass of each format, at the first look."""
    config = compose([*words, "precision=fp32", f"seed={seed}", "threads=1", f"train.max_steps={STEPS}"])
    parts, options = build(config)
    saved = saved_step_at(parts, options, None, LOOKS[0])
    assert saved is not None
    parts, _ = build(config, weights=False)
    restore_step(parts, saved)
    parts.model.train()
    right = _outputs(parts, saved.batch, None)
    means = {}
    for name in FORMATS:
        pairs = zip(_outputs(parts, saved.batch, RULES[name]), right, strict=True)
        means[name] = statistics.fmean(
            float((low - exact).norm() / exact.norm().clamp_min(1e-30)) for low, exact in pairs
        )
    return means


def _outputs(parts: Parts, batch: Batch, rule: Rule | None) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []

    def keep(call: ProductCall, module: str) -> None:
        if call.role == "output":
            outputs.append(call.result.detach().clone())

    emulated_gradients(parts, batch, rule, report=keep)
    return outputs


def unit(job: tuple[str, int]) -> dict[str, Any]:
    """Return all that is measured of a network with a seed."""
    name, seed = job
    torch.set_num_threads(1)
    words, root = MODELS[name], Path(tempfile.mkdtemp(prefix="formats-"))
    try:
        return {
            "model": name,
            "seed": seed,
            "looks": errors_at_looks(words, seed),
            "forward": forward_errors(words, seed),
            "fp32": loss_after(words, seed, None, root),
            "losses": {emulate: loss_after(words, seed, emulate, root) for emulate in FORMATS},
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run(path: Path, processes: int, unit: Callable[[Any], dict[str, Any]], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Run all jobs and write their results, also those that are there so far."""
    results: dict[str, Any] = {"machine": facts(), "steps": STEPS, "units": []}
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        for done in pool.imap_unordered(unit, jobs):
            results["units"].append(done)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(len(results["units"]), "of", len(jobs), flush=True)


def arms(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each network in each format: its damage in nats, and what was forecast, as means over the seeds."""
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        units = [unit for unit in results["units"] if unit["model"] == model]
        for name in FORMATS:
            losses = [unit["losses"][name] - unit["fp32"] for unit in units]
            rows.append(
                {
                    "model": model,
                    "format": name,
                    "damage": statistics.fmean(min(loss, DIVERGED) if loss == loss else DIVERGED for loss in losses),
                    "look": statistics.fmean(unit["looks"][0][name] for unit in units),
                    "later": statistics.fmean(unit["looks"][1][name] for unit in units),
                    "forward": statistics.fmean(unit["forward"][name] for unit in units),
                    "four bits": float(name in FOUR_BITS),
                }
            )
    for row in rows:
        others = [each["damage"] for each in rows if each["format"] == row["format"] and each["model"] != row["model"]]
        row["other models"] = statistics.fmean(tied(each) for each in others)
    return rows


def tied(damage: float) -> float:
    """Return the damage, or 0 if it is below the margin."""
    return damage if damage >= MARGIN else 0.0


def ranks(values: list[float]) -> np.ndarray:
    """Return ranks from 1, of equal values their mean."""
    order = np.asarray(values)
    return np.asarray([(order < value).sum() + ((order == value).sum() + 1) / 2 for value in order])


def spearman(first: list[float], second: list[float]) -> float:
    """Return the rank correlation, NaN if all values of one are equal."""
    a, b = ranks(first), ranks(second)
    if a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def analyse(results: dict[str, Any]) -> str:
    """Return the results as Markdown: arms, rank correlations with intervals over networks, and right forecasts."""
    rows = arms(results)
    predictors = ("look", "later", "other models", "four bits", "forward")
    lines = ["| model | format | damage, nats | look | later look | forward |", "|---|---|---|---|---|---|"]
    for row in rows:
        shown = f"{row['damage']:+.3f} | {row['look']:.1%} | {row['later']:.1%} | {row['forward']:.1%}"
        lines.append(f"| {row['model']} | {row['format']} | {shown} |")
    generator = np.random.default_rng(0)
    draws = [generator.choice(list(MODELS), len(MODELS)) for _ in range(RESAMPLES)]
    by_model = {model: [row for row in rows if row["model"] == model] for model in MODELS}

    def correlation(some: list[dict[str, Any]], predictor: str) -> float:
        return spearman([row[predictor] for row in some], [tied(row["damage"]) for row in some])

    lines += ["", "| forecast by | Spearman | the look is better by | right at the margin |", "|---|---|---|---|"]
    for predictor in predictors:
        samples = [[row for model in draw for row in by_model[model]] for draw in draws]
        better = [correlation(some, "look") - correlation(some, predictor) for some in samples]
        low, high = np.nanquantile(better, [0.025, 0.975])
        gap = correlation(rows, "look") - correlation(rows, predictor)
        shown = "" if predictor == "look" else f"{gap:+.2f} [{low:+.2f}, {high:+.2f}]"
        limits = {"look": FORECAST, "later": FORECAST, "other models": MARGIN, "four bits": 0.5}
        right = ""
        if predictor in limits:
            hits = sum((row[predictor] > limits[predictor]) == (row["damage"] >= MARGIN) for row in rows)
            right = f"{hits} of {len(rows)}"
        lines.append(f"| {predictor} | {correlation(rows, predictor):+.2f} | {shown} | {right} |")
    inside = [correlation(by_model[model], "look") for model in MODELS]
    lines.append(f"\nwithin networks: {', '.join(f'{value:+.2f}' for value in inside)}")
    bands = [(0.0, 0.13), (0.13, 0.30), (0.30, 0.60), (0.60, math.inf)]
    lines += ["", "| error | arms | damage, nats |", "|---|---|---|"]
    for low, high in bands:
        damages = sorted(row["damage"] for row in rows if low < row["look"] <= high)
        span = f"{damages[0]:+.3f} to {damages[-1]:+.3f}" if damages else ""
        lines.append(f"| {low:.0%} to {high:.0%} | {len(damages)} | {span} |")
    return "\n".join(lines)


def main(
    unit: Callable[[Any], dict[str, Any]],
    jobs: Sequence[tuple[Any, ...]],
    analyse: Callable[[dict[str, Any]], str],
) -> None:
    """Run or analyse a study, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "analyse"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.results, arguments.processes, unit, jobs)
    print(analyse(json.loads(arguments.results.read_text())))


if __name__ == "__main__":
    main(unit, [(name, seed) for seed in SEEDS for name in MODELS], analyse)
