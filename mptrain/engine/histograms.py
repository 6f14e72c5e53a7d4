"""Probes, which observe training steps and change no tensor: exponent histograms of a step's tensors, or nothing.

Activations and their gradients are recorded at the outputs of modules without children and of modules with parameters
of their own; values inside a module are not recorded. Activations that are recomputed in the backward pass (reentrant
checkpointing) are counted again. Counting runs on the device of each tensor, one tensor at a time and piece by piece.
What an update changes is seen in the elements that are kept from before it: all of a small network, a sample of each
parameter of a larger one. A look so needs a few megabytes, or less than its largest tensor takes. The host reads the
counts once a step.

Before each step of each learner the trainer asks the probe for a watch, an observer of that step. A step without a
watch costs nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mptrain.numerics.rounding import digest_of_bits, update_sums
from mptrain.numerics.tensors import (
    PIECE,
    PLACES,
    as_real,
    count_exponents,
    flat,
    is_countable,
    memory_order,
    read_counts,
    scaled_counts,
    widened,
)
from mptrain.system.device import widest
from mptrain.system.fields import PositiveInt
from mptrain.system.records import MAX_TENSORS, EventRecord, HistogramRecord, LostUpdates, TensorKind
from mptrain.system.torch_private import is_transforming, tree_leaves

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict
    from mptrain.optimizer.weights import Weights
    from mptrain.system.records import Record


#: Modules whose output has the same values as their input.
_SAME_VALUES = (nn.Flatten, nn.Unflatten, nn.Identity)

#: Counts that are kept in one tensor. Each in a tensor of its own lay between the gradients of a step, which are freed
#: and made anew: the heap of a CPU grew by 129 MB with 100 layers of 1 MB, now by 20 MB.
_ROWS = 64

#: Bytes that the kept elements of all parameters take, at most.
_KEPT = 8 << 20


@dataclass(frozen=True)
class Histograms:
    """Probe that records exponent histograms of all kinds of tensors in step 1 and every ``every``-th step."""

    every: PositiveInt = 100
    _frozen: dict[str, FrozenWeights] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def sees_modules(self) -> bool:
        """True: it hooks the modules of the model, which must then not be compiled into one graph."""
        return True

    def watch(self, learner: str, step: int) -> StepWatch | None:
        """Return an observer (`HistogramWatch`) for steps 1, ``every``, 2 * ``every``, ..., and None for all others."""
        if step != 1 and step % self.every != 0:
            return None
        return HistogramWatch(learner, step, self._frozen.setdefault(learner, FrozenWeights()))


class _Before(NamedTuple):
    """Elements of a weight before its update: one of ``step``, in a `memory_order`; one-dimensional.

    ``moving`` says which have a gradient other than zero, of weights that are updated in place in half precision.
    """

    values: Tensor
    moving: Tensor | None
    half: bool
    order: tuple[int, ...] | None
    step: int

    def same(self, tensor: Tensor) -> Tensor:
        """Return the same elements of another tensor of the shape of the weight."""
        return flat(as_real(tensor), self.order)[:: self.step]


class FrozenWeights:
    """Digests of the half-precision weights of a learner at the last look, and the names of those that stood still."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}
        self._named: set[str] = set()
        self._said: list[dict[str, Any]] = []

    def unsaid(self, decays: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return which of the lost decays of an optimizer's state have not been returned before."""
        new = [decay for decay in decays if decay not in self._said]
        self._said += new
        return new

    def compare(self, digests: Mapping[str, int]) -> list[str]:
        """Return the names of the weights that are as at the look before, each name once.

        ``digests`` are those of weights that this look saw updated, though the update may have been lost.
        """
        still = [name for name, digest in digests.items() if self._digests.get(name) == digest]
        self._digests = dict(digests)
        named = [name for name in still if name not in self._named]
        self._named.update(named)
        return named


class HistogramWatch:
    """Observer that counts the exponents of the tensors of one training step of one learner.

    ``left_out`` says for each parameter or module with a tensor that cannot be counted why: its class and layout, or
    that it is inside a transform.
    """

    def __init__(self, learner: str, step: int, frozen: FrozenWeights | None = None) -> None:
        self._learner = learner
        self._step = step
        self._frozen = frozen or FrozenWeights()
        self.left_out: dict[str, str] = {}
        self._counts: dict[tuple[TensorKind, str], tuple[Tensor, torch.dtype]] = {}
        self._rows: dict[torch.device, list[Tensor]] = {}  # for the next counts
        self._unchanged: dict[str, Tensor] = {}
        self._decays: list[dict[str, Any]] = []
        self._lost: dict[str, Tensor] = {}
        self._digests: dict[str, Tensor] = {}
        self._before: dict[str, _Before] = {}
        self._sampled: dict[str, tuple[int, int]] = {}
        self._verdict: Verdict | None = None
        self._scale: Tensor | None = None

    @contextlib.contextmanager
    def passes(self, model: nn.Module) -> Iterator[None]:
        """Count activations and their gradients in the forward and backward passes; hooks are removed on exit."""
        with contextlib.ExitStack() as hooks:
            for name, module in model.named_modules():
                if is_looked_at(module):
                    hooks.callback(module.register_forward_hook(self._hook(name, hooks)).remove)
            yield

    def judged(self, weights: Weights, verdict: Verdict, scale: Tensor) -> None:
        """Count the scaled weight gradients and the weights, before the update; a later call counts anew."""
        masters = weights.masters
        self._count_before(
            masters.full_precision(), weights.gradients.by_name(), {*masters.in_place_half()}, verdict, scale
        )

    def updated(self, weights: Weights) -> None:
        """Count the updates, and those that rounding to half precision has lost, or would lose."""
        self._count_after(weights.masters.working(), weights.masters.stored())
        self._decays = weights.updater.lost_decays()
        if weights.masters.rounding.kind != "nearest":  # what stands still has lost nothing
            self._digests = {}

    def _count_before(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        half: Set[str],
        verdict: Verdict,
        scale: Tensor,
    ) -> None:
        """Count weights and scaled gradients by name; those named in ``half`` are updated in place in few bits."""
        anew = ("weight_gradients", "weights")
        self._counts = {key: counts for key, counts in self._counts.items() if key[0] not in anew}
        self._before = {}  # before others are kept
        self._verdict, self._scale = verdict, scale.clone()  # captured steps keep the scale in one place
        for name, scaled in gradients.items():
            self._count("weight_gradients", name, scaled)
        for name, value in values.items():
            self._count("weights", name, value)
        seen = {name: as_real(value) for name, value in values.items() if ("weights", name) in self._counts}
        for name, step in _steps(seen).items():
            value, gradient = seen[name], gradients.get(name)
            order = memory_order(value)
            kept = flat(value, order)[::step].clone()
            moving: Tensor | None = None
            # For weights updated in place in half precision, a lost update shows only as an unchanged weight.
            if name in half and gradient is not None and gradient.shape == value.shape and is_countable(gradient):
                moving = widened(flat(gradient, order)[::step]) != 0
            self._before[name] = _Before(kept, moving, name in half, order, step)
            self._sampled[name] = kept.numel(), value.numel()

    def _count_after(self, working: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
        """Count updates of working weights by name, some of which are ``stored`` in half precision."""
        for name, weight in working.items():
            if (kept := self._before.pop(name, None)) is None:
                continue
            now, pieces = kept.same(weight), kept.values.split(PIECE)
            masks: Iterable[Tensor | None] = [None] if kept.moving is None else kept.moving.split(PIECE)
            rounded = kept.same(stored[name]).split(PIECE) if name in stored else [None]
            exact = self.exact_update(name, kept.values, kept.same) if kept.half else None
            updates = [None] if exact is None else exact.split(PIECE)
            several = zip(pieces, now.split(PIECE), *map(itertools.cycle, (masks, rounded, updates)), strict=False)
            counts, sums = zip(*(self._changed(name, *each, half=kept.half) for each in several), strict=True)
            if not kept.half or kept.moving is not None:
                self._unchanged[name], self._lost[name] = torch.stack(counts).sum(0), torch.stack(sums).sum(0)
            if (own := weight if kept.half else stored.get(name)) is not None and own.dtype.itemsize == 2:
                self._digests[name] = digest_of_bits(own)

    def exact_update(self, name: str, before: Tensor, same: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return the update, before rounding, of elements that were updated in place; None if it is not known.

        ``same`` takes the elements from any tensor of the shape of the weight.
        """
        return None

    def _changed(
        self,
        name: str,
        old: Tensor,
        new: Tensor,
        moving: Tensor | None,
        rounded: Tensor | None,
        exact: Tensor | None,
        *,
        half: bool,
    ) -> tuple[Tensor, Tensor]:
        """Count an update; return the counts of `HistogramRecord.unchanged`, int64 (2,), and `HistogramRecord.lost`."""
        before, after = widened(old), widened(new)
        update = after - before
        self._count("updates", name, update)
        if half and moving is not None:
            same = after == before
            sums = None if exact is None else update_sums(before, exact, after)
        elif rounded is not None:
            moving, same = update != 0, before == rounded.float()
            sums = update_sums(before, update, rounded)
        else:
            fp16, bf16 = before.to(torch.float16), before.to(torch.bfloat16)
            moving, same = update != 0, (fp16.float() + update).to(torch.float16) == fp16
            sums = update_sums(bf16, update, (bf16.float() + update).to(torch.bfloat16))
        counts = torch.stack([moving.count_nonzero(), (moving & same).count_nonzero()])
        return counts, torch.cat([counts, counts.new_zeros(3)]).to(widest(old.device)) if sums is None else sums

    def records(self) -> Sequence[Record]:
        """Return the step's histograms as one record, or none before its overflow check; waits for the device.

        Events ``frozen`` and ``state_rounding`` may follow it.
        """
        if self._verdict is None or self._scale is None:
            return ()
        overflow, skipped = bool(self._verdict.overflow), bool(self._verdict.skip)
        left_out = ("updates",) if skipped else ()
        keys = [key for key in self._counts if key[0] not in left_out]
        rows = torch.stack([self._counts[key][0] for key in keys]).tolist() if keys else []
        sampled = {name: pair for name, pair in self._sampled.items() if pair[0] != pair[1]}
        tensors: dict[TensorKind, dict[str, Any]] = {}
        for (kind, name), row in zip(keys, rows, strict=True):
            part = sampled.get(name, (1, 1)) if kind == "updates" else (1, 1)
            tensors.setdefault(kind, {})[name] = read_counts(scaled_counts(row, *part), self._counts[kind, name][1])
        unchanged: dict[str, tuple[int, int]] = {}
        lost: dict[str, LostUpdates] = {}
        digests: dict[str, int] = {}
        if self._unchanged and not skipped:
            pairs, sums = (torch.stack([*each.values()]).tolist() for each in (self._unchanged, self._lost))
            for name, counts, five in zip(self._unchanged, pairs, sums, strict=True):
                some, of = sampled.get(name, (1, 1))
                unchanged[name] = (round(counts[0] * of / some), round(counts[1] * of / some))
                sizes = [size * of / some if math.isfinite(size) else 0.0 for size in five]
                lost[name] = (round(sizes[0]), round(sizes[1]), sizes[2], sizes[3], sizes[4])
            values = torch.stack([*self._digests.values()]).tolist() if self._digests else []
            # Of a weight that moves there and back, the bits at two looks may be equal: this one has to see it stand.
            still = {name for name, (count, same) in unchanged.items() if count == same > 0}
            digests = {name: value for name, value in zip(self._digests, values, strict=True) if name in still}
        looked_at = {name: some for name, (some, _) in sampled.items()} | dict.fromkeys(self.left_out, 0)
        named = self._learner, self._step, float(self._scale), overflow
        record = HistogramRecord(*named, tensors, unchanged, looked_at, lost)
        frozen = self._frozen.compare(digests)
        events = [("state_rounding", decay) for decay in self._frozen.unsaid(self._decays)]
        if frozen:
            events.append(("frozen", {"parameters": frozen[:MAX_TENSORS], "count": len(frozen)}))
        learner = {"learner": self._learner}
        return record, *(EventRecord(kind, self._step, learner | fields) for kind, fields in events)

    def _hook(self, name: str, hooks: contextlib.ExitStack) -> Any:
        def look_back(gradient: Tensor) -> None:
            self._count("activation_gradients", name, gradient)

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if is_transforming():
                self.left_out[name] = "inside a transform of torch.func"
                return
            tensors = {id(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
            for tensor in tensors.values():  # each tensor once, even if the module returns it several times
                if tensor.is_floating_point():
                    self._count("activations", name, tensor)
                    if tensor.requires_grad:  # a parameter would keep the hook, so it is removed explicitly
                        hooks.callback(tensor.register_hook(look_back).remove)

        return look

    def _count(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        if not is_countable(tensor):
            self.left_out[name] = f"{type(tensor).__name__}, {tensor.layout}"
            return
        with torch.no_grad():
            known = self._counts.get((kind, name))
            rows = self._rows.setdefault(tensor.device, [])
            if known is None and not rows:
                rows += torch.zeros(_ROWS, PLACES, dtype=torch.int64, device=tensor.device)
            counts = count_exponents(tensor, rows.pop() if known is None else known[0])
            self._counts[kind, name] = counts, tensor.dtype


def is_looked_at(module: nn.Module) -> bool:
    """Return whether a module's output is counted: it has no children, or it has parameters of its own."""
    if isinstance(module, (*_SAME_VALUES, torch.jit.ScriptModule)):
        return False
    return not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))


def _steps(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return for each weight of how many elements one is kept, so that all take at most `_KEPT` bytes; 1 for all.

    Small ones are kept whole. A step has no divisor in common with the number of elements, so that every column of a
    matrix has its share.
    """
    left, steps = _KEPT, dict.fromkeys(weights, 1)
    smallest_first = sorted(weights, key=lambda name: weights[name].nbytes)
    for at, name in enumerate(smallest_first):
        count, size = weights[name].numel(), weights[name].dtype.itemsize + 1
        room = max(1, left // (len(weights) - at) // size)
        steps[name] = max(1, -(-count // room))
        while math.gcd(steps[name], count) > 1:
            steps[name] += 1
        left -= -(-count // steps[name]) * size
    return steps


class StepWatch(Protocol):
    """Interface of an observer of one training step of one learner; the methods are called in the order below."""

    def passes(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the passes of all micro-batches of a model in training mode; it removes its hooks."""

    def judged(self, weights: Weights, verdict: Verdict, scale: Tensor) -> None:
        """Observe the accumulated gradients after the overflow check, still multiplied by ``scale`` of shape (1,)."""

    def updated(self, weights: Weights) -> None:
        """Observe the weights after the step's update, or after the overflow check has skipped it."""

    def records(self) -> Sequence[Record]:
        """Return the records of the step to write to the run's files; may wait for the device."""


class Probe(Protocol):
    """Interface of a probe: it chooses the training steps to observe and creates an observer for each."""

    @property
    def sees_modules(self) -> bool:
        """True if the observers hook modules, which must then not be compiled into one graph."""

    def watch(self, learner: str, step: int) -> StepWatch | None:
        """Return an observer for a learner's step (from 1; skipped steps count), or None if it is not observed."""


@dataclass(frozen=True)
class NoProbe:
    """Probe that observes no training step; overflows are recorded without a probe."""

    @property
    def sees_modules(self) -> bool:
        """False, because it hooks no module."""
        return False

    def watch(self, learner: str, step: int) -> None:
        """Return None."""
