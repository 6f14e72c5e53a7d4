"""The page of a replay: what a loss scaling rule would have done to a run, beside the scales that the run had."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mptrain.masking import masked
from mptrain.report.curves import Curve
from mptrain.report.formatting import counted, elided, scale
from mptrain.report.page import Block, Bullets, Cell, Code, Page, Plot, Text, facts, plots, section, table
from mptrain.report.plotting import (
    BLUE,
    GREY,
    ORANGE,
    VERMILLION,
    dots,
    drawing,
    exponents,
    power_of_two_y_axis,
    step_axis,
)
from mptrain.report.run_history import MOST_MARKS


@dataclass
class ScaleTrajectory:
    """Loss scales over steps and what came of them, recorded or replayed.

    Attributes:
        scales: Over steps.
        marks: Scales of steps that overflowed.
        steps: Attempts.
        updates: Those that were applied.
        skipped: Those that were refused.
        unknown: Attempts of which nobody knows whether they overflow; they are neither updates nor skipped.
        overflows: Steps that overflowed.
        first: Scale of the first step.
        lowest: Least scale.
        highest: Greatest scale.
        last: Scale of the last step.
    """

    scales: Curve = field(default_factory=Curve)
    marks: Curve = field(default_factory=lambda: Curve(MOST_MARKS))
    steps: int = 0
    updates: int = 0
    skipped: int = 0
    unknown: int = 0
    overflows: int = 0
    first: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    last: float = 0.0

    def add(self, step: int, loss_scale: float, overflow: bool, skipped: bool) -> None:
        """Take in a step."""
        self._at(step, loss_scale)
        self.updates += not skipped
        self.skipped += skipped
        if overflow:
            self.overflows += 1
            self.marks.add(step, loss_scale)

    def pass_over(self, step: int, loss_scale: float) -> None:
        """Take in a step of which only the scale is known."""
        self._at(step, loss_scale)
        self.unknown += 1

    def _at(self, step: int, loss_scale: float) -> None:
        if not self.steps:
            self.first = self.lowest = self.highest = loss_scale
        if loss_scale < self.lowest:
            self.lowest = loss_scale
        if loss_scale > self.highest:
            self.highest = loss_scale
        self.last = loss_scale
        self.steps += 1
        self.scales.add(step, loss_scale)


@dataclass(frozen=True)
class ReplayedLearner:
    """One learner's scales, recorded and replayed.

    Attributes:
        name: Of the learner.
        recorded_rule: The run's own rule in words.
        rule: The replayed one.
        recorded: What is on record.
        replayed: What the rule would have done.
        known: Steps whose verdict follows from the records of that very step.
        estimated: Steps whose verdict follows from steps nearby, or from a format that is not FP16.
        same: Steps with the recorded scale.
        parted: The first step with another one; None where there is none.
        constant: Whether the replayed scale never changes.
    """

    name: str
    recorded_rule: str
    rule: str
    recorded: ScaleTrajectory
    replayed: ScaleTrajectory
    known: int
    estimated: int
    same: int
    parted: int | None
    constant: bool = False

    @property
    def stuck(self) -> bool:
        """Return whether a scale that never changes, and is not the run's own, would refuse updates."""
        return self.constant and self.parted is not None and self.replayed.skipped > 0

    def agreement(self) -> str:
        """Return how far the replayed scales are the recorded ones, in one clause."""
        steps = self.recorded.steps
        if self.parted is None:
            return f"its scale is the recorded one at all {steps:,} steps"
        if self.same == 0:
            return f"its scale is another one at each of the {steps:,} steps"
        return f"its scale is the recorded one at {self.same:,} of {steps:,} steps, another one first at step {self.parted:,}"

    def basis(self) -> str:
        """Return how its verdicts are known, in one clause."""
        counts = {"known": self.known, "estimated": self.estimated, "unknown": self.replayed.unknown}
        parts = [f"{count:,} {how}" for how, count in counts.items() if count]
        return f"verdicts of {counted(self.recorded.steps, 'step')}: {', '.join(parts)}"


@dataclass(frozen=True)
class Replay:
    """A rule over the trace of a run.

    Attributes:
        root: The run directory.
        scaler: The option of the group ``scaler`` that was replayed.
        words: What was asked for; empty where the run's own rule was.
        learners: In the order in which they step.
        notes: What a reader must know about this run, one sentence each.
    """

    root: Path
    scaler: str
    words: tuple[str, ...]
    learners: tuple[ReplayedLearner, ...]
    notes: tuple[str, ...]


#: Columns of the table, on the page and at a terminal.
COLUMNS: Final = (
    "learner", "", "updates", "skipped", "unknown", "first scale", "least scale", "greatest scale", "last scale",
)  # fmt: skip

CAVEAT: Final = (
    "The gradients are those of the run. Where the replayed rule refuses other updates than the run did, the weights, and "
    "with them all later gradients, would have gone another way."
)


#: The word that names the rule, and what the others begin with.
_RULE: Final = re.compile(r"\+?scaler=")
_SCALER: Final = re.compile(r"^\+?(learners\.[^.=]+\.)?scaler\.?")

#: Characters of a rule and its words in the name of a file.
_LONGEST: Final = 80


def replay_rows(replay: Replay) -> list[list[str]]:
    """Two rows for each learner: recorded and replayed."""
    return [
        [
            learner.name,
            what,
            f"{course.updates:,}",
            f"{course.skipped:,}",
            f"{course.unknown:,}",
            *(scale(value) for value in (course.first, course.lowest, course.highest, course.last)),
        ]
        for learner in replay.learners
        for what, course in (("recorded", learner.recorded), ("replayed", learner.replayed))
    ]


