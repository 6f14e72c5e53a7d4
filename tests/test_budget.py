"""The budget: code lines that each package may have, and what people get for them.

A package grows by what a new feature was granted, and by nothing else: a change that needs more finds it in the package.
"""

from __future__ import annotations

from collections import Counter

from tests.measure import ROOT, lines_of

#: Code lines (no docstrings, comments or blank lines) by package, in hundreds rounded up, and what they are for.
BUDGET = {
    "api": (
        700,
        "train, resume, evaluate, predict, export, open_run and runs from Python, with its models, data, tasks and functions",
    ),
    "cli": (2_900, "commands, help, completion, messages, the display of a run"),
    "config": (2_550, "Hydra's words, checked, with the nearest name of every mistake; permissions"),
    "engine": (
        4_950,
        "the step, the loop, evaluation, resumable state, rehearsal, which tensor overflowed, memory by use, which updates are lost, functions of a program that look at steps",
    ),
    "integrations": (
        1_600,
        "watching other loops: torch, transformers, Lightning, Accelerate, and what their BF16 weights lose",
    ),
    "lab": (6_900, "doctor (also of BF16 weights as they are), diagnose, formats, replay, recommend, find"),
    "logger": (600, "TensorBoard, Weights & Biases, MLflow, in a process of their own"),
    "numerics": (
        1_250,
        "number formats and their scaling rules, finite checks, histograms of exponents, forecasts, rounding of updates",
    ),
    "optimizer": (
        1_600,
        "master weights, clipping, fused updates, torch's optimizers by name, BF16 weights without masters in runs and any loop",
    ),
    "parallel": (1_200, "DDP and FSDP2, torchrun, equal bits"),
    "precision": (1_100, "precision modes, keep_fp32, what a GPU supports, products in emulated formats"),
    "report": (2_700, "a run's page, its figures, the list of runs, and what notebooks show of them"),
    "run": (2_350, "start, resume, evaluation, prediction, export; parts of a run, with all refusals at once"),
    "runlog": (2_400, "records, checkpoints and their readers, safe against any file; events in words"),
    "scaler": (600, "loss scalers and the constants of other frameworks"),
    "schedule": (400, "learning rates"),
    "study": (
        7_450,
        "sweeps, Slurm, comparisons with verdicts, logs of any program, recipes with a run before their arms and each arm's best group",
    ),
    "system": (1_500, "errors, devices, masking of secrets, safe files"),
    "workloads": (
        9_300,
        "nine kinds of training with their data sets and published models; tensors and tables of any kind",
    ),
}


def test_every_package_keeps_to_its_budget():
    code: Counter[str] = Counter()
    for file in (ROOT / "mptrain").rglob("*.py"):
        inside = file.relative_to(ROOT / "mptrain").parts
        if len(inside) > 1:
            code[inside[0]] += lines_of(file)[0]
    assert code.keys() == BUDGET.keys()
    over = {name: lines - BUDGET[name][0] for name, lines in code.items() if lines > BUDGET[name][0]}
    assert over == {}
