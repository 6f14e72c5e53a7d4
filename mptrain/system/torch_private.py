"""Private names of torch, collected in one module to check against each new version of torch.

All of them exist in torch 2.11 to 2.15 with the meaning documented here. `tests/system/test_torch_private.py` uses each
of them and checks that no other module uses private names of torch's modules, but for two of CUDA graphs in
`mptrain.engine.step_runner`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors as flatten_dense_tensors
from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from datetime import timedelta
    from types import ModuleType

__all__ = [
    "EXTRA_STATE",
    "BatchNorm",
    "Convolution",
    "Dropout",
    "TorchDispatchMode",
    "after_backward",
    "amp_update_scale_",
    "current_autograd_node",
    "current_backward",
    "disable_current_modes",
    "end_workers",
    "fill_buckets_in_order",
    "flatten_dense_tensors",
    "foreach_add_",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_div",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sub",
    "found_overflow",
    "fused_adagrad_",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "fused_step",
    "has_gradient_hooks",
    "has_kernel",
    "has_native_half",
    "has_step_hooks",
    "has_stepped",
    "in_compiled_autograd",
    "input_metadata",
    "is_transforming",
    "is_unscaled",
    "leaves",
    "loads_itself",
    "local_shard",
    "loss_scale_of",
    "number_of_node",
    "run_backward",
    "saved_for_backward",
    "sequence_number",
    "set_group_timeout",
    "skips_on_device",
    "split_rnn",
    "storage_key",
    "tree_leaves",
    "tree_map",
    "unflatten_dense_tensors",
    "untraced",
    "weak_reference",
    "weights_only_unpickler",
    "written_tensors",
]

#: Multi-tensor kernels, which torch.optim uses with ``foreach=True``.
foreach_add_ = torch._foreach_add_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub

#: Kernels of torch.optim with ``fused=True``; they divide gradients by ``grad_scale`` and do nothing if ``found_inf``
#: is 1.
fused_adagrad_ = torch._fused_adagrad_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

#: The kernel with which `torch.amp.GradScaler` updates its scale.
amp_update_scale_ = torch._amp_update_scale_

#: Return the autograd node that this thread is evaluating; None outside a backward pass.
current_autograd_node = torch._C._current_autograd_node

#: Return the sequence number of the next autograd node of this thread.
sequence_number = torch._C._autograd._get_sequence_nr

#: Base classes of all batch normalisation, convolution and dropout layers.
BatchNorm = nn.modules.batchnorm._BatchNorm
Convolution = nn.modules.conv._ConvNd
Dropout = nn.modules.dropout._DropoutNd


#: Return the number of the backward pass that this thread runs, a new one for each pass; -1 outside.
current_backward = torch._C._current_graph_task_id


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass; only for hooks that autograd calls."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def loss_scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return a scaler's own tensor of its scale, float32 (), changed in place by updates; None before its first use."""
    scale: torch.Tensor | None = scaler._scale
    return scale


def found_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what a scaler has found in the gradients of an optimizer since its last update, one scalar for a device.

    They are above 0 if a gradient is not finite. The list is empty if the scaler has not looked yet.
    """
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return list(state.get("found_inf_per_device", {}).values())


def has_stepped(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scaler has stepped an optimizer, or skipped its step, since its last update."""
    stage = scaler._per_optimizer_states.get(id(optimizer), {}).get("stage")
    return stage is not None and stage.name == "STEPPED"


def computes_now() -> bool:
    """Return whether operators compute values: not while torch compiles, traces or transforms."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or is_transforming()
        or torch._C._len_torch_dispatch_stack()
    )


def is_transforming() -> bool:
    """Return whether `torch.func` transforms the running function: its tensors stand for others and have no values."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scaler has divided the gradients of an optimizer by its scale since its last update.

    It has not before ``unscale_``, nor for a fused optimizer, whose kernel divides them.
    """
    stage = scaler._per_optimizer_states.get(id(optimizer), {}).get("stage")
    return stage is not None and stage.name != "READY"


def in_compiled_autograd() -> bool:
    """Return whether the running backward pass is one of compiled autograd, also while it is traced."""
    if torch.compiler.is_compiling():
        return True
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # imported by its users
    return compiled_autograd is not None and bool(compiled_autograd.in_compiled_autograd_region)


def untraced(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that torch's compiler calls as it is, as `torch.compiler.disable`, without importing it."""
    cast("Any", function)._torchdynamo_disable = True
    return function


_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__


def is_within_step(optimizer: torch.optim.Optimizer, steps: int = 1) -> bool:
    """Return whether this code runs inside so many calls of an optimizer's step, as its closure does.

    A hook runs inside two, if the optimizer's class calls ``super().step()``: torch hooks the step of each class in the
    line of inheritance, if an optimizer of that very class was ever made.
    """
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None and depth < steps:
        frame = frame.f_back
        depth += frame.f_code is _STEP_CODE and frame.f_locals.get("self") is optimizer
    return depth == steps


