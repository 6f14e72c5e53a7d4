"""Reports on other loss scales: a recommended static scale, and what another loss-scaling rule would have chosen.

A replay feeds the overflows and gradients that a run recorded to the rule. It trains nothing.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mptrain.report.forecast_blocks import MeasuredScales, forecast_plot, forecast_table, reasons, recommendation
from mptrain.report.gradient_histogram_blocks import forecasts, read_histograms
from mptrain.report.page import (
    Block,
    Bullets,
    Cell,
    Code,
    Facts,
    Fold,
    Page,
    Plot,
    Section,
    Table,
    Text,
    facts,
    plots,
    section,
    table,
)
from mptrain.report.plotting import (
    BLUE,
    GREY,
    ORANGE,
    VERMILLION,
    drawing,
    power_of_two_y_axis,
    step_axis,
)
from mptrain.report.run_blocks import (
    OpenedRun,
    commands,
    environment,
    histogram_words,
    open_with_history,
    unfinished_note,
)
from mptrain.report.run_history import EXTREMES, MARK, MOST_BUCKETS, MOST_MARKS, Curve, in_groups
from mptrain.study.pages.sweep_points import differences, read_measured
from mptrain.system.errors import StorageError
from mptrain.system.masking import masked
from mptrain.system.words import counted, elided, listed, scale

if TYPE_CHECKING:
    from mptrain.numerics.forecast import Forecast


#: Maximum number of differing keys that are named.
_NAMED: Final = 6

#: Config sections whose keys are named first.
_FIRST: Final = ("model", "dataset", "task", "train")


@dataclass(frozen=True)
class Recommendation:
    """Static FP16 loss scales recommended for a run from its gradient histograms, with all that its report shows.

    Attributes:
        forecasts: The forecast of each learner, by name.
        measured: The measurements of a sweep over loss scales; None without one.
        sweep: The folder of that sweep.
        notes: Notes about unreadable records and about a run that has not ended.
    """

    opened: OpenedRun
    forecasts: dict[str, Forecast]
    measured: MeasuredScales | None
    sweep: Path | None
    notes: tuple[str, ...]

    @property
    def unlike(self) -> str:
        """Warning that names the configuration keys in which the sweep differs from this run; empty if it does not."""
        differing = differences(self.measured, self.opened.run.config) if self.measured else {}
        if not differing:
            return ""
        ordered = sorted(differing.items(), key=_weight)
        named = [f"{key} is {own} in the run, {theirs} in the sweep" for key, (own, theirs) in ordered]
        return (
            "The sweep's configuration differs from this run, so its measurements may not apply: "
            f"{listed(named, _NAMED, '; ')}."
        )

    def sentences(self) -> list[str]:
        """Return the recommended loss scale of each learner in words, with learner names if there are several."""
        several = len(self.forecasts) > 1
        return [
            (f"{name}: " if several else "") + recommendation(forecast, self.opened, name if several else "")
            for name, forecast in self.forecasts.items()
        ]

    def __str__(self) -> str:
        """Return the recommendation of each learner with its reasons, and the notes, as lines of text."""
        pairs = zip(self.sentences(), self.forecasts, strict=True)
        lines = [line for sentence, name in pairs for line in (sentence, *(f"  {why}" for why in self.reasons(name)))]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def reasons(self, learner: str) -> list[str]:
        """Return the reasons for the loss scale recommended for a learner, as sentences."""
        return reasons(self.forecasts[learner])

    def table(self, learner: str) -> Table | None:
        """Return a learner's table with a row for each static loss scale, or None if nothing can be forecast."""
        forecast = self.forecasts[learner]
        return forecast_table(forecast, self.measured) if forecast.scales else None


