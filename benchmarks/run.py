"""``python -m benchmarks.run``: measure a suite, and keep what was measured as JSON after every case."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.cases.case import Case

#: Seconds of a suite where none are given.
BUDGETS = {"smoke": 60.0, "cpu": 600.0, "gpu": 420.0}


def main(argv: list[str] | None = None) -> int:
    """Run a suite; 0 unless a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--suite", choices=sorted(BUDGETS), required=True)
    parser.add_argument(
        "--budget", type=_seconds, help="seconds to spend on measuring; building comes on top of short ones"
    )
    parser.add_argument("--out", type=Path, help="JSON to write; a file in benchmarks/results by default")
    parser.add_argument("--only", default="", help="goals, as in C1,G7")
    parser.add_argument("--threads", type=int, help="threads that compute a step on the CPU; all cores by default")
    parser.add_argument("--no-peers", action="store_true", help="leave other frameworks out")
    parser.add_argument(
        "--rehearse", action="store_true", help="the gpu suite on a CPU, in sizes whose numbers mean nothing"
    )
    asked = parser.parse_args(argv)
    if asked.rehearse and asked.suite != "gpu":
        parser.error(f"--rehearse is for --suite gpu; {asked.suite} needs no GPU")
    if asked.out is not None and (asked.out.is_dir() or not asked.out.absolute().parent.is_dir()):
        parser.error(f"--out {asked.out}: give a file in a folder that exists")

    import torch

    from benchmarks.cases.case import Setting
    from benchmarks.machine import facts
    from benchmarks.report import show
    from benchmarks.results import Results
    from benchmarks.suites import cases_of

    device = "cuda" if asked.suite == "gpu" and not asked.rehearse else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("the gpu suite needs a CUDA device; --rehearse goes through it on a CPU")
    if asked.threads is not None:
        if asked.threads < 1:
            parser.error(f"--threads {asked.threads}: give a positive number")
        torch.set_num_threads(asked.threads)
    wanted = {name.strip().upper() for name in asked.only.split(",") if name.strip()}
    cases = [case for case in cases_of(asked.suite) if not wanted or wanted & set(case.goals)]
    measured = {goal for case in cases for goal in case.goals}
    if wanted - measured:
        parser.error(f"--only {asked.only}: no case of {asked.suite} measures {', '.join(sorted(wanted - measured))}")
    results = Results(asked.suite, facts(), rehearsal=asked.rehearse)
    out = asked.out or Path(__file__).parent / "results" / f"{asked.suite}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    budget = asked.budget or BUDGETS[asked.suite]
    unit = budget / sum(case.weight for case in cases)
    began = time.perf_counter()
    for case in cases:
        left = budget - (time.perf_counter() - began)
        seconds = max(0.5, min(unit * case.weight, left)) * 0.6  # the rest goes into building and warming up
        _measure(case, Setting(seconds, device, asked.rehearse, not asked.no_peers), results)
        results.write(out)
    show(results)
    print(f"\nwritten to {out}")
    return 1 if results.failures else 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number of seconds")
    return value


def _measure(case: Case, setting: object, results: object) -> None:
    from benchmarks.cases.case import Setting
    from benchmarks.results import Results

    assert isinstance(setting, Setting)
    assert isinstance(results, Results)
    print(f"{case.name} ({', '.join(case.goals)}) ...", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        results.measurements += case.measure(setting)
    except Exception as error:  # one case that fails must not cost what the others measured
        traceback.print_exc()
        results.failures[case.name] = f"{type(error).__name__}: {error}"
    results.seconds[case.name] = round(time.perf_counter() - started, 1)


if __name__ == "__main__":
    raise SystemExit(main())
