"""Plants faults in copies of the tree and says which tests find them: tests that were moved or made quicker still mean what they meant.

python -m tests.planted_faults --json before.json             # all of them, two at a time
python -m tests.planted_faults --only 12 17                   # some
python -m tests.planted_faults --suite default --draw 10      # by the whole default suite instead of the tests that look at a module
python -m tests.planted_faults --compare before.json after.json
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.planted_faults.copies import Copy, Late, default_markers
from tests.planted_faults.faults import FAULTS
from tests.planted_faults.mapping import ROOT, stages_of

#: Seconds that the tests that look at a module have for one fault, those beyond the default tests as many again, and how many times as
#: many the whole suite has.
IN_TIME, SUITE = 240, 15

#: Answers from best to worst; the first two mean that a fault was found.
DEFAULT, BEYOND, LATE, NOTHING, ERROR = "default", "beyond the default", "no answer in time", "nothing", "error"
ANSWERS = (DEFAULT, BEYOND, LATE, NOTHING, ERROR)


@dataclass
class Answer:
    """Answer of the tests to a fault.

    Attributes:
        number: Of the fault.
        found_by: One of `ANSWERS`.
        test: The first that failed; empty where none did; what went wrong with pytest itself after an error.
        hung: It did not come to an end.
        seconds: Wall time.
        distrusted: Tests that fail in the unharmed tree too, and were left out.
    """

    number: int
    found_by: str
    test: str = ""
    hung: bool = False
    seconds: float = 0.0
    distrusted: tuple[str, ...] = ()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no test goes on by itself
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these faults")
    parser.add_argument("--list", action="store_true", help="print the faults and the tests that look at them")
    parser.add_argument("--suite", choices=("mapped", "default"), default="mapped", help="the tests that are run")
    parser.add_argument("--draw", type=int, metavar="N", help="so many faults, drawn by lot")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="so many faults at a time")
    parser.add_argument(
        "--seconds", type=float, default=IN_TIME, help="for one fault, and as many beyond the default tests"
    )
    parser.add_argument("--json", type=Path, help="keep the answers in a file")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two such files")
    asked = parser.parse_args()
    if asked.compare:
        return compare(*(read(path) for path in asked.compare))
    faults = [fault for fault in FAULTS if asked.only is None or fault.number in asked.only]
    if asked.draw is not None:
        faults = sorted(random.Random(asked.seed).sample(faults, asked.draw), key=lambda fault: fault.number)
    if asked.list:
        for fault in faults:
            print(f"{fault.number:3} mptrain/{fault.file}: {fault.what}")
            print("   ", *(path.removeprefix("tests/") for stage in stages_of(fault)[:1] for path in stage))
        return 0
    if wrong := misplaced(faults):
        return "\n".join(wrong)
    began = time.monotonic()
    answers = []
    for one in answers_to(faults, asked):
        answers.append(one)
        print(row(one), flush=True)
        if asked.json:
            write(asked.json, answers)
    answers.sort(key=lambda one: one.number)
    print("\n| number | file | mistake | found by | first test that fails | s |\n|---|---|---|---|---|---|")
    print("\n".join(map(row, answers)))
    counts = {name: sum(one.found_by == name for one in answers) for name in ANSWERS}
    print(f"\n{len(answers)} faults in {(time.monotonic() - began) / 60:.1f} min:", end=" ")
    print(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    return 0


def misplaced(faults, root=ROOT):
    """Return a sentence about each fault whose old text is not in its file exactly once."""
    wrong = []
    for fault in faults:
        path = root / "mptrain" / fault.file
        times = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else None
        if times != 1:
            how = "there is no such file" if times is None else f"its text occurs {times} times, not once: {fault.old}"
            wrong.append(f"fault {fault.number} ({fault.what}), mptrain/{fault.file}: {how}")
    return wrong


def answers_to(faults, asked):
    """Yield what tests say of faults, some at a time, in the order in which they end; whatever ends this ends the tests."""
    jobs = 1 if asked.suite == "default" else min(asked.jobs, len(faults))
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(jobs)]
        free = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in as_completed(
                    [pool.submit(answer, one, free, asked.suite, asked.seconds) for one in faults]
                ):
                    yield done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in copies:
                    copy.close()


def answer(fault, copies, suite, seconds):
    """Return what tests say of a fault, in a copy that nobody else uses meanwhile."""
    began, copy = time.monotonic(), copies.get()
    try:
        found = _answer(fault, copy, suite, seconds)
    except RuntimeError as error:
        found = Answer(fault.number, ERROR, " ".join(str(error).split()))
    finally:
        copies.put(copy)
    found.seconds = round(time.monotonic() - began, 1)
    return found


def _answer(fault, copy, suite, seconds):
    in_time = seconds if suite == "mapped" else SUITE * seconds
    deadlines, distrusted = {}, []
    for found_by, words in _rounds(fault, suite):
        deadline = deadlines.setdefault(found_by, time.monotonic() + in_time)
        while True:
            left_out = [word for test in distrusted for word in ("--deselect", test)]
            try:
                with copy.planted(fault):
                    failure = copy.first_failure(*words, *left_out, deadline=deadline)
            except Late:
                return Answer(fault.number, LATE, distrusted=tuple(distrusted))
            if failure is None:
                break
            if passes_unharmed(copy, failure.test):
                return Answer(fault.number, found_by, failure.test, failure.hung, distrusted=tuple(distrusted))
            if failure.test in distrusted:
                raise RuntimeError(f"{failure.test} cannot be left out, and fails in the unharmed tree")
            distrusted.append(failure.test)
    return Answer(fault.number, NOTHING, distrusted=tuple(distrusted))


def _rounds(fault, suite):
    """The runs of pytest, in order: what finds a fault then, and the words."""
    if suite == "default":
        yield DEFAULT, ["-n", "2", "tests", "--ignore=tests/planted_faults"]
        return
    stages, markers = [stage for stage in stages_of(fault) if stage], default_markers()
    for stage in stages:
        yield DEFAULT, ["-n", "0", *stage]
    if markers:
        beyond = f"not ({markers}) and not slow"
        yield BEYOND, ["-n", "0", "-m", beyond, *(path for stage in stages for path in stage)]


def passes_unharmed(copy, test):
    """True where a test passes in a tree without a fault; of a file that cannot be collected, where it can be."""
    words = ["-n", "0", "-m", ""] if "::" in test else ["-n", "0", "-m", "", "--collect-only"]
    try:
        return copy.first_failure(*words, test, deadline=time.monotonic() + IN_TIME) is None
    except (Late, RuntimeError):
        return False


def row(one):
    """An answer as a row of a table."""
    fault = next(fault for fault in FAULTS if fault.number == one.number)
    test = one.test.removeprefix("tests/").replace("|", "\\|") + (" (hung)" if one.hung else "")
    return f"| {one.number} | {fault.file} | {fault.what} | {one.found_by} | {test} | {one.seconds:.0f} |"


def write(path, answers):
    """Keep answers in a file."""
    kept = {str(one.number): asdict(one) for one in sorted(answers, key=lambda one: one.number)}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def read(path):
    """Return the answers in a file by number."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {int(number): Answer(**fields) for number, fields in kept.items()}


def compare(before, after):
    """Print the faults that are found less well than before, or have no answer any more; return 1 if there are any."""
    worse = 0
    for number, one in sorted(before.items()):
        other = after.get(number)
        if other is None or ANSWERS.index(other.found_by) > ANSWERS.index(one.found_by):
            worse += 1
            now = f"by {other.found_by} after" if other else "no answer after"
            print(f"{number}: found by {one.found_by} before ({one.test or 'no test'}), {now}")
    print(f"{worse} of {len(before)} faults are found less well than before")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
