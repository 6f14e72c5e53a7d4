"""Runs a loss scaling rule over the trace of a run: what would it have done? Nothing is trained.

The gradients are those of the run. Had other updates been refused, the weights would have gone another way, and with
them the gradients that came later: so what is said here holds for rules that refuse few updates, and near the run's own
scales. Under its own rule a run gives exactly the scales on its record.

A rule computes with tensors, some twenty operators for a step. Its state after a step follows from the state before and from the
verdict alone, and the states of most rules come back: a scale and a count of clean steps below its window. So a state is kept with those
that followed it (`RuleStates`), and the rule itself is asked only about what did not happen before.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mptrain.config.compose import reload
from mptrain.config.schema import Config
from mptrain.config.trust import allow_argument, is_allow_override
from mptrain.errors import DataError, UsageError
from mptrain.inspection.trace import Basis, Trace, read_traces
from mptrain.numerics.measures import Measure
from mptrain.numerics.verdict import Verdict
from mptrain.records import StepRecord
from mptrain.report.formatting import ONE_BECOMES_ALL, counted
from mptrain.report.replay_page import Replay, ReplayedLearner, ScaleTrajectory
from mptrain.report.run_blocks import unfinished_note
from mptrain.runlog.directory import find_run
from mptrain.runlog.run_reader import Run, read_run
from mptrain.scaler.base import Scaler, ScalerState, measure_of
from mptrain.scaler.static import StaticScaler

#: The words that a replay takes.
_SCALER_WORD = re.compile(r"\+?(learners\.[^.=]+\.)?scaler(\.[^=]+)?=")


def replay_run(run: str, overrides: Sequence[str]) -> Replay:
    """Run a rule over the recorded steps of a run.

    Args:
        run: The run directory, or ``last``.
        overrides: ``scaler=NAME`` and ``scaler.KEY=VALUE``; without any, the run's own rule is replayed.

    Raises:
        UsageError: A word that is about something else.
        DataError: There are no steps, or the rule needs to know what is not on record.
        MptrainError: No such run, damaged records, or a rule that cannot be had.
    """
    trusted = [word for word in overrides if is_allow_override(word)]
    overrides = [word for word in overrides if word not in trusted]
    for word in overrides:
        if not _SCALER_WORD.match(word):
            raise UsageError(f"'{word}' is not about the scaler", "write scaler=NAME or scaler.KEY=VALUE")
    directory = find_run(run)
    text = directory.read_config()
    own, config = reload(text, trusted), reload(text, [*overrides, *trusted])
    recorded = read_run(directory.root)
    # A run's own rule saw the verdicts of its own format; another rule is asked about in FP16.
    traces, steps = read_traces(recorded, half=own.precision.compute == "float16" or not overrides)
    walks: dict[str, _Walk] = {}
    with torch.inference_mode():  # less work for each of the rules' many small operators
        for record in steps:
            if record.learner not in walks:
                walks[record.learner] = _Walk(record.learner, own, config, traces[record.learner])
            walks[record.learner].take(record)
    if not walks:
        raise DataError(f"{directory.root} has no step on record", "train it for some steps first")
    if unknown := [name for name in config.learners if name not in walks]:
        raise UsageError(f"the run has no learner '{unknown[0]}'", f"it has {', '.join(walks)}")
    learners = tuple(walk.done() for walk in walks.values())
    notes = _notes(own, recorded, dead=directory.holder() is None)
    untold = sum(one.replayed.unknown for one in learners)
    if untold:
        notes.append(_nothing_tells(directory.root, untold, allow_argument(config.extensions.allow)))
    elif any(one.estimated for one in learners) and not any(one.tells_gradients() for one in traces.values()):
        notes.append(_NO_HISTOGRAMS)
    if any(one.stuck for one in learners):
        notes.append(ONE_BECOMES_ALL)
    return Replay(
        root=directory.root,
        scaler=config.chosen.get("scaler", "own"),
        words=tuple(overrides),
        learners=learners,
        notes=tuple(notes),
    )


_NO_HISTOGRAMS = (
    "the run has no histograms: where a step's verdict at another scale does not follow from its own, only its neighbours "
    "can tell; diagnostics=histograms records more"
)


def _nothing_tells(root: Path, steps: int, trust: str) -> str:
    return (
        f"nothing on record tells what {counted(steps, 'step')} would have done at another scale: they count as unknown, and "
        f"the rule goes on as if they had ended as recorded; mptrain diagnose {shlex.quote(str(root))}{trust} does one of them again at "
        "other scales, and a run with diagnostics=histograms, at a scale at which most steps are clean, tells of all"
    )


def _notes(own: Config, run: Run, dead: bool) -> list[str]:
    notes = []
    if run.state.status == "running":
        notes.append(unfinished_note(dead))
    if own.precision.compute != "float16":
        notes.append(
            f"the run computed in {own.precision.compute}, whose range is wider: what FP16 would have done is at best "
            "estimated from its gradients"
        )
    for attempt in run.state.attempts:
        if changes := [change for change in attempt.changes if re.match(r"(learners\.[^.]+\.)?scaler", change)]:
            notes.append(
                f"the run's rule was changed after step {attempt.from_step:,} ({'; '.join(changes)}): one rule is replayed "
                "from the first step on"
            )
    return notes


_CPU = torch.device("cpu")

#: States that are kept at most, and ways from one to the next; fairseq's rule has a window of 16,384 steps, at each of a few scales.
_MOST: Final = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class RuleState:
    """A rule's state.

    Attributes:
        tensors: As the rule has it.
        scale: Its loss scale.
    """

    tensors: ScalerState
    scale: float


class RuleStates:
    """The states of one rule.

    Args:
        scaler: The rule; it sees tensors of the CPU.
    """

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._known: dict[str, RuleState] = {}
        self._following: dict[tuple[RuleState, bool, float], RuleState] = {}
        self.first = self._state(scaler.initial(_CPU))

    def after(self, state: RuleState, overflow: bool, grad_norm: float, measured: float) -> RuleState:
        """Return the state after a step, exactly as the rule computes it.

        Args:
            state: Before the step.
            overflow: Whether the step overflowed.
            grad_norm: Norm of its unscaled gradients, if it did not.
            measured: What the rule measured of its gradients; `math.nan` where it measured nothing.
        """
        found = self._following.get((state, overflow, measured))
        if found is None:
            verdict = _verdict(overflow, math.inf if overflow else grad_norm, state.scale, measured)
            if _MOST in (len(self._known), len(self._following)):  # let go of all but the one in use
                self._known.clear()
                self._following.clear()
            found = self._state(self._scaler.after(state.tensors, verdict))
            if not verdict.norm_was_read:  # else what follows depends on more than what it is kept by
                self._following[state, overflow, measured] = found
        return found

    def _state(self, tensors: ScalerState) -> RuleState:
        name = repr([(key, value.dtype, value.tolist()) for key, value in tensors.items()])
        return self._known.setdefault(name, RuleState(tensors, float(tensors["scale"])))


class _Verdict(Verdict):
    """A verdict that notes whether the norms, which are others at every step, were read."""

    norm_was_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("grad_norm", "norms"):
            self.norm_was_read = True
        return super().__getattribute__(name)

    def __getitem__(self, place: Any) -> Any:
        self.norm_was_read = True
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        self.norm_was_read = True
        return super().__iter__()


def _verdict(overflow: bool, grad_norm: float, scale: float, measured: float) -> _Verdict:
    """As the step would have judged it; of the gradients' norms only the one of all is on record."""
    return _Verdict(
        *_JUDGED[overflow], grad_norm=_one(grad_norm), norms=_one(grad_norm * scale), measured=_one(measured)
    )