def replay_page(replay: Replay) -> Page:
    """The page of a replay."""
    several = len(replay.learners) > 1
    lead = "; ".join(f"{f'{one.name}: ' if several else ''}{_in_short(one)}" for one in replay.learners)
    return Page(
        over="mptrain, a loss scaling rule over a recorded run",
        title=f"{replay.scaler} over {replay.root.name}",
        status=Cell("the run's own rule" if not replay.words else "another rule than the run's"),
        lead=f"{lead}." if several else f"{lead[0].upper()}{lead[1:]}.",
        sections=(
            section(
                "What it would have done",
                table(COLUMNS, replay_rows(replay), numeric=range(2, 9)),
                _rules(replay),
                plots(_plot(replay)),
            ),
            section("How that is known", *_basis(replay)),
            section("Command", Code(shlex.join(["mptrain", "replay", str(replay.root), *replay.words]), "sh")),
        ),
    )


def _in_short(learner: ReplayedLearner) -> str:
    if learner.parted is None:
        return learner.agreement()
    before, after = learner.recorded, learner.replayed
    if after.unknown == after.steps:
        return f"nothing on record tells what it would have done at any of the {after.steps:,} steps"
    unsure = f" (of {counted(after.unknown, 'step')} nothing is known)" if after.unknown else ""
    return (
        f"it would have skipped {counted(after.skipped, 'update')} where the run skipped {before.skipped:,}{unsure}, and ended at "
        f"a scale of {scale(after.last)} where the run ended at {scale(before.last)}"
    )


def _rules(replay: Replay) -> Block:
    several = len(replay.learners) > 1
    rows = []
    for learner in replay.learners:
        of = f" ({learner.name})" if several else ""
        rows += [(f"recorded{of}", learner.recorded_rule), (f"replayed{of}", learner.rule)]
    return facts(*rows)


def file_name(replay: Replay) -> str:
    """``replay-NAME-KEY-VALUE``, of letters, digits and hyphens: another one for other words; long ones end with a digest."""
    words = [_SCALER.sub(r"\1", word) for word in replay.words if not _RULE.match(word)]
    whole = " ".join([replay.scaler, *masked(words)])
    plain = re.sub("[^A-Za-z0-9]", "-", whole)
    if len(plain) > _LONGEST:
        plain = f"{plain[:_LONGEST]}-{hashlib.sha256(whole.encode(errors='surrogatepass')).hexdigest()[:8]}"
    return f"replay-{plain}"


def _basis(replay: Replay) -> list[Block | None]:
    several = len(replay.learners) > 1
    rows = [
        [one.name, f"{one.recorded.steps:,}", f"{one.known:,}", f"{one.estimated:,}", f"{one.replayed.unknown:,}"]
        for one in replay.learners
    ]
    head = ("learner", "steps", "known", "estimated", "unknown")
    return [
        table(head, rows, numeric=(1, 2, 3, 4)) if several or replay.words else Text(replay.learners[0].basis() + "."),
        Bullets(
            (
                "Known: the step's own records tell. A step that was clean at one scale is clean at every lower one, one that "
                "overflowed does so at every higher one, and histograms of that step have its largest gradient.",
                "Estimated: the steps with histograms before and after it, and the norm of its own gradients, tell; or its own "
                "histograms do, where only a gradient that was kept in FP32 would overflow, or where the run did not compute in "
                "FP16. Where the run has no histograms, the nearest step that was clean at a scale as high, or overflowed at "
                "one as low.",
                "Unknown: nothing tells. The rule goes on as if the step had ended as recorded, and it has no mark in the figure.",
            )
        ),
        Text(CAVEAT),
        Bullets(tuple(f"{note[0].upper()}{note[1:]}." for note in replay.notes), "warn"),
    ]


_RECORDED: Final[dict[str, Any]] = {"color": GREY, "linewidth": 3.2, "alpha": 0.45}
_REPLAYED: Final[dict[str, Any]] = {"color": BLUE, "linewidth": 1.4}
_MARKS: Final[tuple[dict[str, Any], dict[str, Any]]] = (
    {"color": ORANGE, "marker": "v", "markersize": 8},
    {"color": VERMILLION, "marker": "X", "markersize": 5.5},
)


def _plot(replay: Replay) -> Plot:
    """A panel for each learner, steps in common."""
    learners, name = replay.learners, file_name(replay)
    height = 2.8 if len(learners) == 1 else 1.9 * len(learners) + 0.3
    with drawing(name, height) as figure:
        grid = figure.panels(len(learners))
        for axes, learner in zip(grid, learners, strict=True):
            courses = (learner.recorded, learner.replayed)
            for course, style in zip(courses, (_RECORDED, _REPLAYED), strict=True):
                axes.plot(*exponents(course.scales.extremes()), drawstyle="steps-post", **style)
            for course, style in zip(courses, _MARKS, strict=True):
                dots(axes, *exponents(course.marks.extremes()), alpha=0.9, **style)
            power_of_two_y_axis(axes)
            if len(learners) > 1:
                axes.set_title(elided(learner.name, 40))
        ends = [one.recorded.scales.extremes()[0][-1] for one in learners if len(one.recorded.scales)]
        step_axis(grid[-1], max(ends, default=1))
        figure.label("recorded", **_RECORDED)
        figure.label("replayed", **_REPLAYED)
        if any(len(one.recorded.marks) for one in learners):
            figure.label("overflow, recorded", linestyle="none", markeredgewidth=0, **_MARKS[0])
        if any(len(one.replayed.marks) for one in learners):
            figure.label("overflow, replayed", linestyle="none", markeredgewidth=0, **_MARKS[1])
    caption = "Loss scales over steps, recorded and replayed; marks are steps that overflowed, or would have."
    return Plot(name, caption, figure.svg)
