"""Runs that nobody trained: their measures, and their directories as the writers of the package write them."""

from __future__ import annotations

import json
from dataclasses import replace

from omegaconf import OmegaConf

from mptrain.runlog import RecordWriter, RunState, create_run, read_run, write_summary
from mptrain.study.comparison.results import Arm, RunMeasures
from mptrain.system.records import EpochRecord, EvalRecord, EventRecord, StepRecord

MODES = {
    "fp32": {"parameters": "float32", "compute": "float32", "autocast": False, "master_weights": False},
    "amp_dynamic": {"parameters": "float32", "compute": "float16", "autocast": True, "master_weights": False},
    "fp16_static": {"parameters": "float16", "compute": "float16", "autocast": False, "master_weights": True},
}
CPU = "cpu (1 threads, AVX512)"
VERSIONS = {"mptrain": "0.2.0", "python": "3.11.7", "torch": "2.15.0", "cuda": "13.2"}


CONFIG = """
seed: 0
device: auto
threads: 1
dataset: {_target_: mptrain.workloads.images.datasets.digits.load_digits, augment: false, workers: 0}
optimizer: {_target_: mptrain.optimizer.SGD, lr: 0.05}
model: {_target_: mptrain.workloads.classification.models.convnet.cnn, widths: [32, 64]}
train: {epochs: 3, batch_size: 10, channels_last: true}
run: {name: null, root: outputs}
log: {ring: 32}
learners: {}
"""


def yaml_of(seed=0, precision="fp32", **changes):
    """A resolved configuration; changes are dotted keys with ``__`` for the dots."""
    scaler = {"on_overflow": "skip"} if precision == "fp32" else {"init_scale": 65536.0, "min_scale": 1.0}
    mode = {"name": precision, **MODES[precision], "tf32": False, "eval": "same"}
    chosen = {"precision": precision, "model": "cnn", "dataset": "digits"}
    own = {"seed": seed, "scaler": scaler, "precision": mode, "chosen": chosen}
    config = OmegaConf.merge(OmegaConf.create(CONFIG), own)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return OmegaConf.to_yaml(config)


def measures(seed=0, top1=0.95, precision="fp32", keys=None, **changes):
    """The measures of a run that ended in order; ``keys`` are changes of its configuration."""
    fields = {
        "path": f"runs/{precision}-{seed}",
        "seed": seed,
        "status": "done",
        "exit_code": 0,
        "reason": "",
        "config": yaml_of(seed, precision, **(keys or {})),
        "overrides": (f"precision={precision}", f"seed={seed}"),
        "chosen": {"precision": precision, "model": "cnn", "dataset": "digits"},
        "metrics": {"loss": 1 - top1, "top1": top1},
        "metric_name": "top1",
        "higher_is_better": True,
        "split": "test",
        "samples": 400,
        "steps": 300,
        "updates": 300,
        "skipped": 0,
        "skip_rate": 0.0,
        "overflows": {},
        "scale": dict.fromkeys(("first", "min", "max", "last"), 1.0),
        "terms_per_second": 1000.0,
        "term": "samples",
        "train_seconds": 3.0,
        "peak_memory": 1_000_000_000,
        "memory_before": 400_000_000,
        "energy": None,
        "data_wait": 0.01,
        "device": CPU,
        "threads": 1,
        "versions": dict(VERSIONS),
        "facts": {"parameters": 1000, "unaligned": 0.0, "convolutions": True, "upcast": False, "support": "fine"},
        "initial_weights": f"weights {seed}",
        "data": {epoch: (f"order {seed} {epoch}", f"batch {seed} {epoch}") for epoch in range(3)},
        "attempts": (),
        "data_card": "card",
        "evaluated": {"val": "validation", "test": "tested"},
        "unusable": {"train": 0, "test": 0},
    }
    return RunMeasures(**{**fields, **changes})


def arm(name, top1s, precision=None, keys=None, **changes):
    """An arm with a run for each value, its seeds counted from 0."""
    mode = precision or name
    return Arm(name, tuple(measures(seed, top1, mode, keys, **changes) for seed, top1 in enumerate(top1s)))


def failed(run, reason="every step overflowed"):
    """The same run, ended in numerical failure."""
    return replace(run, status="failed", exit_code=4, reason=reason, metrics={})


def step(number, updates, loss=1.0, learner="main", skipped=False, scale=1024.0):
    return StepRecord(learner, number, updates, 0, loss, scale, skipped, skipped, 1.0, 0.1)


def epoch(number, at, updates, learner="main", **val):
    return EpochRecord(learner, number, at, updates, at - updates, 0.5, 1024.0, 0.1, val, 1.5, 100.0)


def some_summary(**changes):
    """What a run writes at its end."""
    scale = {"first": 65536.0, "min": 16384.0, "max": 65536.0, "last": 16384.0}
    main = {"updates": 28, "skipped": 2, "skip_rate": 2 / 30, "overflows": {"calibrating": 2}, "scale": scale}
    return {
        "metric_name": "top1",
        "higher_is_better": True,
        "metric": 0.9,
        "metric_split": "test",
        "val": {"loss": 0.3, "top1": 0.92},
        "test": {"loss": 0.4, "top1": 0.9},
        "steps": 30,
        "learners": {"main": main},
        "samples": 285,
        "term": "samples",
        "terms_per_second": 90.0,
        "steady_terms_per_second": 100.0,
        "steady_steps": 20,
        "train_seconds": 3.2,
        "data_wait": 0.25,
        "energy_joules": 12.5,
        "memory_before": 400,
        "peak_memory": 1000,
        "device": "cpu",
        "threads": 2,
        "facts": {"parameters": 10, "unaligned": 0.5, "upcast": True, "support": "no half"},
        **changes,
    }


SOME_RECORDS = (
    EventRecord("start", 0, {"initial_weights": "abc"}),
    EventRecord("data_order", 0, {"epoch": 0, "order": "o0", "first_batch": "b0", "samples": 10}),
    EvalRecord("val", 10, 1, 200, {"loss": 0.5, "top1": 0.8}),
    EventRecord("data_order", 10, {"epoch": 1, "order": "o1", "first_batch": "b1", "samples": 10}),
    EvalRecord("val", 30, 3, 200, {"loss": 0.3, "top1": 0.92}),
    EvalRecord("test", 30, 3, 397, {"loss": 0.4, "top1": 0.9}, data="tested"),
)


SOME_DATA = {"name": "digits", "labels": ["0", "1"], "files": {"test": ["/data/digits.txt"]}}


def write_run(
    root, name="a", *, config=None, records=SOME_RECORDS, summary=None, end=("done", "", 0, 30), data=SOME_DATA
):
    """A run directory, and the run that it reads as; ``end`` None leaves it running, ``data`` None without a data.json."""
    run = create_run(root, "x", name)
    state = RunState(id=name, argv=(), command="", versions=dict(VERSIONS), device=CPU).begin()
    run.write_config(yaml_of() if config is None else config, ["precision=fp32"])
    if data is not None:
        run.paths.data.write_text(json.dumps(data))
    writer = RecordWriter(run.paths)
    for record in records:
        writer.take(record)
    writer.close()
    if summary is not None:
        write_summary(run.paths.summary, summary)
    run.write_state(state if end is None else state.end(*end))
    return read_run(run.root)
