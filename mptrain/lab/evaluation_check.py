"""Evaluation of one batch: a metric that is not finite, and the operator that makes it so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from mptrain.engine.evaluate import evaluate
from mptrain.engine.failure_diagnosis import nonfinite_metrics
from mptrain.engine.module_trail import ModuleTrail
from mptrain.engine.observer import Observer
from mptrain.engine.parts import Parts
from mptrain.engine.step import accumulate_gradients
from mptrain.lab.finding import Finding, describe_operator
from mptrain.precision.apply import input_dtype, set_matmul_precision
from mptrain.runlog.diagnosis_file import Remedy
from mptrain.workloads.base.batch import Batch

#: Number of training passes in which running statistics settle: of their first values, 0.9^64 or 0.1 % are left.
PASSES = 64


def check_evaluation(
    parts: Parts, wide: Callable[[], Parts], batch: Batch | None = None
) -> tuple[Finding, Remedy] | None:
    """Return the finding that an operator makes an evaluation of one batch inf or NaN, and the remedy tried.

    It is None if the evaluation is finite, or raises an error, which the run itself explains. The batch is the first
    one of the validation data, else of the test or training data.

    Args:
        parts: The run, whose weights are evaluated in the precision in which the run evaluates. Left unchanged.
        wide: Function that returns the run in ``precision=fp32`` with the same weights.
        batch: A prepared batch in FP32 with which the running statistics of a network that was not trained settle; they
            change. None keeps those of a trained one.
    """
    if not _nonfinite(parts):
        return None
    exact = wide() if parts.policy.reduced else parts
    if batch is not None:
        for run in {id(run): run for run in (parts, exact)}.values():
            _settle(run, batch.cast(input_dtype(run.policy)))
        if not _nonfinite(parts):
            return None
    helps = not _nonfinite(exact)
    faulty = parts if helps else exact
    set_matmul_precision(faulty.policy)
    observer = Observer(ModuleTrail())
    plan = replace(faulty.plan, products=observer.inside(faulty.plan.products))
    with observer.trail.followed(faulty.model):
        wrong = _nonfinite(replace(faulty, plan=plan))
    breaking = sorted(
        (operation for operation in observer.operations if operation.breaks),
        key=lambda operation: operation.kind != "NaN",
    )
    if not breaking:  # a metric that needs more samples
        return None
    first = breaking[0]
    also = " in FP32 too" if parts.policy.reduced and not helps else ""
    what = f"an evaluation of one batch gives {' and '.join(wrong)}{also}, although the training step is finite"
    if helps:
        hint = "evaluate in FP32 (precision.eval=fp32)"
        remedy = Remedy(("precision.eval=fp32",), "evaluation in FP32", True, "the evaluation of this batch is finite")
    else:
        hint = "check what the model and the task compute in evaluation only"
        remedy = Remedy((), hint, None, "no precision makes it finite")
    what = f"{what}: {describe_operator(first)}"
    return Finding("evaluation", (first.module,), what, hint, operator=first.operator), remedy


def _settle(parts: Parts, batch: Batch) -> None:
    """Run training passes without updates, in which only running statistics change."""
    set_matmul_precision(parts.policy)
    parts.model.train()
    for learner in parts.learners * PASSES:
        accumulate_gradients(learner, parts.model, batch, parts.plan)
        learner.weights.gradients.zero_grad()


def _nonfinite(parts: Parts) -> tuple[str, ...]:
    split = next((name for name in ("val", "test") if name in parts.loaders), "train")
    one_batch, outcome = parts.loaders[split].first_batch(), None
    with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        outcome = evaluate(parts, one_batch, split, 0, 0, stop=lambda: False, average=False)
    metrics = outcome.record.metrics if outcome is not None else {}
    return tuple(f"{name}={value}" for name, value in nonfinite_metrics(metrics, parts.task.metric).items())
