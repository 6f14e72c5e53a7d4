"""Replay of a loss scaling rule over the recorded steps of a run, without training, for ``mptrain replay``.

The gradients are those of the run. If a rule skipped other updates, the weights and all later gradients would differ.
Results are therefore reliable for rules that skip few updates and stay near the scales of the run. The run's own rule
reproduces the recorded scales exactly.

A rule computes with tensors, about twenty operators per step. Its next state depends only on the present state and the
verdict (the result of the overflow check), and most rules revisit the same states: a scale, and a count of clean steps
below the growth interval. `RuleStates` therefore caches transitions, and calls the rule only for new ones.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mptrain.config.compose import command_with, is_allow_override, reload, reload_watched
from mptrain.config.config_diff import flat
from mptrain.config.schema import Config
from mptrain.lab.pages.loss_scale_pages import Replay, ReplayedLearner, ScaleTrajectory
from mptrain.lab.trace import Basis, Trace, read_traces
from mptrain.numerics.overflow_check import Measure, Verdict
from mptrain.report.forecast_blocks import ONE_BECOMES_ALL
from mptrain.report.run_blocks import histogram_words, is_watched, unfinished_note
from mptrain.run.build.parts import build_scaler
from mptrain.runlog.directory import find_run
from mptrain.runlog.run_reader import Run, read_run
from mptrain.scaler.base import Scaler, ScalerState
from mptrain.scaler.static import StaticScaler
from mptrain.system.errors import DataError, UsageError
from mptrain.system.records import StepRecord
from mptrain.system.words import counted

#: The overrides that a replay accepts.
_SCALER_WORD = re.compile(r"\+?(learners\.[^.=]+\.)?scaler(\.[^=]+)?=")


def replay_run(run: str, overrides: Sequence[str]) -> Replay:
    """Return the loss scales that a loss scaling rule would have used in the recorded steps of a run.

    Args:
        run: The run directory, or ``last``.
        overrides: ``scaler=NAME`` and ``scaler.KEY=VALUE``, for one learner with the prefix ``learners.NAME.``. Without
            any, the run's own rule is replayed.

    Returns:
        Recorded and replayed scales, overflows and skipped updates of each learner, with notes on their reliability.

    Raises:
        UsageError: An override is not about the scaler, or about a learner that the run does not have.
        DataError: The run has no recorded steps, or the rule needs measurements that were not recorded.
        MptrainError: The run does not exist, its records are damaged, or the rule is invalid.
    """
    trusted = [word for word in overrides if is_allow_override(word)]
    overrides = [word for word in overrides if word not in trusted]
    for word in overrides:
        if not _SCALER_WORD.match(word):
            raise UsageError(f"'{word}' is not about the scaler", "set scaler=NAME or scaler.KEY=VALUE")
    directory = find_run(run)
    text = directory.read_config()
    recorded = read_run(directory.root)
    settings = flat(text)
    load = reload_watched if is_watched(settings) else reload
    own, config = load(text, trusted), load(text, [*overrides, *trusted])
    # The run's own rule saw verdicts in the run's format; any other rule is replayed for FP16.
    traces, steps = read_traces(recorded, half=own.precision.compute == "float16" or not overrides)
    walks: dict[str, _Walk] = {}
    with torch.inference_mode():  # less overhead for the many small operators of a rule
        for record in steps:
            if record.learner not in walks:
                walks[record.learner] = _Walk(
                    record.learner, own, config, traces[record.learner], histogram_words(settings, 1)
                )
            walks[record.learner].take(record)
    if not walks:
        raise DataError(f"{directory.root} has no recorded steps", "train it for some steps first")
    if unknown := [name for name in config.learners if name not in walks]:
        raise UsageError(f"the run has no learner '{unknown[0]}'", f"it has {', '.join(walks)}")
    if is_watched(settings) and len(walks) > 1:
        raise DataError(
            f"the loop has one loss scaler for {' and '.join(sorted(walks))}, and a replay follows one optimizer",
            "mptrain report shows the recorded loss scales",
        )
    learners = tuple(walk.done() for walk in walks.values())
    notes = _notes(own, recorded, dead=directory.holder() is None)
    untold = sum(learner.replayed.unknown for learner in learners)
    if untold:
        notes.append(_nothing_tells(directory.root, untold, config.extensions.allow, settings))
    elif any(learner.estimated for learner in learners) and not any(
        trace.tells_gradients() for trace in traces.values()
    ):
        notes.append(_no_histograms(settings))
    if any(learner.stuck for learner in learners):
        notes.append(ONE_BECOMES_ALL)
    return Replay(
        root=directory.root,
        scaler=config.chosen.get("scaler", "own"),
        words=tuple(overrides),
        learners=learners,
        notes=tuple(notes),
    )


def _no_histograms(settings: Mapping[str, Any]) -> str:
    return (
        "the run has no histograms of clean steps: if the outcome of a step at another scale does not follow from its "
        f"own outcome, it is estimated from neighbouring steps; train with {histogram_words(settings)} for better "
        "estimates"
    )


def _nothing_tells(root: Path, steps: int, packages: Sequence[str], settings: Mapping[str, Any]) -> str:
    line = command_with(f"mptrain diagnose {shlex.quote(str(root))}", packages)
    repeats = "" if is_watched(settings) else f"; {line} repeats one of them at other scales"
    return (
        f"the records do not show how {counted(steps, 'step')} would have ended at another scale: they count as "
        f"unknown, and the rule continues as if they had ended as recorded{repeats}; a run with "
        f"{histogram_words(settings)}, at a scale at which most steps are clean, records enough for all of them"
    )


def _notes(own: Config, run: Run, dead: bool) -> list[str]:
    notes = []
    if run.state.status == "running":
        notes.append(unfinished_note(dead))
    if own.precision.compute != "float16":
        notes.append(
            f"the run computed in {own.precision.compute}, whose range is wider than that of FP16: overflows in FP16 "
            "are at best estimated from its gradients"
        )
    for attempt in run.state.attempts:
        if changes := [change for change in attempt.changes if re.match(r"(learners\.[^.]+\.)?scaler", change)]:
            notes.append(
                f"the run's rule was changed after step {attempt.from_step:,} ({'; '.join(changes)}): the replay uses "
                "one rule from the first step on"
            )
    return notes


_CPU = torch.device("cpu")

#: Maximum number of cached states and of cached transitions. fairseq's rule has a growth interval of 16,384 steps at
#: each of a few scales.
_MOST: Final = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class RuleState:
    """State of a loss scaling rule between two steps.

    Attributes:
        tensors: State tensors of the rule by name, each of shape (1,) on the CPU.
        scale: Loss scale of the next step in this state.
    """

    tensors: ScalerState
    scale: float


class RuleStates:
    """Memoised transitions of one loss scaling rule, which runs on the CPU.

    Equal states and outcomes of a step give equal next states, so each transition is computed once. ``first`` is the
    state before the first step.
    """

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._known: dict[str, RuleState] = {}
        self._following: dict[tuple[RuleState, bool, float], RuleState] = {}
        self.first = self._state(scaler.initial(_CPU))

    def after(self, state: RuleState, overflow: bool, grad_norm: float, measured: float) -> RuleState:
        """Return the state of the rule after a training step, exactly as the rule computes it.

        ``grad_norm`` is the L2 norm of the unscaled gradients, if the step did not overflow; ``measured`` is the
        measurement of the gradients that the rule requests, `math.nan` if it requests none.
        """
        next_state = self._following.get((state, overflow, measured))
        if next_state is None:
            verdict = _verdict(overflow, math.inf if overflow else grad_norm, state.scale, measured)
            if _MOST in (len(self._known), len(self._following)):  # clear the cache; the caller keeps the state in use
                self._known.clear()
                self._following.clear()
            next_state = self._state(self._scaler.after(state.tensors, verdict))
            if not verdict.norm_was_read:  # otherwise the next state depends on more than the cache key
                self._following[state, overflow, measured] = next_state
        return next_state

    def _state(self, tensors: ScalerState) -> RuleState:
        name = repr([(key, value.dtype, value.tolist()) for key, value in tensors.items()])
        return self._known.setdefault(name, RuleState(tensors, float(tensors["scale"])))


class _Verdict(Verdict):
    """Result of an overflow check that records whether a rule read the norms: such a transition cannot be cached."""

    norm_was_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("grad_norm", "norms"):
            self.norm_was_read = True
        return super().__getattribute__(name)

    def __getitem__(self, index: Any) -> Any:
        self.norm_was_read = True
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.norm_was_read = True
        return super().__iter__()


def _verdict(overflow: bool, grad_norm: float, scale: float, measured: float) -> _Verdict:
    """Return the overflow check's result for a replayed step; it has only the global norm, as recorded."""
    return _Verdict(
        *_JUDGED[overflow], grad_norm=_one(grad_norm), norms=_one(grad_norm * scale), measured=_one(measured)
    )


