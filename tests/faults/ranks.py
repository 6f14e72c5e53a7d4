"""Runs of two ranks and more that SIGKILL or SIGTERM ends at a random step, and that are resumed: every bit is that of an undisturbed one.

python -m tests.faults.ranks --times 20 --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", TORCH_CPP_LOG_LEVEL="ERROR")  # before torch

from tests.faults.attempts import warm_up
from tests.faults.cases import forget, run_case
from tests.faults.drawing import Case, Fault, Setting
from tests.faults.references import References

EVERY = 5  # steps between two checkpoints
RANKS, KINDS, SIGNALS = (2, 3, 4), ("ddp", "fsdp2"), ("kill", "sigterm")

WORDS = (
    *("model=mlp", "model.hidden=[48,40]", "precision=fp16_dynamic", "scaler.init_scale=1048576", "optimizer=adamw"),
    *("dataset.train_samples=160", "train.batch_size=8", "train.epochs=2", f"checkpoint.every_steps={EVERY}"),
)


def setting_of(number, ranks, kind):
    words = (*WORDS, f"distributed={kind}", f"distributed.procs={ranks}", f"seed={number}", "log.seconds=0.05")
    return Setting(number, words, False, EVERY, True, 0.05, ranks, kind == "fsdp2")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults.ranks", description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="so often for each number of ranks, strategy and signal")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warm_up()
    place, chance = Path(tempfile.mkdtemp(prefix="ranks-")), random.Random(asked.seed)
    references, done, failed = References(place), Counter(), []
    numbers = itertools.count()
    try:
        for number, (ranks, kind) in enumerate(itertools.product(RANKS, KINDS)):
            for signal in SIGNALS * asked.times:
                fault = Fault(signal, "step", chance.random())
                case = Case(next(numbers), setting_of(number, ranks, kind), (fault,), requeued=False)
                report = run_case(case, references, place)
                done[ranks, kind, signal] += not report.failures
                failed += [f"{case.describe()}: {failure}" for failure in report.failures]
                forget(place / f"case-{case.number}")
            counts = ", ".join(f"{signal} {done[ranks, kind, signal]} of {asked.times}" for signal in SIGNALS)
            print(f"{ranks} ranks, {kind}: identical after {counts}", flush=True)
    finally:
        forget(place)
    print("\n".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