def recommend(path: str | Path, sweep: str | Path | None = None) -> Recommendation:
    """Recommend static FP16 loss scales for a run, or a loop that `mptrain.watch` recorded, from gradient histograms.

    ``str`` of the result is text for people. Nothing is written, and torch is not imported.

    Args:
        path: The run directory.
        sweep: Folder of a sweep over static scales whose results are shown beside the forecast.

    Raises:
        StorageError: The path is not a run or has no histograms, or the sweep is none or has no static scales.
    """
    path, sweep = Path(path), None if sweep is None else Path(sweep)
    measured = read_measured(sweep) if sweep is not None else None
    opened = open_with_history(path, MOST_BUCKETS)
    running = opened.run.state.status == "running"
    notes = [unfinished_note(opened.dead)] if running else []
    notes += [opened.history.not_finite_elsewhere] if opened.history.not_finite_elsewhere else []
    damages: list[str] = []
    histograms = read_histograms(opened.run, damages)
    if not histograms:
        again = "restore the file from a backup, or train again" if damages else "train it"
        hint = f"{again} with {histogram_words(opened.settings)}"
        raise StorageError(f"{path} has no histograms{': ' + damages[0] if damages else ''}", hint)
    return Recommendation(opened, forecasts(opened.run, histograms), measured, sweep, (*notes, *damages))


def forecast_page(recommended: Recommendation) -> Page:
    """Return the report of the static loss scales recommended for a run; its last section is the run."""
    opened = recommended.opened
    return Page(
        over="mptrain recommended loss scale",
        title=opened.title(),
        status=Cell(""),
        lead=" ".join(recommended.sentences()),
        sections=(
            *(_learner(recommended, name) for name in recommended.forecasts),
            section("Notes", Bullets(recommended.notes, "warn")),
            section("Run", environment(opened.run, opened.settings), *commands(opened.run)),
        ),
    )


def _weight(difference: tuple[str, tuple[str, str]]) -> int:
    section_of = difference[0].split(".")[0]
    return _FIRST.index(section_of) if section_of in _FIRST else len(_FIRST)


def _learner(recommended: Recommendation, name: str) -> Section:
    several = len(recommended.forecasts) > 1
    figure = f"forecast-{name}" if several else "forecast"
    whose = f", {name}" if several else ""
    shown = forecast_plot(figure, recommended.forecasts[name], whose, recommended.measured)
    return section(
        f"Static scales for {name}" if several else "Static scales",
        Bullets(tuple(recommended.reasons(name))),
        plots(shown),
        recommended.table(name),
        Text(recommended.unlike, "warn") if recommended.unlike else None,
    )


@dataclass
class ScaleTrajectory:
    """Course of the loss scale over a run's steps, with the numbers of updates, skips and overflows.

    It is either recorded, or replayed with another loss-scaling rule.

    Attributes:
        scales: Loss scales over steps; ``first``, ``lowest``, ``highest`` and ``last`` are single ones.
        marks: Loss scales of the steps that overflowed.
        steps: Number of attempted steps.
        unknown: Number of steps whose overflow is unknown. They count neither as updates nor as skipped.
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
        """Add a step whose outcome is known or estimated."""
        self._at(step, loss_scale)
        self.updates += not skipped
        self.skipped += skipped
        if overflow:
            self.overflows += 1
            self.marks.add(step, loss_scale)

    def pass_over(self, step: int, loss_scale: float) -> None:
        """Add a step of which only the loss scale is known, not whether a gradient overflowed at that scale."""
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
    """Recorded and replayed loss scales of one learner of a run.

    Attributes:
        recorded_rule: Description of the run's own loss-scaling rule; ``rule`` is that of the replayed one.
        known: Number of steps whose overflow follows from the records of the same step.
        estimated: Number of steps whose overflow is estimated from nearby steps or from a format other than FP16.
        same: Number of steps at which the replayed scale equals the recorded one.
        parted: The first step at which the scales differ; None if they never do.
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
        """True if the replayed loss scale is constant, differs from the run's own, and skips updates.

        An overflow can then recur at every step, because a skipped update leaves the weights unchanged.
        """
        return self.constant and self.parted is not None and self.replayed.skipped > 0

    def agreement(self) -> str:
        """Return a clause on the number of steps at which the replayed loss scale equals the recorded one."""
        steps = self.recorded.steps
        if self.parted is None:
            return f"its scale equals the recorded one at all {steps:,} steps"
        if self.same == 0:
            return f"its scale differs from the recorded one at all {steps:,} steps"
        return (
            f"its scale equals the recorded one at {self.same:,} of {steps:,} steps and first differs at step "
            f"{self.parted:,}"
        )

    def basis(self) -> str:
        """Return a clause on the number of steps whose outcome in the replay is known, estimated and unknown."""
        counts = {"known": self.known, "estimated": self.estimated, "unknown": self.replayed.unknown}
        parts = [f"{count:,} {how}" for how, count in counts.items() if count]
        return f"outcomes of {counted(self.recorded.steps, 'step')}: {', '.join(parts)}"


