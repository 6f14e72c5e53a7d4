"""Memory of a training run on its device, measured and counted by use, and the C library's settings for CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mptrain.numerics.shards import part
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.system import device as devices
from mptrain.system import machine
from mptrain.system.torch_private import leaves, saved_for_backward, storage_key, tree_leaves

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts
    from mptrain.optimizer.weights import Weights

#: Options of glibc's mallopt(3), and their values for training on a CPU.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM, _MAPPED_FROM = 2**31 - 1, 2**30


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed CPU tensors instead of returning it to the system at every step.

    Otherwise each large tensor gets fresh memory, which the kernel must clear: a step of a word LSTM took 1.6 times as
    long when measured, a step of a small convolutional network 1.15 times. The cost is up to a third more resident
    memory. Does nothing if the user has set glibc's own variables, or with another C library.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process uses on a device now: allocated on an accelerator, resident set on a CPU."""
    return machine.resident_memory() if device.type == "cpu" else devices.memory_in_use(device)


def memory_now(device: torch.device) -> int:
    """Return the bytes to display during a run: the peak on an accelerator, the current resident set on a CPU."""
    return memory_in_use(device) if device.type == "cpu" else devices.memory_peak(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak that `memory_peak` returns, so that earlier use, such as importing torch, does not count."""
    if device.type == "cpu":
        machine.forget_peak()
    else:
        devices.forget_peak(device)


def memory_peak(device: torch.device) -> int:
    """Return the most bytes, allocated on an accelerator or resident on a CPU, that were in use since `forget_peak`."""
    return machine.resident_peak() if device.type == "cpu" else devices.memory_peak(device)


def saved_bytes(loss: torch.Tensor, model: torch.nn.Module) -> int:
    """Return the bytes that autograd keeps for the backward pass of a loss, without what the model itself holds."""
    own = _storages((*model.parameters(), *model.buffers(), *leaves(loss)))
    return sum(size for key, size in _storages(saved_for_backward(loss)).items() if key not in own)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' memory on this rank, each memory once."""
    dense = (part(one).untyped_storage() for one in tensors if one.layout == torch.strided)
    return {storage_key(one): one.nbytes() for one in dense}


def memory_by_use(parts: Parts, activations: int) -> dict[str, int]:
    """Return the bytes of a training step on this rank by use, of which ``activations`` are saved for a backward pass.

    ``weights`` are parameters and buffers, ``master_weights`` all FP32 copies, and ``average`` is that of the weights.
    Half-precision ``gradients`` have FP32 sums beside them. ``optimizer_state`` is left out where an optimizer makes it
    in its first update, before that. Temporary results are not counted, nor what libraries allocate.
    """
    found = {"weights": sum(_storages((*parts.model.parameters(), *parts.model.buffers())).values())}
    for learner in parts.learners:
        average = [part(one).nbytes for one in learner.average.values().values()] if learner.average else []
        for use, size in {**_of_weights(learner.weights), **({"average": sum(average)} if average else {})}.items():
            found[use] = found.get(use, 0) + size
    return {**found, "activations": activations}


def _of_weights(weights: Weights) -> dict[str, int]:
    masters = weights.masters
    copies = sum(
        work.nbytes for work, half in zip(masters.work, masters.rounded_into(), strict=True) if half is not None
    )
    found = {"master_weights": copies, "gradients": copies + sum(own.nbytes for own in masters.parts)}
    if not isinstance(weights.rule, TorchRule) or weights.updater.step.item():
        state = tree_leaves(weights.updater.state_dict()["state"])
        found["optimizer_state"] = sum(part(one).nbytes for one in state if isinstance(one, torch.Tensor))
    return found
