"""Evaluation of a run after each epoch and training, and the decisions that follow: early stopping and plateaus."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.engine.evaluate import evaluate, undone
from mptrain.engine.exhibit import keep_exhibits
from mptrain.engine.options import StepView
from mptrain.engine.progress import EarlyStoppingState
from mptrain.schedule.plateau import improves
from mptrain.system.errors import ConfigError, Problem, did_you_mean
from mptrain.system.records import EpochRecord

if TYPE_CHECKING:
    from mptrain.engine.options import EarlyStopping, OnStep, Options, StopFunction, TrainOptions
    from mptrain.engine.parts import Parts
    from mptrain.engine.progress import Progress
    from mptrain.engine.step import Learner
    from mptrain.engine.telemetry import Telemetry
    from mptrain.schedule.plateau import Plateau
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.task import Task


def monitored(task: Task, options: EarlyStopping | Plateau) -> tuple[str, bool | None]:
    """Return the name of a monitored metric, and whether higher is better, None if that is not known."""
    name = options.metric or task.metric or "loss"
    if options.mode is not None:
        return name, options.mode == "max"
    if name == task.metric:
        return name, task.higher_is_better
    return name, False if name.split("_")[-1] == "loss" else None


def require_monitored(parts: Parts, train: TrainOptions, *, stop: bool = False) -> None:
    """Raise ConfigError if there is no validation data, no monitored metric of the name, or no direction for it.

    ``stop`` says that a function of the program is to be asked after each validation.

    A metric that only an evaluation can name is looked for in the evaluation of one batch. All ranks must call this.
    """
    asked: list[tuple[str, EarlyStopping | Plateau]] = [
        (f"{'' if learner.name == 'main' else f'learners.{learner.name}.'}schedule", learner.reduction.rule)
        for learner in parts.learners
        if learner.reduction
    ]
    if train.early_stopping is not None:
        asked.insert(0, ("train.early_stopping", train.early_stopping))
    keys = [*(["stop="] if stop else []), *(key for key, _ in asked)]
    if keys and "val" not in parts.loaders:
        hint = (
            "give validation data (in Python data={'train': ..., 'val': ...}; dataset.val_share=0.1 holds out samples "
            "of image_folder and others), or choose another schedule and train.early_stopping=null"
        )
        what = f"needs validation data, and {parts.dataset.name} has none"
        raise ConfigError([Problem(f"{key} {what}", hint) for key in keys])
    problems = []
    metrics: dict[str, float] = {}
    for key, options in asked:
        name, higher = monitored(parts.task, options)
        if name != parts.task.metric:
            metrics = metrics or _metrics_of_one_batch(parts)
        if name != parts.task.metric and name not in metrics:
            guess = did_you_mean(name, metrics)
            hint = f"did you mean {key}.metric={guess}?" if guess else f"the validation has {', '.join(metrics)}"
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


def stopped_by_program(progress: Progress, planned: int) -> str:
    """Return why the program's function has ended a run of so many planned steps; empty if it has not."""
    return progress.stopped if progress.stopped_plan == planned else ""


def _answer(stop: StopFunction, metrics: dict[str, float]) -> str:
    try:
        answer: Any = stop(metrics)
        if answer is None or isinstance(answer, str):
            return str(answer or "")  # of a plain text, which a checkpoint can hold
        return "stop= returned True" if bool(answer) else ""  # also of NumPy and torch
    except Exception as error:
        raise ConfigError(
            f"stop= failed after epoch {metrics['epoch']}: {type(error).__name__}: {error}",
            f"it gets a dict of metrics, {', '.join(metrics)}, and returns True, the reason as text, or None to go on",
        ) from error


def _show(on_step: OnStep, view: StepView, parts: Parts) -> None:
    """Call the program's function after a step, which leaves no trace in training; ConfigError if it fails or might.

    So a run with it has the bits of one without, and its configuration says how it was trained. Changes of parameters
    would be on no record, and those of half-precision ones overwritten from their FP32 copies. Those through ``.data``
    are not seen.
    """
    with undone(parts, parts.model, view.step):
        before = _versions(parts)
        try:
            if on_step(view) is True:
                raise TypeError("it returned True, which ends nothing: call stop(reason) of its argument")
        except Exception as error:
            what = f"on_step= failed at step {view.step}: {type(error).__name__}: {error}"
            raise ConfigError(what, "it gets a view: step, epoch, model, batch, optimizers, stop(reason)") from error
        if changed := [name for name, version in _versions(parts).items() if version != before[name]]:
            what = f"on_step= changed the parameter {changed[0]} at step {view.step}, and it may only look"
            raise ConfigError(what, "change weights in a forward pass or a hook of a module")


def _versions(parts: Parts) -> dict[str, tuple[int, ...]]:
    """Return by name what changes with a trained parameter; a DTensor and its shard have versions of their own."""
    return {
        name: (parameter._version, own._version, own.data_ptr(), parameter.requires_grad)
        for weights in (learner.weights for learner in parts.learners)
        for name, own, parameter in zip(weights.names, weights.masters.parts, weights.params, strict=True)
    }