@dataclass(frozen=True)
class Replay:
    """A loss-scaling rule replayed on the records of a run: the scales that it would have chosen.

    Attributes:
        scaler: The replayed option of the config group ``scaler``.
        words: The overrides of the replay; empty for the run's own rule.
        learners: The learners in stepping order.
        notes: Caveats about this run, one sentence each.
    """

    root: Path
    scaler: str
    words: tuple[str, ...]
    learners: tuple[ReplayedLearner, ...]
    notes: tuple[str, ...]


_COLUMNS: Final = (
    "learner", "", "updates", "skipped", "unknown", "first scale", "lowest scale", "highest scale", "last scale",
)  # fmt: skip

_CAVEAT: Final = (
    "The gradients are those recorded by the run. If the replayed rule skips other updates than the run did, a real "
    "run would have had other weights, and therefore other gradients, from there on."
)


#: The override that selects the rule, and the prefix of the others.
_RULE: Final = re.compile(r"\+?scaler=")
_SCALER: Final = re.compile(r"^\+?(learners\.[^.=]+\.)?scaler\.?")

#: Maximum characters of a rule and its overrides in a file name.
_LONGEST: Final = 80


def replay_page(replay: Replay) -> Page:
    """Return the report of a loss-scaling rule that was replayed on a run; its last section is the command."""
    several = len(replay.learners) > 1
    lead = "; ".join(f"{f'{learner.name}: ' if several else ''}{_in_short(learner)}" for learner in replay.learners)
    return Page(
        over="mptrain replay of a loss scaling rule",
        title=f"{replay.scaler} on {replay.root.name}",
        status=Cell("the run's own rule" if not replay.words else "another rule"),
        lead=f"{lead}." if several else f"{lead[0].upper()}{lead[1:]}.",
        sections=(
            section("Recorded and replayed loss scales", _table(replay), _facts(replay), plots(_plot(replay))),
            section("Evidence", *_evidence(replay)),
            section("Command", Code(shlex.join(["mptrain", "replay", str(replay.root), *replay.words]), "sh")),
        ),
    )