def _one(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([value], dtype=dtype, device=_CPU)


#: Overflow, applied and skip of a clean step and of one that overflowed.
_JUDGED: Final = {
    overflow: (_one(overflow, torch.bool), _one(not overflow, torch.bool), _one(overflow, torch.float32))
    for overflow in (False, True)
}


class _Walk:
    """One learner's rule on its way through the steps."""

    def __init__(self, name: str, own: Config, config: Config, trace: Trace) -> None:
        self._name = name
        self._scaler: Scaler = config.for_learner(name).scaler.build()
        self._own_words = own.for_learner(name).scaler.build().describe()
        self._measure: Measure | None = measure_of(self._scaler)
        self._trace = trace
        self._states = RuleStates(self._scaler)
        self._state = self._states.first
        self._recorded, self._replayed, self._counts = ScaleTrajectory(), ScaleTrajectory(), Counter[Basis]()
        self._parted: int | None = None
        self._same = 0

    def take(self, record: StepRecord) -> None:
        """The rule's verdict on the next step, and its next scale."""
        scale = self._state.scale
        overflow, basis = self._trace.would_overflow(record, scale)
        measured = math.nan
        if self._measure is not None and not overflow:
            found = self._trace.measured(self._measure, record.step, scale)
            if found is None:
                raise self._unmeasured()
            measured = found[0]
            basis = basis if basis == "unknown" or found[1] == "known" else found[1]
        self._counts[basis] += 1
        if scale == record.loss_scale:
            self._same += 1
        elif self._parted is None:
            self._parted = record.step
        self._recorded.add(record.step, record.loss_scale, record.overflow, record.skipped)
        if basis == "unknown":
            self._replayed.pass_over(record.step, scale)
        else:
            self._replayed.add(record.step, scale, overflow, overflow and self._scaler.on_overflow == "skip")
        self._state = self._states.after(self._state, overflow, record.grad_norm, measured)

    def done(self) -> ReplayedLearner:
        """Return the result."""
        counts = self._counts
        return ReplayedLearner(
            name=self._name,
            recorded_rule=self._own_words,
            rule=self._scaler.describe(),
            recorded=self._recorded,
            replayed=self._replayed,
            known=counts["known"],
            estimated=counts["estimated"],
            same=self._same,
            parted=self._parted,
            constant=isinstance(self._scaler, StaticScaler),
        )

    def _unmeasured(self) -> DataError:
        if self._trace.tells_gradients():
            return DataError(
                f"the rule ({self._scaler.describe()}) measures gradients in a way of its own, which no record tells",
                "train with that rule instead",
            )
        missing = "no clean step has histograms" if self._trace.looked_at else "the run has no histograms"
        return DataError(
            f"the rule ({self._scaler.describe()}) measures gradients, and {missing}",
            "train with diagnostics=histograms diagnostics.every=1, which puts them on record",
        )
