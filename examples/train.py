"""Train a small network on handwritten digits in FP16, from Python, and print the steps that overflowed.

mptrain has no Python interface for training: a run is a process, and `read_run` reads its records without torch.
"""

from __future__ import annotations

import subprocess
import sys

from mptrain.runlog import read_run

words = [
    "model=mlp",
    "precision=fp16_dynamic",
    "train.epochs=3",
    "scaler.init_scale=16777216",  # 2^24, too high: the first steps overflow, and the scale falls
    "scaler.growth_interval=20",  # instead of 2000 clean steps, so that the scale probes its limit a few times
    "run.name=example",
    "run.resume=auto",  # a second start finds the run finished, instead of stopping with an error
]
subprocess.run([sys.executable, "-m", "mptrain", *words], check=True)

run = read_run("outputs/example")
for step in run.steps():
    if step.overflow:
        print(f"step {step.step} overflowed at loss scale {step.loss_scale:.0f} and was skipped")
print(f"{run.summary['metric_name']} {run.summary['metric']:.4f}")
