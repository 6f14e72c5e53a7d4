"""The commands that train and evaluate: what they print around an attempt, and their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mptrain.cli.banner import Banner, Closing, print_banner, print_closing
from mptrain.cli.display import make_display
from mptrain.cli.messages import harmless, warn
from mptrain.config.trust import let_in, retyped
from mptrain.errors import EXIT_OK
from mptrain.parallel.torchrun import begun_alike
from mptrain.records import EventRecord, Record
from mptrain.run.attempt import Opening, Outcome, launch
from mptrain.run.attempt import resume as resume_run
from mptrain.run.evaluation import evaluate_run

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.engine.job import Parts
    from mptrain.runlog.sink import Sink


def train(config: Config, sinks: Sequence[Sink] = ()) -> int:
    """Train one configuration.

    Args:
        config: Checked.
        sinks: Take its records besides the display.

    Raises:
        MptrainError: Anything that ends a run before its end; the run directory says so as well.
    """
    return _close(launch(config, lambda opening: [*_open(opening), *sinks]), config.extensions.allow)


def resume(run: str, overrides: Sequence[str]) -> int:
    """Go on with a run.

    Args:
        run: Its directory, or ``last``.
        overrides: Keys that change from here on.

    Raises:
        MptrainError: As `train`.
    """
    return _close(resume_run(run, overrides, _open), let_in(overrides))


def evaluate(run: str, overrides: Sequence[str], which: str = "last", *, average: bool = True) -> int:
    """Measure a run's weights on every split that it can be measured on.

    Args:
        run: Its directory, or ``last``.
        overrides: Keys to evaluate under, such as ``precision.eval=fp32`` or ``device=cpu``.
        which: ``last`` or ``best``.
        average: Measure the average of the weights, where there is one.

    Raises:
        MptrainError: The run has no usable checkpoint, or its data or device is missing.
    """
    evaluation = evaluate_run(run, overrides, which, average=average)
    weights = "averaged" if evaluation.averaged else "raw"
    print(harmless(f"run={evaluation.root} checkpoint={which} step={evaluation.step} weights={weights}"))
    for note in evaluation.notes:
        print(harmless(f"note={note}"))
    for record in evaluation.records:
        metrics = " ".join(f"{name}={value:.6g}" for name, value in record.metrics.items())
        reach = (f" {name}_95={low:.6g},{high:.6g}" for name, (low, high) in record.intervals.items())
        print(harmless(f"split={record.split} samples={record.samples} {metrics}{''.join(reach)}"))
    return EXIT_OK


def _open(opening: Opening) -> Sequence[Sink]:
    """Print what is about to be trained; the display that will show it."""
    config, parts = opening.config, opening.parts
    title = config.chosen.get("model", config.model.path)
    splits = ", ".join(f"{len(loader.split):,} {name}" for name, loader in parts.loaders.items())
    banner = Banner(
        model=f"{title}, {_parameters(parts)}",
        dataset=f"{parts.dataset.name}, {splits}, {parts.dataset.describe()}",
        mode=config.precision.name,
        precision=config.precision.describe(),
        scaler=_scalers(parts),
        device=f"{parts.device}{f', {spread}, {config.distributed.kind}' if (spread := parts.comm.describe()) else ''}",
        support=opening.support.reason,
        run=opening.root,
        planned=opening.planned,
        from_step=opening.from_step,
        notes=opening.notes,
    )
    print_banner(banner, sys.stdout)
    if opening.support.advice and parts.policy.half:
        warn([f"precision={config.precision.name} on {parts.device}: {opening.support.advice}"])
    warn(opening.warnings)
    return [
        _Warnings(),
        make_display(config.log, sys.stdout, title=f"{title} {config.precision.name}"),
    ]


def _parameters(parts: Parts) -> str:
    """Return the number of parameters, and that of the trainable ones where some are frozen."""
    trained = sum(own.numel() for learner in parts.learners for own in learner.weights.params)
    total = sum(parameter.numel() for parameter in parts.model.parameters())
    return f"{total:,} parameters" + (f", {trained:,} trainable" if trained != total else "")


def _scalers(parts: Parts) -> str:
    """What each learner's scale does; said once where all do the same."""
    words = {learner.name: learner.scaler.describe() for learner in parts.learners}
    if len(set(words.values())) == 1:
        return (f"{len(words)} scales, each " if len(words) > 1 else "") + next(iter(words.values()))
    return "; ".join(f"{name}: {rule}" for name, rule in words.items())


class _Warnings:
    """A sink that prints the warnings of a run as they come."""

    def take(self, record: Record) -> None:
        if isinstance(record, EventRecord) and record.kind == "warning":
            warn([record.fields["message"]])

    def close(self) -> None:
        """Nothing is held back."""


def _close(outcome: Outcome, packages: Sequence[str]) -> int:
    if outcome.already_done:
        print(harmless(f"{outcome.root} is already done"))
    closing = Closing.from_summary(outcome.root, outcome.summary)
    closing = replace(closing, trust=retyped(packages), resume=begun_alike("mptrain resume"))
    print_closing(closing, sys.stdout)
    return EXIT_OK
