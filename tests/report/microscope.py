"""Run directories with histograms, written without training."""

import torch

from mptrain.runlog import RecordWriter, RunPaths
from tests.histograms_by_hand import counted, look
from tests.report.folders import make_run


def gradients(low, high, seed, scale=1.0, dtype="float32"):
    generator = torch.Generator().manual_seed(seed)
    values = (2 ** (low + (high - low) * torch.rand(400, generator=generator))).float() * scale
    return counted((values.half() if dtype == "float16" else values).tolist(), dtype)


def sampled_steps(count=3, scale=1.0, dtype="float32", learner="main", overflows=(), modules=3):
    """Return histograms of the steps 1, 20, 40 ..., with gradients that shrink from module to module."""
    found = []
    for at in range(count):
        step = max(20 * at, 1)
        deep = {
            f"{m}.conv": gradients(-38 + 24 * m / modules, -22 + 10 * m / modules, 0, scale, dtype)
            for m in range(modules)
        }
        heavy = {f"{m}.conv.weight": gradients(-24, -3 - m / modules, 10 + m, scale, dtype) for m in range(modules)}
        plain = {f"{m}.conv.weight": gradients(-12, 0, 20 + m) for m in range(modules)}
        found.append(
            look(
                step, deep, heavy, scale, overflow=step in overflows, learner=learner,
                activations={f"{m}.conv": gradients(-10, 4, 30 + m) for m in range(modules)}, weights=plain,
                updates={name: gradients(-30, -8, 40) for name in plain},
                unchanged={name: (400, 100 * (m + 1)) for m, name in enumerate(plain)},
            )
        )  # fmt: skip
    return found


def make_looked_at(root, records=None, **run):
    """Write a run with `make_run` and histograms, long enough to recommend a scale."""
    make_run(root, **{"steps": 300, **run})
    writer = RecordWriter(RunPaths(root))
    for record in sampled_steps() if records is None else records:
        writer.take(record)
    writer.close()
    return root
