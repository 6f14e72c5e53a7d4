"""Run directories, sweeps and comparisons with the files of real training, written without training."""

import math
from dataclasses import replace

from mptrain.runlog import RecordWriter, RunDirectory, RunPaths, RunState, write_summary
from mptrain.runlog.sweeps import Sweep, SweepJob, write_sweep
from mptrain.study.comparison.results import (
    Aligned,
    Arm,
    ArmResult,
    ArmVerdict,
    Comparison,
    Equivalence,
    Interval,
    Objection,
    RunMeasures,
)
from mptrain.system.records import EvalRecord, EventRecord, OverflowRecord, ScaleRecord, StepRecord

CONFIG = """seed: 0
train:
  epochs: 3
chosen:
  precision: {precision}
  model: mlp
  dataset: digits
"""

#: Hostile texts that a report must show literally.
HOSTILE = (
    "<script>alert(1)</script>",
    "]]><svg onload=alert(1)>",
    '" onmouseover="alert(1)',
    "[click](javascript:alert(1))",
    "![x](https://example.invalid/x.png)",
    "a|b`c``d```e",
    "line one\nline two\r\n# no heading",
    "$\\frac{a}{b}$ and $",
    "\u202egnp.exe\u202c",
    "bell\x07 escape\x1b[31m null\x00",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp;amp;",
    "_hidden_ __init__ *bold* ~~gone~~ https://example.invalid/ a@b.invalid",
    "\udce9 lone surrogate",
    "x" * 3000,
    "中文 עברית",
)


