"""Exponent histograms of single updates of a watched training loop."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.numerics.overflow_check import Verdict
from mptrain.probe.histograms import HistogramWatch, is_looked_at
from mptrain.probe.module_trail import without_wrappers
from mptrain.system.records import HistogramRecord, TensorKind
from mptrain.system.torch_private import computes_now

#: Weights and scaled gradients by name; None for a missing gradient.
Tensors = Mapping[str, tuple[Tensor, Tensor | None]]


class UpdateHistograms(HistogramWatch):
    """Exponent histograms of the tensors of one update, from the end of the one before it to its own end.

    Activations of compiled models are left out, because hooks on their modules would compile them again. So are those
    of modules whose parameters, by id in ``own``, are not the optimizer's. A look that fails, as without memory, is
    given up with a warning, and ``failure`` says why: training goes on.
    """

    def __init__(self, learner: str, step: int, models: Mapping[str, nn.Module], own: Set[int]) -> None:
        super().__init__(learner, step)
        self.step = step
        self.failure = ""
        self._hooks = contextlib.ExitStack()
        for prefix, model in models.items():
            if any(_is_compiled(module) for module in model.modules()):
                continue
            belongs: dict[str, bool] = {}
            for name, module in model.named_modules():
                ids = {id(one) for one in module.parameters()}
                belongs[name] = bool(ids & own) if ids else belongs.get(name.rpartition(".")[0], False)
                if belongs[name] and is_looked_at(module):
                    look = self._hook(prefix + without_wrappers(name), self._hooks)
                    hook = _InTraining(functools.partial(self._try, look))
                    self._hooks.callback(module.register_forward_hook(hook).remove)

    def backward_ended(self, tensors: Tensors, verdict: Verdict) -> None:
        """Look at weights and accumulated gradients; the last look before the update counts."""
        self._try(self.judged, _weights(tensors), verdict, verdict.skip)

    def update_ended(self, tensors: Tensors, scale: Tensor, skip: Tensor, *, moves: bool) -> None:
        """Look at the weights after an update.

        Args:
            tensors: Weights and gradients.
            scale: Loss scale of the update, float32 (1,).
            skip: 1 if the update was skipped, float32 (1,).
            moves: False if the rate is 0, so that unchanged weights have lost nothing.
        """
        self.close()
        if not moves:
            for name, one in self._before.items():
                if one.moving is not None:
                    self._before[name] = one._replace(moving=torch.zeros_like(one.moving))
        if self._verdict is not None:
            self._verdict, self._scale = self._verdict._replace(skip=skip), scale
            self._try(self.updated, _weights(tensors))
        if self.left_out:
            classes = "; ".join(f"{name} ({kind})" for name, kind in self.left_out.items())
            warnings.warn(f"mptrain.watch cannot count, and leaves out of histograms: {classes}", stacklevel=2)

    @override
    def records(self) -> Sequence[HistogramRecord]:
        found: list[HistogramRecord] = []
        self._try(lambda: found.extend(HistogramWatch.records(self)))
        return found

    def close(self) -> None:
        """Take the hooks off the modules."""
        self._hooks.close()

    @override
    def _count(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        if kind in ("activations", "activation_gradients"):  # inside the loop's own passes
            self._try(super()._count, kind, name, tensor)
        else:
            super()._count(kind, name, tensor)

    def _try(self, look: Callable[..., None], *arguments: Any) -> None:
        """Call a function that looks at tensors; after one that has failed, as without memory, do nothing more."""
        if self.failure:
            return
        try:
            look(*arguments)
        except Exception as error:
            self._verdict = None
            self._counts, self._before, self._unchanged, self.left_out = {}, {}, {}, {}
            self.close()
            self.failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            warnings.warn(f"mptrain.watch leaves the histograms of an update out: {self.failure}", stacklevel=2)


class _InTraining:
    """Forward hook that leaves out passes without gradients, as in an evaluation; of a copy of the module, all."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        if self._hook is not None and torch.is_grad_enabled() and computes_now():
            self._hook(*arguments)

    def __reduce__(self) -> tuple[type[_InTraining], tuple[()]]:
        return _InTraining, ()  # for copy and pickle


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _weights(tensors: Tensors) -> Any:
    """Return weights and gradients in the form in which `HistogramWatch` asks for them."""
    weights = {name: weight for name, (weight, _) in tensors.items()}
    return SimpleNamespace(
        gradients=SimpleNamespace(by_name=lambda: {k: grad for k, (_, grad) in tensors.items() if grad is not None}),
        masters=SimpleNamespace(
            full_precision=lambda: weights,
            working=lambda: weights,
            in_place_half=lambda: [name for name, weight in weights.items() if weight.dtype.itemsize <= 2],
        ),
    )
