"""Decisions after each validation: early stopping, and the reduction of learning rates on a plateau."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mptrain.engine.evaluate import evaluate
from mptrain.engine.parts import EarlyStoppingState
from mptrain.schedule.plateau import improves
from mptrain.system.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from mptrain.engine.options import EarlyStopping, TrainOptions
    from mptrain.engine.parts import Parts, Progress
    from mptrain.engine.step import Learner
    from mptrain.engine.telemetry import Telemetry
    from mptrain.schedule.plateau import Plateau
    from mptrain.workloads.base.task import Task


def monitored(task: Task, options: EarlyStopping | Plateau) -> tuple[str, bool | None]:
    """Return the name of a monitored metric, and whether higher is better, None if that is not known."""
    name = options.metric or task.metric or "loss"
    if options.mode is not None:
        return name, options.mode == "max"
    if name == task.metric:
        return name, task.higher_is_better
    return name, False if name.split("_")[-1] == "loss" else None


def require_monitored(parts: Parts, train: TrainOptions) -> None:
    """Raise ConfigError if there is no validation data, no monitored metric of the name, or no direction for it.

    A metric that only an evaluation can name is looked for in the evaluation of one batch. All ranks must call this.
    """
    asked: list[tuple[str, EarlyStopping | Plateau]] = [
        (f"{'' if learner.name == 'main' else f'learners.{learner.name}.'}schedule", learner.reduction.rule)
        for learner in parts.learners
        if learner.reduction
    ]
    if train.early_stopping is not None:
        asked.insert(0, ("train.early_stopping", train.early_stopping))
    if asked and "val" not in parts.loaders:
        hint = (
            "choose data with a validation split (dataset.val_share=0.1 holds out samples of image_folder and others), "
            "or another schedule and train.early_stopping=null"
        )
        what = f"needs validation data, and {parts.dataset.name} has none"
        raise ConfigError([Problem(f"{key} {what}", hint) for key, _ in asked])
    problems = []
    found: dict[str, float] = {}
    for key, options in asked:
        name, higher = monitored(parts.task, options)
        if name != parts.task.metric:
            found = found or _metrics_of_one_batch(parts)
        if name != parts.task.metric and name not in found:
            guess = did_you_mean(name, found)
            hint = f"did you mean {key}.metric={guess}?" if guess else f"the validation has {', '.join(found)}"
            problems.append(Problem(f"{key}.metric={name}: the validation has no such metric", hint))
        elif higher is None:
            hint = f"set {key}.mode=max if a higher {name} is better, else {key}.mode=min"
            problems.append(Problem(f"{key}.metric={name}: it is not known whether higher is better", hint))
    if problems:
        raise ConfigError(problems)


def _metrics_of_one_batch(parts: Parts) -> dict[str, float]:
    outcome = evaluate(parts, parts.loaders["val"].first_batch(), "val", 0, 0, stop=lambda: False)
    return outcome.record.metrics if outcome else {}


def early_stop(task: Task, options: EarlyStopping | None, state: EarlyStoppingState) -> str:
    """Return why a run ends early, such as ``top1 did not improve for 5 validations; best 0.99 at epoch 3``, or "".

    Options of None disable it. The state of another metric counts for nothing.
    """
    if options is None or state.bad < options.patience or state.metric != monitored(task, options)[0]:
        return ""
    delta = f" by more than {options.min_delta:g}" if options.min_delta else ""
    best = "it was never finite" if state.best is None else f"best {state.best:.4g} at epoch {state.epoch}"
    span = f"{state.bad} validation{'s' if state.bad > 1 else ''}"
    return f"{state.metric} did not improve{delta} for {span}; {best}"


class Monitor:
    """Observer of validation metrics that ends training early and reduces learning rates, as configured."""

    def __init__(self, parts: Parts, train: TrainOptions, progress: Progress, telemetry: Telemetry) -> None:
        self._parts, self._options = parts, train.early_stopping
        self._progress, self._telemetry = progress, telemetry

    @property
    def stopped(self) -> bool:
        """True if training ends early."""
        return bool(early_stop(self._parts.task, self._options, self._progress.early_stopping))

    def after_validation(self, epoch: int) -> None:
        """Update all states after an epoch's validation. All ranks must call this and use the metrics of rank 0."""
        learners = [learner for learner in self._parts.learners if learner.reduction]
        if self._options is None and not learners:
            return
        metrics = self._parts.comm.broadcast_object(self._progress.last["val"])
        for learner in learners:
            self._reduce(learner, metrics)
        if self._options is not None:
            self._watch(self._options, metrics, epoch)

    def _reduce(self, learner: Learner, metrics: Mapping[str, float]) -> None:
        assert learner.reduction is not None
        rule = learner.reduction.rule
        name, higher = monitored(self._parts.task, rule)
        if learner.reduction.after_validation(name, float(metrics[name]), higher=bool(higher)):
            lr = learner.reduction.lr * learner.reduction.state.factor
            why = f"{name} did not improve for {rule.patience + 1} validations"
            self._telemetry.event("rate_reduced", learner=learner.name, lr=lr, why=why)

    def _watch(self, options: EarlyStopping, metrics: Mapping[str, float], epoch: int) -> None:
        name, higher = monitored(self._parts.task, options)
        state, value = self._progress.early_stopping, float(metrics[name])
        if state.metric != name:
            state = EarlyStoppingState(name)
        if improves(value, state.best, options.min_delta, "abs", higher=bool(higher)):
            state = EarlyStoppingState(name, value, epoch)
        else:
            state = replace(state, bad=state.bad + 1)
        self._progress.early_stopping = state
        if why := early_stop(self._parts.task, options, state):
            self._telemetry.event("stopped_early", why=why)
