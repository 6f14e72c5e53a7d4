"""Exponent histograms of a training step's tensors: how much of each tensor FP16 can hold at which loss scale.

Activations and their gradients are recorded at the outputs of modules without children and of modules with parameters
of their own; values inside a module are not recorded. Activations that are recomputed in the backward pass (reentrant
checkpointing) are counted again. Counting runs on the device of each tensor, one tensor at a time, and on a GPU
temporarily needs eight bytes for each of its values. The host reads the counts once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.numerics.exponent_counts import add_counts, count_exponents, read_counts
from mptrain.system.fields import PositiveInt
from mptrain.system.records import HistogramRecord, TensorKind
from mptrain.system.torch_private import tree_leaves

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict
    from mptrain.optimizer.weights import Weights
    from mptrain.probe.probe import Watch

#: Modules whose output has the same values as their input.
_SAME_VALUES = (nn.Flatten, nn.Unflatten, nn.Identity)


@dataclass(frozen=True)
class Histograms:
    """Probe that records exponent histograms of all kinds of tensors in step 1 and every ``every``-th step."""

    every: PositiveInt = 100

    @property
    def sees_modules(self) -> bool:
        """True: it hooks the modules of the model, which must then not be compiled into one graph."""
        return True

    def watch(self, learner: str, step: int) -> Watch | None:
        """Return an observer (`HistogramWatch`) for steps 1, ``every``, 2 * ``every``, ..., and None for all others."""
        return HistogramWatch(learner, step) if step == 1 or step % self.every == 0 else None


class HistogramWatch:
    """Observer that counts the exponents of the tensors of one training step of one learner."""

    def __init__(self, learner: str, step: int) -> None:
        self._learner = learner
        self._step = step
        self._counts: dict[tuple[TensorKind, str], tuple[Tensor, torch.dtype]] = {}
        self._unchanged: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._still: dict[str, Tensor] = {}
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
        """Count the scaled weight gradients and copy the weights, before the update; a later call counts anew."""
        self._counts = {key: found for key, found in self._counts.items() if key[0] != "weight_gradients"}
        self._verdict, self._scale = verdict, scale.clone()  # captured steps keep the scale in one place
        gradients = weights.gradients.by_name()
        for name, gradient in gradients.items():
            self._count("weight_gradients", name, gradient)
        self._before = {name: value.clone() for name, value in weights.masters.full_precision().items()}
        # For weights updated in place in half precision, a lost update shows only as an unchanged weight.
        self._still = {name: gradients[name] != 0 for name in weights.masters.in_place_half() if name in gradients}

    def updated(self, weights: Weights) -> None:
        """Count the weights and their updates, and the updates that FP16 would round away."""
        for name, after in weights.masters.working().items():
            before = self._before[name]
            self._count("weights", name, before)
            update = after - before
            self._count("updates", name, update)
            if name in self._still:
                moving, same = self._still[name], after == before
            else:
                half = before.to(torch.float16)
                moving, same = update != 0, (half.float() + update).to(torch.float16) == half
            self._unchanged[name] = torch.stack([moving.count_nonzero(), (moving & same).count_nonzero()])
        self._before, self._still = {}, {}

    def records(self) -> Sequence[HistogramRecord]:
        """Return the step's histograms as one record, or none before its overflow check; waits for the device."""
        if self._verdict is None or self._scale is None:
            return ()
        overflow, skipped = bool(self._verdict.overflow), bool(self._verdict.skip)
        left_out = ("updates",) if skipped else ()
        keys = [key for key in self._counts if key[0] not in left_out]
        rows = torch.stack([self._counts[key][0] for key in keys]).tolist()
        tensors: dict[TensorKind, dict[str, Any]] = {}
        for (kind, name), row in zip(keys, rows, strict=True):
            tensors.setdefault(kind, {})[name] = read_counts(row, self._counts[kind, name][1])
        pairs = torch.stack(list(self._unchanged.values())).tolist() if self._unchanged and not skipped else []
        unchanged = {name: (moving, same) for name, (moving, same) in zip(self._unchanged, pairs, strict=False)}
        return (HistogramRecord(self._learner, self._step, float(self._scale), overflow, tensors, unchanged),)

    def _hook(self, name: str, hooks: contextlib.ExitStack) -> Any:
        def look_back(gradient: Tensor) -> None:
            self._count("activation_gradients", name, gradient)

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            found = {id(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
            for tensor in found.values():  # each tensor once, even if the module returns it several times
                if tensor.is_floating_point():
                    self._count("activations", name, tensor)
                    if tensor.requires_grad:  # a parameter would keep the hook, so it is removed explicitly
                        hooks.callback(tensor.register_hook(look_back).remove)

        return look

    def _count(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        with torch.no_grad():
            found = count_exponents(tensor)
            known = self._counts.get((kind, name))
            self._counts[kind, name] = (found if known is None else add_counts(known[0], found), tensor.dtype)


def is_looked_at(module: nn.Module) -> bool:
    """Return whether a module's output is counted: it has no children, or it has parameters of its own."""
    if isinstance(module, (*_SAME_VALUES, torch.jit.ScriptModule)):
        return False
    return not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