def _one(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([value], dtype=dtype, device=_CPU)


#: The fields overflow, applied and skip of the verdict, by whether the step overflowed.
_JUDGED: Final = {
    overflow: (_one(overflow, torch.bool), _one(not overflow, torch.bool), _one(overflow, torch.float32))
    for overflow in (False, True)
}


class _Walk:
    """Replay of the loss scaling rule of one learner."""

    def __init__(self, name: str, own: Config, config: Config, trace: Trace, with_histograms: str) -> None:
        self._name, self._with_histograms = name, with_histograms
        self._scaler = build_scaler(config.for_learner(name).scaler)
        self._own_words = build_scaler(own.for_learner(name).scaler).describe()
        self._measure: Measure | None = self._scaler.measure
        self._trace = trace
        self._states = RuleStates(self._scaler)
        self._state = self._states.first
        self._recorded, self._replayed, self._counts = ScaleTrajectory(), ScaleTrajectory(), Counter[Basis]()
        self._parted: int | None = None
        self._same = 0

    def take(self, record: StepRecord) -> None:
        """Replay the next recorded step of the learner."""
        scale = self._state.scale
        overflow, basis = self._trace.would_overflow(record, scale)
        measured = math.nan
        if self._measure is not None and not overflow:
            measurement = self._trace.measured(self._measure, record.step, scale)
            if measurement is None:
                raise self._unmeasured()
            measured = measurement[0]
            basis = basis if basis == "unknown" or measurement[1] == "known" else measurement[1]
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
                f"the rule ({self._scaler.describe()}) uses its own measure of gradients, which is not recorded",
                "train with that rule instead",
            )
        missing = "no clean step has histograms" if self._trace.looked_at else "the run has no histograms"
        return DataError(
            f"the rule ({self._scaler.describe()}) measures gradients, and {missing}",
            f"train with {self._with_histograms}, which records them",
        )
