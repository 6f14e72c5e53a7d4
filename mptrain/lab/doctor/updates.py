"""Check of updates of half-precision weights without a master copy: what rounding loses of one, and what keeps it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from mptrain.config.schema import Config
from mptrain.engine.histograms import HistogramWatch
from mptrain.engine.step import train_step
from mptrain.lab.doctor.check import first_batch
from mptrain.lab.finding import Finding
from mptrain.lab.step.repetition import with_overrides
from mptrain.numerics.lost_updates import RoundedUpdates, peak_rate
from mptrain.numerics.rounding import update_sums
from mptrain.optimizer.without_masters import stochastic
from mptrain.run.build.parts import build
from mptrain.runlog.lost_updates import lost_shares
from mptrain.system.errors import ConfigError, UsageError
from mptrain.system.records import LostUpdates
from mptrain.system.words import listed, share
from mptrain.workloads.base.batch import Batch

#: Least share of the magnitude of all updates of which it is said that it is lost.
_FEW = 0.01

#: Parameters that a finding names.
_NAMED = 6

Lost = Mapping[str, LostUpdates]


def lost_in_run(config: Config) -> tuple[str, ...]:
    """Return notes on what rounding would lose of the first update of a run at its full rate; none if it cannot."""
    policy = config.precision
    if policy.parameters == "float32" or policy.master_weights or policy.rounding != "nearest":
        return ()
    _, batch = first_batch(config)
    lost = _of_first_update(with_overrides(config, "schedule=constant"), batch)
    if not any(sums[2] for sums in lost.values()):  # skipped, or updated in place
        return (f"what rounding to {policy.parameters} loses of the updates was not looked at",)
    keeps = "bf16" if policy.parameters == "bfloat16" else "fp16_dynamic"
    hint = f"precision={keeps} keeps them in FP32 master weights"
    if policy.parameters == "bfloat16":
        after = _of_first_update(with_overrides(config, "schedule=constant", "precision=bf16_stochastic"), batch)
        hint += f"; precision=bf16_stochastic, tried on this step, moves the weights by {_moved(after)}"
    finding = _finding(lost, policy.parameters, hint)
    return () if finding is None else (f"{listed(finding.where)}: {finding.what}", finding.hint)


def _of_first_update(config: Config, batch: Batch) -> Lost:
    parts, _ = build(config)
    parts.model.train()
    lost: dict[str, LostUpdates] = {}
    for learner in parts.learners:
        watch = HistogramWatch(learner.name, 1)
        train_step(learner, parts.model, parts.prepare(batch), parts.plan, watch)
        stored = learner.weights.masters.stored()
        for record in watch.records():
            lost |= {name: sums for name, sums in getattr(record, "lost", {}).items() if name in stored}
    return lost


def lost_in_loop(
    named: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Finding | None:
    """Return what rounding loses of the next update of a loop's optimizer, which stays as it is.

    Args:
        named: Parameters by name.
        gradients: Gradients of the step by the same names.
        optimizer: Optimizer of the loop. A copy of it updates copies of the weights.
    """
    rounded = RoundedUpdates(optimizer)
    half = {name: own for name, own in named.items() if name in gradients and rounded.are_lost(own)}
    if not half:
        return None
    if inner := [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]:
        raise UsageError(f"{type(optimizer).__name__} steps another optimizer: give that {type(inner[0]).__name__}")

    def updated(
        dtype: torch.dtype | None, wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    ) -> Mapping[str, Tensor]:
        copies = {name: nn.Parameter(own.detach().clone().to(dtype or own.dtype)) for name, own in named.items()}
        stepped = _copied(optimizer, {id(own): copies[name] for name, own in named.items()})
        for name, own in copies.items():
            own.grad = gradients[name].to(own.dtype) if name in gradients else None
            state = stepped.state.get(own, {})
            for key, value in state.items():
                if dtype is not None and isinstance(value, Tensor) and value.dtype.itemsize == 2:
                    state[key] = value.to(dtype)
        wrap(stepped).step()
        now = RoundedUpdates(stepped)
        kept.update(name for name in half if dtype is None and not now.are_lost(copies[name]))
        return {name: copies[name].detach() for name in half}

    kept: set[str] = set()  # a master copy may be made in the first step

    exact = updated(torch.float32, lambda each: each)
    ends = updated(None, lambda each: each)
    half = {name: own for name, own in half.items() if name not in kept}
    lost = {name: _sums(own, exact[name], ends[name]) for name, own in half.items()}
    hint = "FP32 weights keep them (dtype=torch.float32 at from_pretrained; +2 bytes a weight, +4 for Adam)"
    if all(own.dtype == torch.bfloat16 for own in half.values()):
        with contextlib.suppress(ConfigError):  # an optimizer that needs all weights at once
            after = updated(None, stochastic)
            moved = _moved({name: _sums(own, exact[name], after[name]) for name, own in half.items()})
            hint += f"; mptrain.optimizer.stochastic(optimizer), tried on this step, moves the weights by {moved}"
    dtypes = sorted({str(own.dtype).removeprefix("torch.") for own in half.values()})
    return _finding(lost, " and ".join(dtypes), hint)


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer at its largest rate, for copies of its parameters by id, without its hooks."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    own = {key: value for key, value in vars(optimizer).items() if "hooks" not in key and key != "step"}
    own["param_groups"], state = copy.deepcopy((optimizer.param_groups, dict(optimizer.state)), dict(memo))
    for group in own["param_groups"]:
        if "lr" in group:
            group["lr"] = peak_rate(group)
    made.__setstate__({**own, "state": defaultdict(dict, state)})
    return made


def _sums(own: Tensor, exact: Tensor, end: Tensor) -> LostUpdates:
    before = own.detach()
    updates, same, size, lost_size, moved = update_sums(before, exact.float() - before.float(), end).tolist()
    return round(updates), round(same), size, lost_size, moved


def _moved(lost: Lost) -> str:
    size = sum(sums[2] for sums in lost.values())
    part = share(sum(sums[4] for sums in lost.values()) / size if size else math.nan)
    return f"{part} of the updates (on average by all of them)"


def _finding(lost: Lost, dtype: str, hint: str) -> Finding | None:
    count, size = lost_shares(lost.values())
    if not size >= _FEW:  # also if there was no update
        return None
    still = [name for name, sums in lost.items() if sums[0] and sums[0] == sums[1]]
    worst = sorted(lost, key=lambda name: -lost[name][1] / max(lost[name][0], 1))
    which = f"do not move at all ({len(still):,} of {len(lost):,} parameters)" if still else "lose most"
    what = (
        f"{which}; of all weights, {share(count)} of the updates change nothing, {share(size)} of their magnitude, "
        f"because the weights are stored in {dtype} without a master copy"
    )
    return Finding("lost_updates", tuple((still or worst)[:_NAMED]), what, hint, minor=True)