def make_run(
    root,
    steps=60,
    learners=("main",),
    overflows=(),
    status="done",
    metric=0.9,
    precision="fp16_dynamic",
    reason="",
    words=("model=mlp",),
    loss=lambda step: 2.0 * 0.97**step + 0.1,
    scale=65536.0,
    summary=True,
    config=CONFIG,
    events=(),
    interval=None,
    parts=(),
):
    """Write a run directory. ``overflows`` maps steps of the first learner to phases; each halves the scale."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    directory = RunDirectory(paths)
    state = RunState(id=root.name, argv=tuple(words), command="mptrain " + " ".join(words), device="cpu (test)")
    state = replace(
        state.begin(), versions={"mptrain": "0", "torch": "2"}, parts={"precision": "parameters float16", **dict(parts)}
    )
    state = replace(
        state, attempts=tuple(replace(one, started="2026-01-02T03:04:05.678+00:00") for one in state.attempts)
    )
    if status != "running":
        state = state.end(status, reason, {"done": 0, "failed": 4, "preempted": 75}[status], steps)
    directory.write_state(state)
    directory.write_config(config.format(precision=precision) if config is CONFIG else config, words)
    writer = RecordWriter(paths)
    overflows, refused = dict(overflows), 0
    for step in range(1, steps + 1):
        phase = overflows.get(step)
        refused += phase is not None
        for learner in learners:
            hit = phase is not None and learner == learners[0]
            writer.take(
                StepRecord(
                    learner, step, step - (refused if learner == learners[0] else 0), 0, loss(step), scale, hit, hit,
                    math.inf if hit else 1.0 + 1 / step, 0.05,
                )
            )  # fmt: skip
        if phase is not None:
            writer.take(
                OverflowRecord(
                    learners[0], step, scale, phase, "finite", (("0.weight", "inf"), ("2.bias", "nan")), 5, True, 0
                )
            )
            writer.take(ScaleRecord(learners[0], step, scale, scale / 2, "overflow"))
            scale /= 2
        if step % 20 == 0:
            writer.take(EvalRecord("val", step, step // 20, 200, {"loss": loss(step), "top1": 1 - 0.5 * 0.97**step}))
    for event in events:
        writer.take(event)
    if status == "done":
        writer.take(EvalRecord("test", steps, 3, 400, {"loss": 0.2, "top1": math.nan if metric is None else metric}))
    writer.close()
    if summary and status == "done":
        path = {"first": 65536.0, "min": scale, "max": 65536.0, "last": scale}
        write_summary(
            paths.summary,
            {
                "metric_name": "top1", "metric": metric, "metric_split": "test", "best_val": 1 - 0.5 * 0.97**60,
                "higher_is_better": True, "intervals": {"top1": interval}, "steps": steps, "planned_steps": steps,
                "learners": {
                    name: {"updates": steps - refused, "skipped": refused, "scale": path} for name in learners
                },
                "term": "samples", "terms_per_second": 1000.0, "steady_terms_per_second": 2345.0,
                "train_seconds": 12.0, "peak_memory": 8_000_000, "memory_before": 5_000_000, "data_wait": 0.125,
                "energy_joules": None, "threads": 1,
            },
        )  # fmt: skip
    return root


def warning(text):
    return EventRecord("warning", 7, {"message": text})


def make_sweep(folder, points, kind="sweep", plan=None, words=("model=mlp", "scaler.scale=1,8,128")):
    """Write a sweep folder. A point is overrides, status and arguments of `make_run` (None: no run directory)."""
    folder.mkdir(parents=True)
    jobs = []
    for number, (overrides, status, run) in enumerate(points):
        name = f"{number:03d}-point"
        if run is not None:
            make_run(folder / name, words=overrides, **run)
        code = {"done": 0, "failed": -9}.get(status)
        reason = "killed by SIGKILL" if status == "failed" else ""
        jobs.append(SweepJob(number, name, tuple(overrides), tuple(overrides[-1:]), "", status, code, reason, 3.0))
    started = "2026-01-02T03:04:05.678+00:00"
    write_sweep(Sweep(folder, kind, tuple(words), (), "train", 2, tuple(jobs), started, plan or {}))
    return folder


def measures(path, seed, metric, **changes):
    """Return the measures of a run as `mptrain.study.comparison` would."""
    base = RunMeasures(
        path=str(path), seed=seed, status="done", exit_code=0, reason="", config="seed: 0", overrides=("model=mlp",),
        chosen={"precision": "fp32"}, metrics={"top1": metric, "loss": 0.3}, metric_name="top1", higher_is_better=True,
        split="test", samples=400, steps=60, updates=60, skipped=0, skip_rate=0.0, overflows={}, scale={},
        terms_per_second=1000.0 + seed, term="samples", train_seconds=10.0, peak_memory=8_000_000 + seed,
        memory_before=0, energy=50.0, data_wait=0.1, device="cpu", threads=1, versions={}, facts={},
        initial_weights="", data={},
    )  # fmt: skip
    return replace(base, **changes)


def interval(mean, half, n=4):
    return Interval(mean, mean - half, mean + half, half / 2, n)


def make_comparison(folder, arms=("fp32", "amp_dynamic", "fp16_noscale"), seeds=4, text="as its numbers say"):
    """Write a comparison of runs below a folder: the reference, one arm equivalent, one worse, others undecided."""
    words = ["reference", "equivalent", "worse", *["undecided"] * len(arms)]
    results = []
    for at, name in enumerate(arms):
        runs = []
        for seed in range(seeds):
            path = folder / f"run-{at}-{seed}"
            hits = {3: "calibrating", 30: "growth probe"} if at == 1 else {}
            make_run(path, overflows=hits, metric=0.9 - 0.01 * at + 0.001 * seed, precision=f"mode{at}")
            runs.append(measures(path.name, seed, 0.9 - 0.01 * at + 0.001 * seed))
        ratio = None if at == 0 else interval(2.0, 0.1)
        results.append(
            ArmResult(
                arm=Arm(name, tuple(runs)),
                metric=interval(0.9 - 0.01 * at, 0.0021),
                difference=None if at == 0 else interval(-0.01 * at, 0.002),
                equivalence=None
                if at == 0
                else Equivalence(0.005, -0.01 * at - 0.001, -0.01 * at + 0.001, 0.01, 0.56, 12),
                verdict=ArmVerdict(words[at], text),
                failed=int(at == 2),
                missing=0,
                throughput=interval(1000, 20),
                speed=ratio,
                time=ratio,
                memory=ratio,
                peak=interval(8e6, 1e4),
                energy=ratio,
                skip_rate=0.0009,
                aligned=(
                    Aligned("updates", 58, "val_top1", interval(0.9, 0.01), None if at == 0 else interval(-0.01, 0.02)),
                ),
                differs={} if at == 0 else {"precision.name": ("fp32", f"mode{at}")},
                remarks=() if at == 0 else (f"not faster: {text}",),
            )
        )
    return Comparison(
        metric="top1", higher_is_better=True, split="test", margin=0.005, reference=arms[0], arms=tuple(results),
        objections=(Objection("TF32 is on in one arm", True, "turn it off"),), checks=("all arms had the same data",),
        notes=("the test split has 400 samples",),
    )  # fmt: skip
