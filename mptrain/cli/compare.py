"""``mptrain compare``: arms of a command line, or runs that exist; a table, verdicts, a report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.comparison_table import print_comparison
from mptrain.cli.flags import meant_by, read_flags
from mptrain.cli.job import PROGRAM
from mptrain.cli.messages import checking, each_warning_once, say, warn
from mptrain.cli.sweep_running import finish, launcher_of
from mptrain.comparison.results import write_comparisons
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.compose import Composer
from mptrain.config.launcher import is_elsewhere
from mptrain.config.schema import RunOptions
from mptrain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, UsageError, did_you_mean
from mptrain.runlog.sweeps import Sweep, SweepPaths, read_sweep
from mptrain.sweep.comparisons import Question, beside, claimed_by, judge, judge_runs, name_arms, reference_of
from mptrain.sweep.points import check, expand
from mptrain.sweep.runner import plan_sweep, sweep_folder

if TYPE_CHECKING:
    from mptrain.comparison.results import Comparison

_WITH_VALUE = ("--reference", "--margin", "--metric", "--by")

#: Flags with a value that mean the same as without ``compare``.
_PASSED_ON = ("--config-dir", "-cd", "--config-name", "-cn", "--jobs", "--launcher")


@dataclass(frozen=True)
class _Asked:
    """The words of the command, sorted.

    Attributes:
        question: What is to be found out.
        places: Runs that exist.
        words: Overrides and flags of the training command.
        anyway: Compare also what cannot be compared fairly.
    """

    question: Question
    places: tuple[str, ...]
    words: tuple[str, ...]
    anyway: bool


def compare(words: Sequence[str]) -> int:
    """Compares arms that are trained for it, or runs that exist.

    Returns:
        0; 7 where a run failed for another reason than its numerics; 130 or 75 where a signal ended it.

    Raises:
        MptrainError: The words are wrong, or runs differ in more than they claim; then nothing is run or written.
    """
    asked = _read(words)
    if asked.places and any("=" in word or not word.startswith("-") for word in asked.words):
        odd = next(word for word in asked.words if "=" in word or not word.startswith("-"))
        raise UsageError(
            f"compare takes runs that exist or KEY=VALUE words, not both: {asked.places[0]} and {odd}",
            "leave one of them out",
        )
    return _compare_runs(asked) if asked.places else _compare_arms(asked)


def conclude(sweep: Sweep) -> None:
    """Judges a comparison whose jobs have run, prints what was found and writes its report.

    Args:
        sweep: Its folder is read again.

    Raises:
        MptrainError: There is nothing to compare, or the disk refuses.
    """
    _show(judge(read_sweep(sweep.folder)), sweep.folder)


def _compare_arms(asked: _Asked) -> int:
    flags = read_flags(["-m", *asked.words])
    with each_warning_once():
        composer = Composer(flags.config_dirs, flags.config_name)
        launcher = launcher_of(flags.launcher, flags.jobs)
        points = name_arms(expand(flags.overrides, composer.catalogue))
        with checking(len(points)):
            points = check(points, composer, PROGRAM, elsewhere=is_elsewhere(launcher))
        arms = list(dict.fromkeys(point.arm for point in points))
        seeds = len(points) // len(arms)
        say(
            f"{len(points)}/{len(points)} points valid: {len(arms)} arms ({', '.join(arms)}) x {seeds} {'seed' if seeds == 1 else 'seeds'}"
        )
        warn(sentence for point in points for sentence in point.warnings)
        if seeds < 2:
            warn(["one seed shows no spread, so there will be no verdict: repeat the arms with seed=0,1,2,3"])
        question = replace(asked.question, claimed=(*asked.question.claimed, *claimed_by(points)))
        wanted = question.reference or reference_of(points)
        question = replace(question, reference=wanted)
        if wanted not in arms and wanted.partition("=")[2] not in arms:
            near = did_you_mean(wanted, arms)
            hint = f"did you mean {near}?" if near else f"arms are {', '.join(arms)}"
            raise UsageError(f"--reference {wanted}: no arm is called so", hint)
        planned = plan_sweep(
            points,
            sweep_folder(composer.compose(points[0].overrides).run, "comparisons"),
            words=flags.overrides,
            config_dirs=flags.config_dirs,
            config_name=flags.config_name,
            parallel=flags.jobs or 1,
            kind="comparison",
            plan=question.as_plan(),
        )
        code = finish(planned, composer, launcher)
    if code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        conclude(planned)
    return code


def _compare_runs(asked: _Asked) -> int:
    _refuse_options(asked.places)
    comparison = judge_runs(asked.places, asked.question, anyway=asked.anyway)
    folder = sweep_folder(RunOptions(root="outputs"), "comparisons")  # nothing is made for what is refused
    comparisons = {"": beside(comparison, folder)}
    write_comparisons(SweepPaths(folder).comparison, comparisons)
    _show(comparisons, folder)
    return EXIT_OK


def _refuse_options(places: Sequence[str]) -> None:
    """Refuse options of one group, such as two precisions, that stand where runs are named.

    Raises:
        UsageError: With the words that name them as arms.
    """
    if len(places) < 2 or any(Path(place).exists() or (Path("outputs") / place).exists() for place in places):
        return
    catalogue = Catalogue([location.configs()])
    for group, options in catalogue.groups.items():
        if options.keys() >= set(places):
            line = f"mptrain compare {group}={','.join(places)} seed=0,1,2,3"
            raise UsageError(f"there is no run {places[0]}", f"to train and compare arms, write {line}")


def _show(comparisons: Mapping[str, Comparison], folder: Path) -> None:
    from mptrain.report import write_report

    written = write_report(folder)  # first: whoever reads what is printed may stop reading
    for group, comparison in comparisons.items():
        say("")
        print_comparison(comparison, group)
    say(f"\ncomparison={folder}")
    say(f"report={written.html}")


def _read(words: Sequence[str]) -> _Asked:
    """Sorts the words.

    Raises:
        UsageError: There are none, or an option lacks its value or has a wrong one.
    """
    found: dict[str, str] = {}
    places: list[str] = []
    kept: list[str] = []
    anyway, rest = False, list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in _WITH_VALUE:
            if not equals and (not rest or rest[0].startswith("--")):
                raise UsageError(f"{flag} needs a value", f"write {flag} VALUE")
            found[flag] = value if equals else rest.pop(0)
        elif word == "--anyway":
            anyway = True
        elif flag in _PASSED_ON:
            kept += [word] if equals or not rest else [word, rest.pop(0)]
        elif word.startswith("-"):
            flags = (*_WITH_VALUE, "--anyway", *_PASSED_ON)
            meant = meant_by(word, value or next(iter(rest), "VALUE"), flags) or did_you_mean(flag, flags)
            listed = f"there is {', '.join((*_WITH_VALUE, '--anyway', '--jobs'))}"
            raise UsageError(f"unknown option '{word}'", f"did you mean {meant}?" if meant else listed)
        elif Path(word).is_file():
            continue  # SWEEP/0* names the logs beside the runs as well
        elif "=" not in word or Path(word).is_dir():
            (kept if word.startswith("~") else places).append(word)
        else:
            kept.append(word)
    if not places and not kept:
        raise UsageError(
            "compare needs arms or runs",
            "write for example mptrain compare precision=fp32,amp_dynamic seed=0,1,2,3, or mptrain compare RUN RUN",
        )
    default = Question()
    claimed = tuple(key for key in found.get("--by", "").split(",") if key)
    margin = _margin(found["--margin"]) if "--margin" in found else default.margin
    question = Question(found.get("--reference"), margin, found.get("--metric"), claimed)
    return _Asked(question, tuple(places), tuple(kept), anyway)


def _margin(text: str) -> float:
    try:
        margin = float(text)
    except ValueError:
        margin = math.nan
    if not (margin > 0 and math.isfinite(margin)):
        raise UsageError(
            f"--margin {text}: must be a positive number, in the metric's unit",
            f"write for example --margin 0.005, half a point of accuracy; the default is {shlex.quote(str(Question().margin))}",
        )
    return margin
