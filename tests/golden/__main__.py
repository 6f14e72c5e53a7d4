"""Golden records: proof that a change of the code has moved no number. The package's docstring says how they are used."""

from __future__ import annotations

import os

os.environ.update(
    OPENBLAS_NUM_THREADS="1",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OMP_WAIT_POLICY="passive",
    TORCH_CPP_LOG_LEVEL="ERROR",
)  # before anything imports torch
os.environ.pop("MPTRAIN_TRACEBACK", None)

import argparse
import sys
import time
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

from tests.faults.attempts import at_once
from tests.golden import runs
from tests.golden.choice import all_pairs, choose, is_possible, pairs_of
from tests.golden.comparison import compare
from tests.golden.kept import text_of
from tests.golden.renamed import RENAMED

#: So many runs are trained at a time.
JOBS = 2


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in {"make": "train the runs and keep their numbers", "list": "show the runs"}.items():
        command = commands.add_parser(name, help=what)
        command.add_argument("--runs", type=int, default=80, help="at most so many")
        command.add_argument("--only", default="*", help="those of them whose names match, as of files: '*-gan-*'")
        command.add_argument("--tree", type=Path, help="another checkout, whose package is trained with")
        if name == "make":
            command.add_argument("folder", type=Path, help="a new one")
    command = commands.add_parser("compare", help="say where two folders differ")
    command.add_argument("older", type=Path)
    command.add_argument("newer", type=Path)
    asked = parser.parse_args()
    for folder in (asked.older, asked.newer) if asked.command == "compare" else ():
        if not folder.is_dir():
            parser.error(f"there is no folder {folder}")
    if asked.command == "make" and asked.folder.exists():
        parser.error(f"{asked.folder} is there already: name a new folder")
    if asked.command == "compare":
        return compared(asked.older, asked.newer)
    configs = _use(asked.tree)
    ((rows, left, impossible),) = _answers(_chosen, [(configs, asked.runs)])
    some = [row for row in rows if fnmatch(runs.name_of(row), asked.only)]
    if asked.command == "list":
        show_runs(some, configs)
        for found in _answers(_possible, [(left[first::JOBS], configs) for first in range(JOBS)]):
            impossible += [pair for pair, there in found.items() if not there]
        left = [pair for pair in left if pair not in impossible]
    code = make(some, configs, asked.folder) if asked.command == "make" else 0
    show_coverage(rows, left, impossible, configs, names=asked.command == "list")
    return code


def _chosen(configs, most):
    return choose(runs.factors(configs), most, runs.Valid(configs))


def _possible(pairs, configs):
    is_valid = runs.Valid(configs)
    return {pair: is_possible(pair, runs.factors(configs), is_valid) for pair in pairs}


def _answers(function, calls):
    """Return the values of calls that are made at once, each in a process of its own, so that this one stays without threads."""
    found = at_once(function, calls)
    if errors := [answer for answer in found if isinstance(answer, str)]:
        raise RuntimeError(errors[0])
    return found


def make(rows, configs, folder):
    """Train runs, two at a time, and write their records; return 1 where anything was wrong."""
    folder.mkdir(parents=True)
    began, before = time.monotonic(), os.times()
    problems = []
    for found in _answers(_records, [(rows[first::JOBS], configs, folder) for first in range(JOBS)]):
        problems += found
    after = os.times()
    for problem in problems:
        print(f"wrong: {problem}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{len(list(folder.glob('*.json')))} runs in {folder}: {time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU")
    return int(bool(problems))


def _records(rows, configs, folder):
    problems = []
    for row in rows:
        record, wrong = runs.record_of(row, configs)
        (folder / f"{runs.name_of(row)}.json").write_text(text_of(record))
        problems += wrong
        print(".", end="", file=sys.stderr, flush=True)
    return problems


def compared(older, newer):
    """Compare two folders; return the exit code."""
    count, found = compare(older, newer, RENAMED)
    if not found and count:
        print(f"{count} runs are equal")
        return 0
    for difference in found:
        print(difference)
    print(f"{count} runs in both folders, {len({difference.run for difference in found})} differ")
    return 1


def show_runs(rows, configs):
    """Print each run, how many pairs it adds, and its command line."""
    known = set()
    for row in rows:
        new = set(pairs_of(row)) - known
        known |= new
        print(f"{runs.name_of(row)}: {len(new)} pairs more\n    mptrain {' '.join(runs.words_of(row, configs))}")


def show_coverage(rows, left, impossible, configs, *, names):
    """Print how many pairs the runs have, and, where names are asked for, which they have not."""
    count = len(all_pairs(runs.factors(configs))) - len(impossible)
    print(f"{len(rows)} runs have {count - len(left)} of {count} pairs of settings")
    for title, pairs in {"valid, and in no run": left if names else [], "refused by the program": impossible}.items():
        by_factors = {}
        for (one, a), (other, b) in pairs:
            by_factors.setdefault((one, other), []).append(f"{a}+{b}")
        for (one, other), words in by_factors.items():
            print(f"{title}: {len(words)} of {one} x {other}: {' '.join(words)}")


def _use(tree):
    """Let this process train with the package of a checkout; return the folder of its configuration."""
    tree = (tree or Path(__file__).parents[2]).resolve()
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    configs = runs.warm_up()
    if not Path(import_module("mptrain").__file__).is_relative_to(tree):
        sys.exit(f"error: {tree} has no package mptrain")
    return configs


if __name__ == "__main__":
    sys.exit(main())
