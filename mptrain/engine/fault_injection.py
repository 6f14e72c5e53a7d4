"""Injection of a wrong value into a training run on purpose, to test how the run detects and handles it.

The first element of a tensor is overwritten in one or more consecutive steps. Everything that follows is the run's
normal behaviour.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.numerics.tensors import as_part_of, is_sharded, part
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator
from mptrain.system.errors import ConfigError, did_you_mean
from mptrain.system.records import EventRecord
from mptrain.system.torch_private import tree_leaves, tree_map

if TYPE_CHECKING:
    from mptrain.engine.options import InjectOptions
    from mptrain.engine.step import Learner
    from mptrain.numerics.overflow_check import Verdict
    from mptrain.workloads.base.batch import Batch

#: Kinds of ``inject.tensor``, each with what must follow the colon.
_KINDS = {
    "input": "",
    "activation": "MODULE",
    "activation_gradient": "MODULE",
    "gradient": "PARAMETER",
    "reduced_gradient": "PARAMETER",
    "weight": "PARAMETER",
}


#: Maximum number of tensors that a message names.
_MOST_NAMES = 24


class Injection:
    """Fault that a run injects into one of its tensors on purpose, such as inf into a gradient; none by default.

    Raises ConfigError if the tensor does not exist, or if only one of ``inject.step`` and ``inject.tensor`` is given.
    """

    def __init__(
        self,
        options: InjectOptions,
        model: nn.Module,
        learners: Sequence[Learner],
        comm: Communicator = SINGLE_PROCESS,
    ) -> None:
        self._options = options
        self._rank = options.rank if comm.world_size > 1 else None  # a single rank ignores inject.rank
        self._is_mine = self._rank in (None, comm.rank)
        self._model = model
        self._learners = learners
        self._kind, _, self._name = (options.tensor or "").partition(":")
        if options.step is not None:
            self._require_tensor()
        elif options.tensor is not None:
            raise ConfigError(
                f"inject.tensor={options.tensor} needs an inject.step", "add inject.step=1, or remove inject.tensor"
            )

    @property
    def in_modules(self) -> bool:
        """True if the fault is in an activation or its gradient; modules must then not be compiled into one graph."""
        return self._options.step is not None and self._kind.startswith("activation")

    def describe(self) -> tuple[str, ...]:
        """Return one sentence for the user that describes the fault, or an empty tuple if there is none."""
        options = self._options
        if options.step is None:
            return ()
        steps = {1: f"in step {options.step}", None: f"from step {options.step} on"}.get(
            options.count, f"in {options.count} steps from {options.step} on"
        )
        where = "" if self._rank is None else f" on rank {self._rank}"
        return (f"a fault is injected on purpose: {options.value} into {options.tensor}{where}, {steps}",)

    def check(self, batch: Batch, planned: int) -> list[str]:
        """Return a warning if no planned step will have the fault; ConfigError if the inputs are integers."""
        if self._options.step is None:
            return []
        if self._kind == "input" and not batch.inputs.is_floating_point():
            raise ConfigError(
                "inject.tensor=input: the inputs are integers (tokens)",
                "set inject.tensor=activation:MODULE, where MODULE is the embedding",
            )
        late = self._options.step > planned
        return [f"inject.step={self._options.step} is never reached: training ends at step {planned}"] if late else []

    def records(self, step: int) -> tuple[EventRecord, ...]:
        """Return the event record of the fault in an attempted step (from 1), or an empty tuple if it has none."""
        if not self.is_at(step):
            return ()
        return (EventRecord("injected", step, {"tensor": self._options.tensor, "value": str(self._options.value)}),)

    def at(self, step: int, batch: Batch) -> AbstractContextManager[Batch]:
        """Return a context manager that injects the fault into one training step of all learners.

        It yields the batch to train on: a changed copy if the fault is in the input. Without a fault in this step or on
        this rank, it changes nothing.
        """
        return self._around(batch) if self._is_mine and self.is_at(step) else contextlib.nullcontext(batch)

    @contextlib.contextmanager
    def _around(self, batch: Batch) -> Iterator[Batch]:
        if self._kind == "input":
            yield replace(batch, inputs=self._poisoned(batch.inputs))
            return
        with contextlib.ExitStack() as hooks:
            self._install(hooks)
            yield batch

    def is_at(self, step: int) -> bool:
        """Return whether an attempted step (from 1) has the fault."""
        first, count = self._options.step, self._options.count
        return first is not None and first <= step and (count is None or step < first + count)

    def _install(self, hooks: contextlib.ExitStack) -> None:
        if self._kind == "weight":
            for learner in self._learners:
                if self._name in learner.weights.names:
                    values = learner.weights.masters.full_precision()
                    value = values[self._name]
                    poisoned = as_part_of(self._poisoned(part(value)), value)
                    learner.weights.masters.load_full_precision({**values, self._name: poisoned})
        elif self._kind == "reduced_gradient":
            learner = next(learner for learner in self._learners if self._name in learner.weights.names)
            judge = learner.judge

            def poison_and_judge(loss: Tensor | None = None, *, offenders_only: bool = False) -> Verdict:
                gradient = learner.weights.gradients.in_place().get(self._name)
                if gradient is not None and gradient.numel():
                    gradient.copy_(self._poisoned(gradient))
                return judge(loss, offenders_only=offenders_only)

            learner.judge = poison_and_judge  # type: ignore[method-assign]
            hooks.callback(lambda: delattr(learner, "judge"))
        elif self._kind == "gradient" and is_sharded(self._model.get_parameter(self._name)):
            path, _, name = self._name.rpartition(".")
            module = self._model.get_submodule(path)

            def on_the_whole(module: nn.Module, inputs: Any) -> None:  # the whole parameter exists only during forward
                hooks.callback(module._parameters[name].register_hook(self._poisoned).remove)  # type: ignore[union-attr]

            hooks.callback(module.register_forward_pre_hook(on_the_whole).remove)
        elif self._kind == "gradient":
            hooks.callback(self._model.get_parameter(self._name).register_hook(self._poisoned).remove)
        else:
            module = self._model.get_submodule(self._name)
            change = self._in_output if self._kind == "activation" else self._before_gradient(hooks)
            hooks.callback(module.register_forward_hook(change).remove)

    def _in_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        first = next((leaf for leaf in tree_leaves(output) if _is_float(leaf)), None)
        if first is None:
            return output
        return tree_map(lambda leaf: self._poisoned(first) if leaf is first else leaf, output)

    def _before_gradient(self, hooks: contextlib.ExitStack) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = next((leaf for leaf in tree_leaves(output) if _is_float(leaf) and leaf.requires_grad), None)
            if first is not None:
                hooks.callback(first.register_hook(self._poisoned).remove)

        return hook

    def _poisoned(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor with another first element; a value beyond the range of the dtype becomes inf."""
        mask = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
        mask[:1] = True
        value = torch.tensor(float(self._options.value), dtype=torch.float64).to(tensor.dtype).to(tensor.device)
        return torch.where(mask.view(tensor.shape), value, tensor)

    def _require_tensor(self) -> None:
        words, known = self._options.tensor, self._known()
        if words is None or self._kind not in _KINDS:
            forms = ", ".join(f"{kind}:{name}" if name else kind for kind, name in _KINDS.items())
            raise ConfigError(
                f"inject.step={self._options.step} needs an inject.tensor"
                if words is None
                else f"inject.tensor={words}: unknown kind",
                f"choose one of {forms}",
            )
        if self._name in known:
            return
        guess = did_you_mean(self._name, known)
        what = _KINDS[self._kind]
        raise ConfigError(
            f"inject.tensor={words}: "
            f"{f'there is no {what.lower()} {self._name!r}' if what else 'the input has no name'}",
            f"{f'did you mean {self._kind}:{guess}? ' if guess else ''}there is {_listed(known)}"
            if what
            else f"set {self._kind}",
        )

    def _known(self) -> list[str]:
        if _KINDS.get(self._kind) == "MODULE":
            return [name for name, _ in self._model.named_modules() if name]
        if _KINDS.get(self._kind) == "PARAMETER":
            return [name for learner in self._learners for name in learner.weights.names]
        return [""]


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    half = _MOST_NAMES // 2
    return ", ".join([*names[:half], f"... ({len(names) - _MOST_NAMES} more)", *names[-half:]])


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