def _table(replay: Replay) -> Table:
    """Return the table with two rows for each learner, recorded and replayed."""
    rows = [
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
    return table(_COLUMNS, rows, numeric=range(2, 9))


def _in_short(learner: ReplayedLearner) -> str:
    if learner.parted is None:
        return learner.agreement()
    before, after = learner.recorded, learner.replayed
    if after.unknown == after.steps:
        return f"the records do not show what it would have done at any of the {after.steps:,} steps"
    unsure = f" ({counted(after.unknown, 'step')} unknown)" if after.unknown else ""
    return (
        f"it would have skipped {counted(after.skipped, 'update')}{unsure} and ended at a loss scale of "
        f"{scale(after.last)}; the run skipped {before.skipped:,} and ended at {scale(before.last)}"
    )


def _facts(replay: Replay) -> Facts:
    rows = []
    for learner in replay.learners:
        of = f" ({learner.name})" if len(replay.learners) > 1 else ""
        texts = {
            "recorded": learner.recorded_rule,
            "replayed": learner.rule,
            "found": learner.agreement() if learner.parted is not None else "",
            "known": learner.basis(),
        }
        rows += [(f"{head}{of}", text) for head, text in texts.items()]
    return facts(*rows)


def file_name(replay: Replay) -> str:
    """Return the file name of a replay's report without its suffix: ``replay-NAME-KEY-VALUE``.

    It has letters, digits and hyphens. A long name is cut and ends with a digest.
    """
    words = [_SCALER.sub(r"\1", word) for word in replay.words if not _RULE.match(word)]
    whole = " ".join([replay.scaler, *masked(words)])
    plain = re.sub("[^A-Za-z0-9]", "-", whole)
    if len(plain) > _LONGEST:
        plain = f"{plain[:_LONGEST]}-{hashlib.sha256(whole.encode(errors='surrogatepass')).hexdigest()[:8]}"
    return f"replay-{plain}"


def _evidence(replay: Replay) -> list[Block | None]:
    meanings = Bullets(
        (
            "Known: decided by the step's own records. A step without overflow at one scale has none at any lower "
            "scale, a step that overflowed also overflows at any higher scale, and histograms of the step contain "
            "its largest gradient.",
            "Estimated: decided by the sampled steps before and after the step and by its own gradient norm; or by "
            "its own histograms if only a gradient kept in FP32 would overflow, or if the run did not compute in "
            "FP16. Without histograms, decided by the nearest step without overflow at a scale as high or higher, "
            "or with overflow at a scale as low or lower.",
            "Unknown: not decided by any record. The rule continues as if the step had ended as recorded, and the "
            "figure has no mark for the step.",
        )
    )
    differs = any(learner.parted is not None for learner in replay.learners)
    return [
        Fold("Known, estimated and unknown outcomes", (meanings,)),
        Text(_CAVEAT) if differs else None,
        Bullets(tuple(f"{note[0].upper()}{note[1:]}." for note in replay.notes), "warn"),
    ]


_RECORDED: Final[dict[str, Any]] = {"color": GREY, "linewidth": 3.2, "alpha": 0.45}
_REPLAYED: Final[dict[str, Any]] = {"color": BLUE, "linewidth": 1.4}
_NAMES: Final = ("recorded", "replayed")
_NO_LINE: Final[dict[str, Any]] = {"linestyle": "none", "markeredgewidth": 0}
_MARKS: Final[tuple[dict[str, Any], dict[str, Any]]] = (
    {"color": ORANGE, "marker": "v", "markersize": 8},
    {"color": VERMILLION, "marker": "X", "markersize": 5.5},
)


def _plot(replay: Replay) -> Plot:
    learners, name = replay.learners, file_name(replay)
    height = 2.8 if len(learners) == 1 else 1.9 * len(learners) + 0.3
    with drawing(name, height) as figure:
        grid = figure.panels(len(learners))
        for axes, learner in zip(grid, learners, strict=True):
            courses = (learner.recorded, learner.replayed)
            for course, style, which in zip(courses, (_RECORDED, _REPLAYED), _NAMES, strict=True):
                figure.line(axes, which, course.scales.extremes(), powers=True, drawstyle="steps-post", **style)
            for course, style, which in zip(courses, _MARKS, _NAMES, strict=True):
                marks = course.marks.extremes()
                figure.line(axes, f"overflow, {which}", marks, powers=True, alpha=0.9, **_NO_LINE, **style)
            power_of_two_y_axis(axes)
            if len(learners) > 1:
                axes.set_title(elided(learner.name, 40))
        ends = [learner.recorded.scales.extremes()[0][-1] for learner in learners if len(learner.recorded.scales)]
        step_axis(grid[-1], max(ends, default=1))
        figure.label(_NAMES[0], **_RECORDED)
        figure.label(_NAMES[1], **_REPLAYED)
        if any(len(learner.recorded.marks) for learner in learners):
            figure.label("overflow, recorded", **_NO_LINE, **_MARKS[0])
        if any(len(learner.replayed.marks) for learner in learners):
            figure.label("overflow, replayed", **_NO_LINE, **_MARKS[1])
    caption = "Recorded and replayed loss scales over steps. Marks show recorded and replayed overflows."
    drawn = [course for learner in learners for course in (learner.recorded, learner.replayed)]
    caption += in_groups([course.scales for course in drawn], EXTREMES)
    caption += in_groups([course.marks for course in drawn], MARK)
    return Plot(name, caption, figure.svg, figure.charts)
