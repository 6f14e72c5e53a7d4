"""The fault campaign: whatever breaks a run, nothing is lost or wrong.

python -m tests.faults --n 200 --seed 0
python -m tests.faults --seed 0 --only 17       # one case again, with everything that its attempts print
"""

from __future__ import annotations

import os

os.environ.update(
    OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", TORCH_CPP_LOG_LEVEL="ERROR"
)  # before anything imports torch
os.environ.pop("MPTRAIN_TRACEBACK", None)

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.attempts import at_once, warm_up
from tests.faults.cases import forget, keep_log, run_case
from tests.faults.drawing import draw
from tests.faults.references import References
from tests.faults.table import table


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=200, help="so many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--jobs", type=int, default=1, help="so many cases at a time")
    parser.add_argument("--keep", type=Path, help="a folder for what failed cases print")
    asked = parser.parse_args()
    began = time.monotonic()
    warm_up()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays mounted
    numbers = list(range(asked.n)) if asked.only is None else [asked.only]
    shares = [numbers[first :: asked.jobs] for first in range(asked.jobs)]
    reports = []
    for found in at_once(carry_out, [(share, asked) for share in shares]):
        if isinstance(found, str):
            raise RuntimeError(found)
        reports += found
    reports.sort(key=lambda report: report.case.number)
    print("\n".join(table(reports)))
    failed = [report.case.number for report in reports if report.failures]
    for number in failed:
        print(f"failed: python -m tests.faults --seed {asked.seed} --only {number}")
    settings = [report.case.setting for report in reports]
    ranks, sharded = sum(one.ranks > 1 for one in settings), sum(one.sharded for one in settings)
    print(f"{len(reports)} cases with {len({one.number for one in settings})} configurations,", end=" ")
    print(f"{ranks} with several ranks, {sharded} of them sharded, in {time.monotonic() - began:.0f} s")
    return bool(failed)


def carry_out(numbers, asked):
    """The reports of some cases."""
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    place.chmod(0o755)  # for cases whose processes have no rights
    reports, references = [], References(place)
    try:
        for number in numbers:
            case = draw(asked.seed, number)
            report = run_case(case, references, place)
            reports.append(report)
            if asked.only is not None:
                print("\n\n".join([case.describe(), *report.log]), flush=True)
            for failure in report.failures:
                print(f"case {number} ({case.describe()}): {failure}", file=sys.stderr, flush=True)
            if report.failures and asked.keep:
                keep_log(report, asked.keep)
    finally:
        forget(place)
    return reports


if __name__ == "__main__":
    failed = main()
    sys.stdout.flush()
    os._exit(failed)  # what was imported and frozen need not be taken apart
