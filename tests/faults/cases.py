"""One case from its first attempt to its verdict."""

from __future__ import annotations

import shutil
import traceback
from dataclasses import dataclass, field
from itertools import pairwise

from tests.faults import breaking, pictures
from tests.faults.attempts import attempt
from tests.faults.drawing import DAMAGES
from tests.faults.references import NAME, result_of
from tests.faults.verdict import CODES_OF_DAMAGE, differences, objections, steps_bound, words_about

#: Attempts without a fault after which a run must be done.
CLEAN = 2

#: Seconds that a process may be held up between a step and writing it down, besides ``log.seconds``.
SLACK = 0.3


@dataclass
class Report:
    """What came of a case."""

    case: object
    codes: list = field(default_factory=list)  # exit codes of attempts that were not 0
    failures: list = field(default_factory=list)  # what was wrong, one sentence each
    kept: bool = False  # a flipped bit is still in the records
    restored: bool = False  # a damaged file had to be restored from a copy
    steps_lost: dict = field(
        default_factory=dict
    )  # by kind of fault: the most steps, and in intervals between two checkpoints
    records_lost: dict = field(
        default_factory=dict
    )  # of kills: the most steps that were trained and are not in the file
    log: list = field(default_factory=list)  # what the attempts printed


def run_case(case, references, place):
    """Carry a case out in a folder below ``place``."""
    return _Course(case, references.of(case.setting), place / f"case-{case.number}").run()


class _Course:
    def __init__(self, case, reference, folder):
        self._case, self._reference, self._folder = case, reference, folder
        self._run = folder / "outputs" / NAME
        self._report = Report(case)
        self._lawful = any(fault.kind == "read_only" for fault in case.faults)
        self._before = None, ""  # the attempt before this one, if it told how far it came, and what befell it

    def run(self):
        self._folder.mkdir()
        try:
            if self._case.setting.pictures:
                pictures.make(self._folder / "data")
            damaged = []
            for fault in self._case.faults:
                self._struck(fault)
                if fault.kind in DAMAGES:
                    damaged = breaking.damage(self._folder, fault)
            self._finish(damaged)
        except Exception:
            self._report.failures.append(traceback.format_exc())
        finally:
            breaking.clear(self._folder)
        return self._report

    def _words(self):
        words = (*self._case.setting.words, f"run.name={NAME}")
        if self._case.requeued:
            return (*words, "run.resume=auto")
        return ("resume", f"outputs/{NAME}") if self._run.exists() else words

    def _struck(self, fault):
        words = self._begun_again(self._words())
        done = breaking.break_an_attempt(words, self._folder, fault, self._reference, lawful=self._lawful)
        kind = fault.extra["after"] if fault.kind in DAMAGES else fault.kind
        too_early = fault.fresh and not self._run.exists() and done.code < 0  # Python itself had not begun
        self._take(done, [] if too_early else objections(done, kind), fault.kind)
        breaking.repair(self._folder, fault)

    def _begun_again(self, words):
        """The words, or those that begin a run again which was killed before it could be gone on with."""
        if words[0] != "resume" or (self._run / "run.json").exists():
            return words
        done = attempt(words, self._folder, lawful=self._lawful)
        self._note(done, objections(done, allowed={6}))
        return (*self._case.setting.words, f"run.name={NAME}", "run.resume=auto")

    def _finish(self, damaged):
        report = self._report
        for _ in range(CLEAN):
            done = attempt(self._begun_again(self._words()), self._folder, lawful=self._lawful)
            if damaged and done.code:
                said = words_about([one.path for one in damaged])
                self._take(done, objections(done, allowed=CODES_OF_DAMAGE, words=said), measured=False)
                for one in damaged:
                    one.undo()
                damaged, report.restored = [], True
                continue
            self._take(done, objections(done), measured=not damaged)
            break
        if report.failures:
            return
        found = differences(result_of(self._run), self._reference.result)
        if found and len(damaged) == 1 and self._case.kind == "flipped_bit" and damaged[0].take_out():
            report.kept = True
            if not any("warning: " in said and "is damaged: its first" in said for said in report.log):
                report.failures.append("nobody was told that the records are damaged")
            found = differences(result_of(self._run), self._reference.result)
        report.failures += found
        if leftover := [str(path.relative_to(self._run)) for path in self._run.rglob("*.tmp")]:
            report.failures.append(f"drafts were left behind: {leftover}")

    def _note(self, done, wrong):
        self._report.log.append(done.describe())
        self._report.failures += wrong
        if done.code:
            self._report.codes.append(done.code)

    def _take(self, done, wrong, kind="", *, measured=True):
        self._note(done, wrong)
        setting, report, (before, struck_by) = self._case.setting, self._report, self._before
        if measured and before is not None and done.trace.first:
            lost = before.trace.last - (done.trace.first - 1)
            saved = before.code in (75, 0) and not (struck_by == "kill_rank" and setting.sharded)
            allowed = 0 if saved else steps_bound(setting)
            if lost > allowed or lost < 0:
                report.failures.append(f"{lost} steps had to be done again, at most {allowed} may")
            most = report.steps_lost.get(struck_by, (0, 0.0))
            report.steps_lost[struck_by] = max(most, (lost, lost / setting.interval))
        self._before = (done, kind) if done.trace.last else (None, "")
        if done.code == -9 and done.trace.last:
            self._count_records(done, kind)

    def _count_records(self, done, kind):
        steps, trace = self._run / "steps.jsonl", done.trace
        written = steps.read_bytes().count(b"\n")
        lost = trace.last - written
        self._report.records_lost[kind] = max(self._report.records_lost.get(kind, 0), lost)
        if lost > 0:
            first = max(written + 1, trace.first)
            times = [trace.finished(step) for step in range(trace.first, trace.last + 1)]
            longest = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
            waited = (trace.struck or done.ended) - trace.finished(first)
            if waited > self._case.setting.seconds + longest + SLACK:
                self._report.failures.append(
                    f"{lost} records were lost, the first of them {waited:.2f} s old, log.seconds is {self._case.setting.seconds}"
                )


def keep_log(report, folder):
    """Keep what the attempts of a failed case printed."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([report.case.describe(), *report.log, *report.failures])
    (folder / f"case-{report.case.number}.txt").write_text(text + "\n")


def forget(folder):
    shutil.rmtree(folder, ignore_errors=True)
