"""Runs on several ranks for tests: ``python -m tests.several_ranks RANKS < cases.json``, answers on standard output.

Each case is a list of overrides, trained one after the other by the same ranks, forked as ``distributed.procs`` forks them.
Of each come the records of every rank, and digests of the whole weights that each has at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from mptrain.config.compose import compose
from mptrain.engine.evaluate import gather_model
from mptrain.engine.fingerprints import digest_of_weights
from mptrain.engine.loop import Loop
from mptrain.engine.telemetry import NoStorage
from mptrain.numerics.tensors import whole
from mptrain.parallel.launch import launch_ranks
from mptrain.parallel.torchrun import DistributedOptions
from mptrain.run.build.parts import build
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.records import EvalRecord, StepRecord
from tests.small_runs import Kept, environment


def trained_by(ranks: int, *cases: list[str], timeout: float = 200) -> list[list[dict]]:
    """For each case what each rank says of it."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.several_ranks", str(ranks)],
        input=json.dumps(cases),
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(TORCH_CPP_LOG_LEVEL="ERROR"),
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout)


def trained_alone(*overrides: str) -> dict:
    return _train(list(overrides), None)


def _train(overrides: list[str], ranks) -> dict:
    parts, options = build(compose(overrides), **({"comm": ranks} if ranks else {}))
    kept = Kept()
    with tempfile.TemporaryDirectory() as own:
        folder = ranks.broadcast_object(own) if ranks else own  # parts of tensors meet in one
        loop = Loop(parts, options, NoStorage(RunPaths(Path(folder))), [kept])
        loop.run()
    averages = {name: digest(value) for name, value in parts.averages().items()}
    return {
        "steps": [asdict(record) for record in kept.of(StepRecord)],
        "evaluations": [asdict(record) for record in kept.of(EvalRecord)],
        "events": [[record.kind, record.step] for record in kept.records if hasattr(record, "kind")],
        "weights": digest_of_weights(gather_model(parts).float()),
        "averages": averages,
        "products": dict(parts.plan.products.calls),
    }


def digest(value) -> float:
    return whole(value).double().sum().item()


def main() -> None:
    cases = json.load(sys.stdin)
    with launch_ranks(DistributedOptions(procs=int(sys.argv[1]))) as ranks:
        answers = [ranks.all_gather_object(_train(case, ranks)) for case in cases]
        if ranks.is_rank_zero:
            json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