class Monitor:
    """Observer of validation metrics and steps that ends training early and reduces learning rates, as configured."""

    def __init__(self, parts: Parts, options: Options, progress: Progress, telemetry: Telemetry, planned: int) -> None:
        self._parts, self._options = parts, options.train.early_stopping
        self._stop, self._on_step = options.stop, options.on_step
        self._progress, self._telemetry, self._planned = progress, telemetry, planned

    @property
    def stopped(self) -> str:
        """Reason why training ends early; empty if it goes on."""
        why = stopped_by_program(self._progress, self._planned)
        return why or early_stop(self._parts.task, self._options, self._progress.early_stopping)

    def after_validation(self, epoch: int) -> None:
        """Update all states after an epoch's validation. All ranks must call this and use the metrics of rank 0."""
        learners = [learner for learner in self._parts.learners if learner.reduction]
        if self._options is None and not learners and self._stop is None:
            return
        metrics = self._parts.comm.broadcast_object(self._progress.last["val"])
        for learner in learners:
            self._reduce(learner, metrics)
        if self._options is not None:
            self._watch(self._options, metrics, epoch)
        if self._stop is not None:
            self._ask(self._stop, metrics, epoch)

    def after_step(self, batch: Batch) -> None:
        """Let the functions of the program on all ranks, if any, look at the step of a batch, and end training.

        All ranks must call this together, and get the ConfigError of one.
        """
        if self._on_step is None:
            return
        parts, error = self._parts, None
        optimizers = {learner.name: learner.weights.updater for learner in parts.learners}
        view = StepView(self._progress.step, self._progress.epoch, parts.model, batch, optimizers)
        try:
            _show(self._on_step, view, parts)
        except Exception as raised:
            error = raised
        asked, failed = parts.comm.all_reduce_ints([bool(view.reasons), error is not None])
        if failed:
            parts.comm.raise_for_all(error)
        if asked:
            self._end(next(filter(None, parts.comm.all_gather_object(view.reasons)))[0])

    def _ask(self, stop: StopFunction, metrics: Mapping[str, float], epoch: int) -> None:
        """Let rank 0's function of the program decide for all ranks; ConfigError if it fails or gives no answer."""
        progress, comm = self._progress, self._parts.comm
        why = _answer(stop, {**metrics, "epoch": epoch, "step": progress.step}) if comm.is_rank_zero else ""
        self._end(comm.broadcast_object(why))

    def _end(self, why: str) -> None:
        if why and not stopped_by_program(self._progress, self._planned):  # the first reason counts
            self._progress.stopped, self._progress.stopped_plan = why, self._planned
            self._telemetry.event("stopped_early", why=why)

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


class Validation:
    """Evaluation of a run on validation and test data; ``samples`` is the folder for what the task shows."""

    def __init__(self, parts: Parts, samples: Path, progress: Progress, telemetry: Telemetry, monitor: Monitor) -> None:
        self._parts, self._samples, self._monitor = parts, samples, monitor
        self._progress, self._telemetry = progress, telemetry

    def end_epoch(self, completed: int, stop: Callable[[], bool], *, last: bool = False) -> bool:
        """Evaluate on the validation data, if any, and record the epoch; False, and no record, if ``stop`` aborts.

        ``last`` says that training ends here, so that settings may be chosen by this evaluation: it has intervals.
        """
        progress, telemetry = self._progress, self._telemetry
        telemetry.step_log.flush()
        telemetry.report_faulty_samples()
        if "val" in self._parts.loaders and not self.run("val", completed, stop, intervals=last):
            return False
        for log in telemetry.step_log.learner_logs:
            totals = progress.learners[log.name]
            telemetry.sink.take(
                EpochRecord(
                    learner=log.name,
                    epoch=progress.epoch + 1,
                    step=progress.step,
                    updates=log.updates,
                    skipped=totals.epoch_skipped,
                    train_loss=totals.epoch_loss / totals.epoch_losses if totals.epoch_losses else math.nan,
                    loss_scale=log.last.loss_scale if log.last else math.nan,
                    lr=log.last.lr if log.last else math.nan,
                    val=progress.last["val"] if "val" in self._parts.loaders else {},
                    seconds=round(progress.epoch_seconds, 3),
                    terms_per_second=round(progress.epoch_terms / max(progress.epoch_seconds, 1e-9), 1),
                )
            )
        progress.evaluated_at = progress.step
        if "val" in self._parts.loaders:
            self._monitor.after_validation(completed)
        return True

    def run(self, split: str, epoch: int, stop: Callable[[], bool], *, intervals: bool) -> bool:
        """Evaluate the run on ``val`` or ``test`` and record the metrics; False if ``stop`` aborts it.

        On validation data it also writes what the task shows, and keeps the best metric.
        """
        parts, progress, telemetry = self._parts, self._progress, self._telemetry
        telemetry.show("evaluating")
        outcome = evaluate(
            parts,
            parts.loaders[split],
            split,
            progress.step,
            epoch,
            stop=stop,
            exhibit=split == "val",
            intervals=intervals,
        )
        if outcome is None:
            return False
        telemetry.report_faulty_samples()  # last exchange between ranks before the evaluation is recorded
        metrics = outcome.record.metrics
        telemetry.sink.take(outcome.record)
        for doubt in () if progress.last else outcome.doubts:  # once in a run
            telemetry.warn(doubt)
        if files := keep_exhibits(self._samples, progress.step, outcome.exhibits):  # empty except on rank 0
            telemetry.event("samples", files=files)
        if parts.task.metric is not None and parts.task.metric not in metrics:
            raise ConfigError(
                f"the metric of the task is {parts.task.metric}, but its summarise() returns {', '.join(metrics)}",
                "let summarise() return a value of that name, or set another name as metric",
            )
        progress.last[split], progress.intervals[split] = metrics, outcome.record.intervals
        if split == "val" and parts.task.metric is not None:
            value, best = metrics[parts.task.metric], progress.best
            sign = 1.0 if parts.task.higher_is_better else -1.0
            if not math.isnan(value) and (best is None or sign * value > sign * best):
                progress.best = value
        return True