def end_workers(loader: torch.utils.data.DataLoader[Any]) -> None:
    """End the persistent processes of a loader, which without this live until Python collects its iterator."""
    iterator: Any = loader._iterator  # None before the first epoch
    if iterator is not None:
        iterator._shutdown_workers()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernels of an optimizer unscale gradients and skip updates: those of ``fused=True`` do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def begin_late_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give fused SGD a buffer of zeros for each parameter whose gradients begin later than those of others.

    torch's fused kernel takes buffers of all parameters, or of none. Without dampening, zeros are what it begins with.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        there = [parameter for parameter in group["params"] if parameter.grad is not None]
        late = [parameter for parameter in there if optimizer.state[parameter].get("momentum_buffer") is None]
        if group["momentum"] and not group["dampening"] and 0 < len(late) < len(there):
            for parameter in late:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether functions are hooked into the updates of an optimizer, for it alone or for all optimizers."""
    of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return any((*of_all, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks))


def fused_step(optimizer: torch.optim.Optimizer, grad_scale: torch.Tensor | None, skip: torch.Tensor | None) -> None:
    """Step an optimizer that unscales and skips on the device, as `torch.amp.GradScaler` does.

    ``grad_scale`` and ``skip`` are float32 scalars on the device: the divisor of the gradients (None for no division),
    and 1 to skip the update or 0 to apply it (None applies it).
    """
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = grad_scale, skip
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf


def has_gradient_hooks(owner: torch.Tensor | nn.Module) -> bool:
    """Return whether functions are hooked to the gradient of a parameter, or to the backward pass of a module."""
    later = owner._backward_pre_hooks if isinstance(owner, nn.Module) else owner._post_accumulate_grad_hooks
    return bool(owner._backward_hooks or later)


def loads_itself(module: nn.Module) -> bool:
    """Return whether a module loads its tensors by code of its own, which may accept other shapes."""
    return not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")


def _nodes(result: torch.Tensor) -> Iterator[Any]:
    seen, left = set(), [result.grad_fn]
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [next_node for next_node, _ in node.next_functions]
            yield node


def leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors to which a backward pass from a result adds gradients."""
    return [node.variable for node in _nodes(result) if type(node).__name__ == "AccumulateGrad"]


def saved_for_backward(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that autograd keeps for a backward pass from a result; nothing is unpacked or recomputed.

    What hooks have put in place of a tensor, as checkpoints of activations do, is yielded if it is a tensor.
    """
    names: dict[type, list[str]] = {}
    for node in _nodes(result):
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            with contextlib.suppress(RuntimeError):  # a pass inside the forward pass has freed it
                saved = getattr(node, name)
                for saved_tensor in saved if isinstance(saved, (list, tuple)) else (saved,):
                    yield from (held for held in tree_leaves(saved_tensor.data) if isinstance(held, torch.Tensor))


def number_of_node(node: Any) -> int:
    """Return the sequence number of an autograd node, which increases in the order of the forward pass."""
    number: int = node._sequence_nr()
    return number


def input_metadata(node: Any) -> tuple[Any, ...]:
    """Return the metadata (shape, dtype) of each gradient that an autograd node receives; None if it is undefined."""
    metadata: tuple[Any, ...] = node._input_metadata
    return metadata


def local_shard(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, in the same memory and without an autograd graph.

    `DTensor.to_local` is a function of autograd, which takes 20 times as long.
    """
    local: torch.Tensor = tensor._local_tensor.detach()
    return local


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that identifies the memory of a storage, to find tensors that share it.

    It is equal for storages of the same memory, and distinct for different empty storages, which have the same address.
    """
    key: int = storage._cdata
    return key


def weak_reference(storage: torch.UntypedStorage) -> Any:
    """Return a weak reference to a storage; while it lives, `storage_key` is that of no other storage."""
    return StorageWeakRef(storage)


@contextlib.contextmanager
def split_rnn(module: nn.RNNBase) -> Iterator[None]:
    """Run a recurrent layer as single products instead of one operator of oneDNN or cuDNN, until the context ends."""
    before: list[tuple[bool, bool]] = []

    def split(*_: Any) -> None:
        before.append((torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()))
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)

    def restore(*_: Any) -> None:
        if before:
            mkldnn, cudnn = before.pop()
            torch._C._set_mkldnn_enabled(mkldnn)
            torch._C._set_cudnn_enabled(cudnn)

    hooks = module.register_forward_pre_hook(split), module.register_forward_hook(restore, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call of an ATen operator writes in place, as its schema says."""
    for index, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tree_leaves(given) if isinstance(tensor, torch.Tensor))


def weights_only_unpickler() -> ModuleType | None:
    """Return torch's module that unpickles for ``torch.load(weights_only=True)``; None before the first such load."""
    return sys.modules.get("torch._weights_only_unpickler")


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Change the timeout of the collectives of a process group, with a function that is public from torch 2.15 on."""
    import torch.distributed as dist

    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def fill_buckets_in_order(module: nn.parallel.DistributedDataParallel) -> None:
    """Fill the buckets of a module that has run no pass in the order of its parameters, once and for all.

    By itself it fills them anew before its second pass, in the order in which gradients came in its first one.
    """
    module.reducer._push_all_rebuilt_params()
    module.reducer._rebuild_buckets()


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return whether this torch build has a kernel of an operator (``aten::NAME``) for a dispatch key (``CUDA``)."""
    known = torch._C._dispatch_has_kernel(operator)
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key)


def has_native_half(dtype: str) -> bool:
    """Return whether oneDNN computes in ``float16`` or ``bfloat16`` on this CPU, subject to ONEDNN_MAX_CPU_ISA."""
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    supported = operators._is_mkldnn_fp16_supported if dtype == "float16" else operators._is_mkldnn_bf16_supported
    return bool(supported())
