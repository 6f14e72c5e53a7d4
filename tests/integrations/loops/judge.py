"""Judge of watched loops: runs a loop alone, which gives the truth, then watched, and compares weights and record with it.

A loop is a function of ``watch`` and ``truth``. It calls ``watch(model, optimizer, scaler)`` as it would `mptrain.watch`, tells ``truth``
what it does and sees, and returns the models and tensors that must be equal to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import mptrain
from mptrain.runlog import read_run
from mptrain.runlog.run_reader import Run
from mptrain.system.records import StepRecord

#: All loops, by name.
LOOPS: dict[str, Loop] = {}


def mlp(inputs=6, outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def batches(count, outputs=3, seed=1):
    """Return the number from 1, the inputs and the targets of each batch."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, 6, generator=draws)
    return [*zip(range(1, count + 1), x, torch.randint(outputs, (count, 16), generator=draws), strict=True)]


def cpu_scaler(scale=1024.0):
    return torch.amp.GradScaler("cpu", init_scale=scale)


class Poison(torch.autograd.Function):
    """Identity whose gradient is one value."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.value), None


def forward(model, x, poison=None, at=2):
    """Return the output of a Sequential; all gradients below module ``at`` are made of the poison, if there is one."""
    return model(x) if poison is None else model[at:](Poison.apply(model[:at](x), poison))


def loss_of(model, x, y, poison=None, at=2):
    return F.cross_entropy(forward(model, x, poison, at), y)


def norm(parameters, scale=1.0):
    parameters = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return nn.utils.get_total_norm([one.grad.double() for one in parameters if one.grad is not None]).item() / scale


def bad_names(model):
    """Return the names of the parameters whose gradients are not finite now."""
    return [name for name, one in model.named_parameters() if one.grad is not None and not one.grad.isfinite().all()]


@contextlib.contextmanager
def restored(model, optimizer=None, when=True):
    """Put the weights back after an update that spoils them, and empty the state of the optimizer."""
    kept = [one.detach().clone() for one in model.parameters()]
    yield
    if when:
        if optimizer is not None:
            optimizer.state.clear()
        with torch.no_grad():
            for one, before in zip(model.parameters(), kept, strict=True):
                one.copy_(before)


@dataclass
class Truth:
    """Account that a loop gives of itself.

    Attributes:
        folder: Name of the run directory.
        attempts: Updates of each learner, skipped ones included.
        bad: Learner, update that was due, and names of gradients that were not finite.
        left_out: Number of backward passes that no update followed.
        scales: Changes of the loss scale, from and to.
        moved: Number of events of a schedule that moved although the update was skipped; None for any.
        evaluations: Number of evaluations.
        before: Number of steps before those of this run.
        status: Status of the run on record.
        reason: Words of the reason for it on record.
        others: Accounts of the other runs of the loop.
    """

    folder: str = "run"
    attempts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    bad: list[tuple[str, int, set[str]]] = field(default_factory=list)
    left_out: int = 0
    scales: list[tuple[float, float]] = field(default_factory=list)
    moved: int | None = 0
    evaluations: int = 0
    before: int = 0
    status: str = "done"
    reason: str = ""
    others: list[Truth] = field(default_factory=list)

    def step(self, learner="main", **numbers):
        """Take an update with its loss, gradient norm (norm), loss scale (scale) and rate (lr), as far as it is known.

        A tuple has several numbers of which each is right. Call it before the optimizer steps.
        """
        plain = {kind: one.item() if isinstance(one, torch.Tensor) else one for kind, one in numbers.items()}
        self.attempts.setdefault(learner, []).append(plain)

    def spoiled(self, names, learner="main", step=None):
        """Take the names of gradients that are not finite, before the update that is due."""
        if names:
            self.bad.append((learner, step or len(self.attempts.get(learner, [])) + 1, set(names)))

    def look(self, model, learner="main", prefix=""):
        """Take the gradients of a model that are not finite, before the update that is due."""
        self.spoiled([prefix + name for name in bad_names(model)], learner)

    def also(self, folder, **known):
        """Return the account of another run of the loop."""
        self.others.append(Truth(folder, **known))
        return self.others[-1]

    def scaled(self, before, after):
        """Take the loss scale before and after the scaler's update."""
        if before != after:
            self.scales.append((before, after))


