"""Repetition of a saved training step, forward and backward, under the observer.

With several learners (models with their optimizers, as in a GAN) each is observed as in training, after the updates of
the learners before it. Afterwards weights, buffers, optimizers and scales are restored; nothing is written. To reach a
given step, training can run up to it in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mptrain.config.compose import allowed_downloads, recompose
from mptrain.config.schema import Config
from mptrain.engine.checkpointing import load_carried, load_weights, restore_snapshot, take_snapshot
from mptrain.engine.module_trail import LOSS, ModuleTrail
from mptrain.engine.observer import (
    NonfiniteTensor,
    Observation,
    Observer,
    OperatorError,
    nonfinite_parameters,
    one_line,
)
from mptrain.engine.options import Options
from mptrain.engine.parts import Parts
from mptrain.engine.progress import LearnerTotals, Progress
from mptrain.engine.rehearsal import untrained_parameters
from mptrain.engine.ring import Ring
from mptrain.engine.step import Learner, accumulate_gradients, train_step
from mptrain.engine.step_log import LearnerLog, StepLog
from mptrain.precision.apply import input_dtype
from mptrain.precision.census import OperatorCensus
from mptrain.runlog.record_writer import Fanout
from mptrain.system.errors import out_of_memory
from mptrain.system.process_state import random_state, set_random_state
from mptrain.system.torch_private import tree_map
from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class SavedStep:
    """State of a run before a training step, with the step's batch, from which the step can be repeated.

    Attributes:
        step: Number of the step, from 1; skipped steps count.
        state: Snapshot of weights, optimizers and other state of the run, in the format of checkpoints.
        batch: The prepared batch, in FP32 if that is available.
        wide: Whether ``batch`` has the dtype of the data set, before the cast to the input dtype of the model.
        scales: Loss scale of each learner, by name.
        random: State of all random generators.
        done: Whether ``state`` was saved after the step and includes the updates of the learners in that step.
    """

    step: int
    state: Mapping[str, Any]
    batch: Batch
    wide: bool
    scales: Mapping[str, float]
    random: Mapping[str, Any]
    done: bool = False


def saved_step_at(parts: Parts, options: Options, state: Mapping[str, Any] | None, step: int) -> SavedStep | None:
    """Train in memory up to a step, from 1, and return the state before it; None if no sample of the data is usable.

    The newly built parts are trained in place. ``state`` is a snapshot from before that step; None starts from the
    parts as built.
    """
    rings = [Ring(options.log.ring, len(learner.weights.names), parts.device) for learner in parts.learners]
    logs = [
        LearnerLog.of(learner, ring, parts.plan.guard.count)
        for learner, ring in zip(parts.learners, rings, strict=True)
    ]
    step_log = StepLog(logs, Fanout(()), options.log)
    progress = Progress(learners={learner.name: LearnerTotals() for learner in parts.learners})
    if state is not None:
        progress, _ = restore_snapshot(parts, step_log, state)
    parts.model.train()
    for host_batch in itertools.islice(_batches(parts, progress), step - progress.step):
        if progress.step + 1 == step:
            step_log.flush()
            return SavedStep(
                step=step,
                state=_copied(take_snapshot(parts, step_log, progress)),
                batch=parts.prepare_float32(host_batch),
                wide=True,
                scales={learner.name: float(learner.scale) for learner in parts.learners},
                random=random_state(parts.device),
            )
        progress.step += 1
        parts.plan.products.begin_step(parts.loaders["train"].seed, progress.step)
        with parts.fault.at(progress.step, parts.prepare(host_batch)) as batch:
            for learner, ring in zip(parts.learners, rings, strict=True):
                ring.record(train_step(learner, parts.model, batch, parts.plan))
        step_log.note(progress.step, progress.epoch)
    return None


def restore_step(parts: Parts, saved_step: SavedStep) -> None:
    """Load the weights, optimizers and non-persistent buffers of a saved step into newly built parts of a run.

    The parts may have another precision than the saved step.
    """
    load_weights(parts, saved_step.state)
    for learner in parts.learners:
        learner.load_state_dict(saved_step.state["learners"][learner.name])
    load_carried(parts, saved_step.state)


def observe_step(parts: Parts, saved_step: SavedStep) -> tuple[Observation, ...]:
    """Repeat the forward and backward passes of a training step under the observer, one observation for each learner.

    Each learner sees the updates of the learners before it, unless the saved state includes them already. The parts,
    with the saved state restored, are left unchanged.
    """
    parts.model.train()
    set_random_state(saved_step.random, parts.device)
    parts.plan.products.begin_step(parts.loaders["train"].seed, saved_step.step)
    seen = []
    prepared = saved_step.batch.cast(input_dtype(parts.policy))
    with _put_back(parts, saved_step), parts.fault.at(saved_step.step, prepared) as batch:
        for learner in parts.learners:
            chosen = saved_step.scales[learner.name]
            learner.scale_state = {**learner.scale_state, "scale": torch.full_like(learner.scale, chosen)}
            random = random_state(parts.device)
            seen.append(_look(parts, learner, saved_step, batch, chosen))
            if learner is not parts.learners[-1] and seen[-1].refusal is None and not saved_step.done:
                # The update draws the random numbers of the passes that were observed.
                set_random_state(random, parts.device)
                train_step(learner, parts.model, batch, parts.plan)  # the next learner sees its update
    return tuple(seen)


def with_overrides(config: Config, *words: str) -> Config:
    """Return a copy of a configuration with overrides, as on the command line, such as ``precision=fp32``.

    Code and downloads that it allows stay allowed. Raises ConfigError if the overrides are invalid for it.
    """
    return recompose(config.tree, words, allow=config.extensions.allow, fetch=allowed_downloads(config))


@contextlib.contextmanager
def _put_back(parts: Parts, saved_step: SavedStep) -> Iterator[None]:
    """Restore weights, buffers, optimizers and scales on exit, including a weight changed by an injected fault."""
    scales = [learner.scale_state for learner in parts.learners]
    learners = _copied({learner.name: learner.state_dict() for learner in parts.learners})
    carried = _copied(parts.carried())
    try:
        yield
    finally:
        load_weights(parts, {**saved_step.state, "learners": learners})
        for learner, scale_state in zip(parts.learners, scales, strict=True):
            learner.load_state_dict(learners[learner.name])
            learner.scale_state = scale_state
            learner.weights.gradients.zero_grad()
        for name, buffer in parts.carried().items():
            buffer.copy_(carried[name])


def _look(parts: Parts, learner: Learner, saved_step: SavedStep, batch: Batch, scale: float) -> Observation:
    trail, census = ModuleTrail(), OperatorCensus()
    observer = Observer(trail)
    plan = replace(parts.plan, products=census.inside(observer.inside(parts.plan.products)))
    faulty_inputs, faulty_weights = _faulty_inputs(parts, batch, saved_step), _faulty_weights(parts)
    loss, refusal = math.nan, None
    learner.weights.gradients.zero_grad()
    try:
        with parts.plan.guard.unharmed(parts.task), trail.followed(parts.model):
            loss = accumulate_gradients(learner, parts.model, batch, plan).item()
    except torch.AcceleratorError:  # a device error, not a failure of the step
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if out_of_memory(error):
            raise
        module = trail.raised_in[0] if trail.raised_in else LOSS
        refusal = observer.refusal or OperatorError("forward", module, "", "", (), one_line(error))
    norms = learner.judge().norms.tolist()
    types = {name: type(module).__name__ for name, module in parts.model.named_modules()}
    missing = learner.weights.gradients.missing() if refusal is None else []
    learner.weights.gradients.zero_grad()
    return Observation(
        learner=learner.name,
        step=saved_step.step,
        loss_scale=scale,
        loss=loss,
        samples=batch.samples,
        operations=tuple(observer.operations),
        calls=trail.calls,
        ended=tuple(trail.ended),
        types=types,
        functions=tuple(observer.functions.values()),
        refusal=refusal,
        inputs=faulty_inputs,
        weights=faulty_weights,
        largest_weight=_largest(parts.full_precision()),
        gradients=nonfinite_parameters(learner.weights.names, norms)[1],
        untrained={**untrained_parameters(parts), "no_gradient": missing},
        census=census.table(),
    )


def _batches(parts: Parts, progress: Progress) -> Iterator[Batch]:
    loader = parts.loaders["train"]
    while True:
        has_batches = False
        for batch in loader.batches(progress.epoch, start=progress.batch):
            has_batches = True
            yield batch
        if not has_batches and progress.batch == 0:  # every sample is unusable
            return
        progress.epoch, progress.batch = progress.epoch + 1, 0


def _copied(values: Any) -> Any:
    """Return a copy of a nested value. A snapshot refers to tensors that training changes in place."""
    return tree_map(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, values)


def _faulty_inputs(parts: Parts, batch: Batch, saved_step: SavedStep) -> tuple[NonfiniteTensor, ...]:
    before = saved_step.batch.tensors()
    known = saved_step.wide and not parts.fault.records(saved_step.step)  # a fault is injected after the cast
    nonfinite = []
    for name, tensor in batch.tensors().items():
        wrong = tensor.isfinite().logical_not()  # all False for integer tensors
        if wrong.any():
            samples = wrong.flatten(1).any(1) if wrong.ndim > 1 else wrong
            samples = samples if wrong.shape[:1] == (batch.samples,) else wrong.new_zeros(0)  # of another dimension
            wide = known and bool(before[name].isfinite().all()) and before[name].dtype != tensor.dtype
            kind = "nan" if tensor.isnan().any() else "inf"
            nonfinite.append(NonfiniteTensor(name, kind, tuple(samples.nonzero().flatten().tolist()), wide))
    return tuple(nonfinite)


def _faulty_weights(parts: Parts) -> tuple[NonfiniteTensor, ...]:
    return tuple(
        NonfiniteTensor(name, "nan" if tensor.isnan().any() else "inf")
        for name, tensor in parts.must_be_finite().items()
        if not tensor.isfinite().all()
    )


def _largest(weights: Mapping[str, Tensor]) -> tuple[float, str]:
    sizes = [(float(value.abs().max()), name) for name, value in weights.items() if value.numel()]
    return max(sizes, default=(0.0, ""))