def update(
    truth, model, optimizer, losses, scaler=None, *, learner="main", prefix="", guarded=False, restore=False, **told
):
    """Make an update of a loss, or of those of micro-batches; return whether it was made.

    A guard leaves it out if a gradient is not finite; without one it may be made and taken back, see `restored`.
    """
    optimizer.zero_grad()
    scale, total = None if scaler is None else scaler.get_scale(), 0.0
    for loss in [losses] if isinstance(losses, torch.Tensor) else losses:
        (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.item()
    truth.look(model, learner, prefix)
    if guarded and not math.isfinite(norm(model)):
        truth.left_out += 1
        return False
    truth.step(learner, loss=total, norm=norm(model, scale or 1.0), scale=scale or 1.0, **told)
    with restored(model, optimizer, when=restore):
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
        truth.scaled(scale, scaler.get_scale())
    return True


class Unwatched:
    """Stand-in of a watch in a loop that runs alone."""

    last: dict[str, Any] = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def flush(self):
        pass


class Watching:
    """Stand-in of `mptrain.watch` in a loop, with records in a folder; without one, nothing is watched."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.parts = folder, []

    def __call__(self, model, optimizer, scaler=None, *, name="run", every=3):
        several = [[*one.values()] if isinstance(one, dict) else one for one in (model, optimizer, scaler)]
        self.parts = [part for one in several if one for part in (one if isinstance(one, list) else [one])]
        if self.folder is None:
            return Unwatched()
        return mptrain.watch(model, optimizer, scaler, dir=self.folder / name, every=every)


def _described(value: Any) -> Any:
    """Return where a function is from, or those of a collection; the type of anything else."""
    if isinstance(value, dict):
        return [_described(one) for one in value.values()]
    value = getattr(value, "__func__", value)  # of methods of classes too
    code = getattr(value, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else f"{type(value).__module__}.{type(value).__qualname__}"


def hooks(parts: list[Any]) -> dict[str, Any]:
    """Return all functions and hooks of torch and of the parts of a loop, each described by its place."""
    autograd, optimizers = torch.autograd, sys.modules[torch.optim.Optimizer.__module__]
    owners: list[Any] = [autograd, autograd.graph, autograd.Function, nn.modules.module, nn.utils, optimizers]
    owners += [torch.Tensor, nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]
    named = [(one.__name__, one) for one in owners]
    for at, part in enumerate(parts):
        named += [(f"{at} {kind.__name__}", kind) for kind in type(part).__mro__[:-1]]
        inside = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
        named += [(f"{at} {type(part).__name__} {name}", one) for name, one in inside]
    found = {
        f"{name}.{key}": _described(value)
        for name, owner in named
        for key, value in vars(owner).items()
        if callable(value) or isinstance(value, dict | classmethod | staticmethod)
    }
    for at, part in enumerate(parts):
        for name, one in part.named_parameters() if isinstance(part, nn.Module) else ():
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                found[f"{at} {name}.{kind}"] = _described(getattr(one, kind, None) or {})
    return found


def weights(returned: Any) -> list[torch.Tensor]:
    found = []
    for one in returned if isinstance(returned, list) else [returned]:
        found += [one] if isinstance(one, torch.Tensor) else [*one.parameters(), *one.buffers()]
    return [one.detach().clone() for one in found]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether tensors are equal to the bit; NaN is equal to NaN."""
    return len(some) == len(others) and all(
        torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(some, others, strict=True)
    )


class Checks:
    """List of what is wrong with a loop, a sentence each."""

    def __init__(self, name: str) -> None:
        self.name, self.failed = name, []

    def __call__(self, what: str, got: Any, wanted: Any = True) -> None:
        if got != wanted:
            self.failed.append(f"{self.name}: {what}: {got!r}, not {wanted!r}")


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the warnings of mptrain."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(one.message) for one in caught if str(one.message).startswith(("mptrain", "on_event"))]


@dataclass(frozen=True)
class Loop:
    """A loop, with what its record may leave open.

    Attributes:
        run: The loop.
        said: Words of every warning and of everything that the record calls not looked at; others are an error.
        looked: Whether passes that no update follows, and gradients before they reach the optimizer, are looked at.
        blamed: Names of gradients of single ranks that were not finite, by rank and step.
        tolerance: Greatest relative difference of a number.
        processes: Number of processes that it needs of its own; 0 if any will do.
    """

    name: str
    run: Callable[[Watching, Truth], Any]
    said: tuple[str, ...] = ()
    looked: bool = True
    blamed: Mapping[tuple[int, int], set[str]] = field(default_factory=dict)
    tolerance: float = 1e-3
    processes: int = 0

    def judge(self, folder: Path) -> list[str]:
        """Run it alone and watched, on all ranks; return what is wrong, on rank 0."""
        check, truth, alone, watched = Checks(self.name), Truth(), Watching(None), Watching(folder)
        with listening() as told:
            expected = weights(self.run(alone, truth))
            before = hooks(alone.parts)
            try:
                got = weights(self.run(watched, Truth()))
            except Exception as error:
                raise AssertionError(f"{self.name}: the watched loop does not train as it does alone") from error
        check("weights and tensors are those of the loop alone", equal(expected, got))
        after = hooks(watched.parts)
        check("hooks left behind", {name for name in after if after[name] != before.get(name)}, set())
        if dist.is_initialized():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (check.failed, told))
            if dist.get_rank() > 0:
                return []
            check.failed, told = ([one for lists in ranks for one in lists[at]] for at in (0, 1))
        self.judge_records(check, truth, folder, told)
        return check.failed

    def judge_records(self, check: Checks, truth: Truth, folder: Path, told: list[str]) -> None:
        """Compare the records of a watched loop, and the warnings that it gave, with the truth."""
        runs = [(one, read_run(folder / one.folder)) for one in (truth, *truth.others)]
        told = [*told, *(run.state.reason for _, run in runs if run.state.status == "done" and run.state.reason)]
        missing = [words for words in self.said if not any(words in text for text in told)]
        check("words of what was not looked at that are missing", missing, [])
        check("other words", [text for text in told if not any(words in text for words in self.said)], [])
        for one, run in runs:
            check(f"status of {one.folder}", run.state.status, one.status)
            check(f"reason of {one.folder} has {one.reason}", one.reason in run.state.reason)
            steps = [*run.steps()]
            for learner, attempts in one.attempts.items():
                mine = [step for step in steps if step.learner == learner]
                self._judge_steps(check, f"{one.folder}, {learner}", one.before, attempts, mine)
            self._judge_events(check, one, run)

    def _judge_steps(
        self, check: Checks, where: str, before: int, attempts: list[Any], steps: list[StepRecord]
    ) -> None:
        numbers = range(before + 1, before + len(attempts) + 1)
        check(f"{where}: steps on record", [step.step for step in steps], [*numbers])
        wrong = []
        for step, told in zip(steps, attempts, strict=False):
            got = {"loss": step.loss, "norm": step.grad_norm, "scale": step.loss_scale, "lr": step.lr}
            skipped = told.get("skipped", False)
            kinds = (got.keys() & told) - ({"norm"} if skipped else set())  # of a skipped one it is inf or NaN
            wrong += [
                (step.step, kind, got[kind], told[kind]) for kind in kinds if not self._close(got[kind], told[kind])
            ]
            wrong += [(step.step, "skipped", step.skipped)] * (step.skipped != skipped)
        check(f"{where}: numbers (step, kind, on record, in truth)", wrong, [])

    def _judge_events(self, check: Checks, truth: Truth, run: Run) -> None:
        events, found = [*run.events()], defaultdict(list)
        for one in events:
            found[one["event"]].append(one)
        named = [one for one in events if one.get("tensors")]
        names = {id(one): {name for name, _ in one["tensors"]} for one in named}
        ranks = {(one["rank"], one["step"]): names[id(one)] for one in found["rank_overflow"]}
        bad = [(one.get("learner", "main"), one["step"], names[id(one)]) for one in named if "rank" not in one]
        check("gradients that were not finite", bad, truth.bad if self.looked else [])
        check("ranks whose gradients were not finite", ranks, self.blamed)
        left_out = truth.left_out if self.looked else 0
        check("an event of the first pass that is left out", bool(found["abandoned"]), left_out > 0)
        if run.paths.steps.exists() and truth.status != "running":  # else each rank has steps, or nobody summed up
            count = sum(one.get("left_out", 0) for one in run.summary["learners"].values())
            check("passes that are left out", count, left_out)
        scales = dict.fromkeys((one["from_scale"], one["to_scale"]) for one in found["scale"])  # of each learner
        check("changes of the loss scale", [*scales], truth.scales)
        if truth.moved is not None:
            check("events of schedules that moved", len(found["schedule_moved"]), truth.moved)
        check("evaluations", len(found["evaluation"]), truth.evaluations)

    def _close(self, got: float, wanted: Any) -> bool:
        for one in wanted if isinstance(wanted, tuple) else (wanted,):
            if math.isclose(got, one, rel_tol=self.tolerance) or (math.isnan(got) and math.isnan(one)):
                return True
        return False


def loop(name: str = "", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the loops, under its name or another."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        label = name or run.__name__
        LOOPS[label] = Loop(label, run, **options)
        return run

    return add


def body(count: int, optimizer: Any = None, **options: Any) -> Callable[[Callable[..., None]], None]:
    """Add the loop of a function that is called with each of so many batches, a small network and its optimizer."""
    optimizer = optimizer or functools.partial(torch.optim.SGD, lr=0.05)

    def add(each: Callable[..., Any]) -> None:
        def run(watch: Watching, truth: Truth) -> nn.Module:
            model = mlp()
            own = optimizer(model.parameters())
            with watch(model, own):
                for batch in batches(count):
                    each(truth, model, own, *batch)
            return model

        loop(each.__name__, **options)(run)

    return add


def all_loops() -> dict[str, Loop]:
    """Return the loops of all modules of this folder, by name."""
    for kind in ("plain", "guarded", "scaled", "replaced", "ended", "several_ranks", "frameworks"):
        importlib.import_module(f"tests.integrations.loops.{kind}")
    return LOOPS
