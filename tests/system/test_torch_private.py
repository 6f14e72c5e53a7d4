"""The names of torch that it does not promise stand in `mptrain.system.torch_private`, and mean there what they are taken for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from mptrain.system import torch_private as private

PACKAGE = Path(private.__file__).parents[1]

#: Modules that are all about what only CUDA has, or about the compiler, which a start is not to import.
BESIDES = {
    "engine/step_runner.py": {"torch._C._cuda_endAllocateToPool", "torch._C._cuda_releasePool"},
    "engine/parts.py": {
        "torch._dynamo",
        "torch._dynamo.config.accumulated_recompile_limit",
        "torch._dynamo.config.fail_on_recompile_limit_hit",
        "torch._dynamo.config.recompile_limit",
    },
}


def private_names(source: str) -> set[str]:
    """Return the dotted names of torch in a source of which a part begins with one underscore."""
    found, tree = set(), ast.parse(source)
    within = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.Attribute) and id(node) not in within:
            name = ast.unparse(node)
            if name.split(".")[0] in ("torch", "nn", "F") and "(" not in name:
                found.add(name)
    return {name for name in found if any(part[:1] == "_" != part[1:2] for part in name.split("."))}


def test_foreach_kernels_are_those_of_single_tensors():
    some, others = [torch.tensor([1.0, -8.0])], [torch.tensor([2.0, 3.0])]
    assert torch.equal(private.foreach_norm(some, 2, dtype=torch.float64)[0], torch.tensor(65.0).double().sqrt())
    assert private.foreach_sub(some, others)[0].tolist() == [-1.0, -11.0]
    assert private.foreach_div(some, torch.tensor(4.0))[0].tolist() == [0.25, -2.0]
    private.foreach_add_(some, others)
    private.foreach_mul_(some, torch.tensor(2.0))
    assert some[0].tolist() == [6.0, -10.0]
    private.foreach_clamp_max_(some, 5.0)
    private.foreach_clamp_min_(some, -5.0)
    assert some[0].tolist() == [5.0, -5.0]
    private.foreach_copy_(some, others)
    assert torch.equal(some[0], others[0])


def test_a_fused_optimizer_says_so_and_takes_scale_and_flag():
    parameter = nn.Parameter(torch.ones(2))
    assert not private.skips_on_device(torch.optim.SGD([parameter]))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    assert private.skips_on_device(optimizer)
    for skip, left in ((1.0, 1.0), (0.0, 0.5)):
        parameter.grad = torch.full((2,), 4.0)
        private.fused_step(optimizer, torch.tensor(8.0), torch.tensor(skip))
        assert parameter.tolist() == [left, left]
        assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_fused_kernels_divide_by_the_scale_and_heed_the_flag(skip):
    one, two = torch.ones(1), torch.tensor([2.0])
    shared = {"weight_decay": 0.0, "maximize": False, "lr": one, "grad_scale": two, "found_inf": torch.tensor([skip])}
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}

    def moved(kernel, *state, **constants):
        weight = torch.zeros(1)
        kernel([weight], [two.clone()], *state, **constants, **shared)
        return -weight.item()

    sgd = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    moments = [[torch.zeros(1)], [torch.zeros(1)], [], [one]]
    steps = {
        "sgd": moved(private.fused_sgd_, [], **sgd),
        "adam": moved(private.fused_adam_, *moments, **adam),
        "adamw": moved(private.fused_adamw_, [torch.zeros(1)], [torch.zeros(1)], [], [one], **adam),
        "adagrad": moved(private.fused_adagrad_, [torch.zeros(1)], [one], eps=1e-10, lr_decay=0.0),
    }
    assert steps == pytest.approx(dict.fromkeys(steps, 1.0 - skip))


def test_a_backward_pass_begins_with_the_gradient_given_and_knows_its_nodes():
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: seen.append(private.current_autograd_node()))
    private.run_backward(
        ((2 * leaf).sum(),), (torch.tensor(3.0),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert leaf.grad.item() == 6.0
    assert seen[0] is not None
    assert private.current_autograd_node() is None
    before = private.sequence_number()
    node = (2 * leaf).grad_fn
    assert private.sequence_number() == before + 1
    assert private.number_of_node(node) == before
    assert [one.dtype for one in private.input_metadata(node)] == [torch.float32]


def test_storages_have_the_key_of_their_memory_also_empty_ones():
    one, other, empty = torch.ones(2), torch.ones(2), torch.ones(0)
    assert private.storage_key(one.untyped_storage()) == private.storage_key(one[1:].untyped_storage())
    assert len({private.storage_key(each.untyped_storage()) for each in (one, other, empty, torch.ones(0))}) == 4


def test_operators_within_a_region_without_modes_are_seen_by_none():
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1).neg()
        with private.disable_current_modes():
            torch.ones(1).abs()
    assert "neg" in seen
    assert "abs" not in seen


def test_classes_trees_and_questions():
    distributed = torch.distributed.distributed_c10d
    assert callable(getattr(torch.distributed, "set_timeout", None) or distributed._set_pg_timeout)
    assert issubclass(private.weights_only_unpickler().UnpicklingError, Exception)
    scale, tracker = torch.tensor([2.0]), torch.zeros(1, dtype=torch.int32)
    private.amp_update_scale_(scale, tracker, torch.tensor([1.0]), 2.0, 0.5, 1)
    assert scale.item() == 1.0
    assert issubclass(nn.SyncBatchNorm, private.BatchNorm)
    assert issubclass(nn.ConvTranspose3d, private.Convolution)
    assert issubclass(nn.Dropout2d, private.Dropout)
    assert private.tree_leaves(private.tree_map(lambda leaf: leaf + 1, {"a": [1, (2,)]})) == [2, 3]
    flat = private.flatten_dense_tensors([torch.ones(2, 2), torch.zeros(1)])
    assert [one.shape for one in private.unflatten_dense_tensors(flat, [torch.ones(2, 2), torch.zeros(1)])] == [
        (2, 2),
        (1,),
    ]
    assert private.has_kernel("aten::_fused_sgd_", "CPU")
    assert not private.has_kernel("aten::_fused_sgd_", "Vulkan")
    assert all(isinstance(private.has_native_half(dtype), bool) for dtype in ("float16", "bfloat16"))


def test_private_names_stand_nowhere_else():
    """Put a name that is missing here into `mptrain/system/torch_private.py`, with a test of what it is taken for."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.name != "torch_private.py" and (names := private_names(path.read_text(encoding="utf-8"))):
            found[name] = names - BESIDES.get(name, set())
    assert {name: names for name, names in found.items() if names} == {}


#: Attributes that begin with one underscore and are not torch's, and those of `torch.nn.Module` that documented hooks lack.
NOT_OURS = {
    *["_Hash", "_dts", "_exit", "_get_node", "_getframe", "_gts", "_non_persistent_buffers_set", "_replace", "_requeue"]
}

#: Modules about the operators of torch's dispatcher, most of which have such names.
OF_OPERATORS = ("lab/step/module_tensors.py", "precision/census.py", "precision/emulation.py", "precision/upcast.py")


def test_private_attributes_of_torchs_objects_stand_nowhere_else():
    """Put what is missing here into a function of `mptrain/system/torch_private.py`."""
    trees = {
        path.relative_to(PACKAGE).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in PACKAGE.rglob("*.py")
    }
    ours = set(NOT_OURS)
    for nodes in trees.values():
        for node in nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    ours.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    ours.add(name)
    found = {}
    for file, nodes in trees.items():
        used = {
            node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr[:1] == "_" != node.attr[1:2]
        }
        besides = {part for name in BESIDES.get(file, ()) for part in name.split(".")}
        if names := used - ours - besides:
            found[file] = names
    assert {file for file in found if file != "system/torch_private.py"} <= set(OF_OPERATORS), found
    assert {"_cdata", "_sequence_nr"} <= found["system/torch_private.py"]


def test_the_shard_of_a_dtensor_is_its_memory_without_a_graph():
    from torch import distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        local = torch.randn(4, 3)
        whole = nn.Parameter(DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)]))
        for sharded in (whole, whole.detach()):
            found = private.local_shard(sharded)
            assert torch.equal(found, sharded.to_local())
            assert found.data_ptr() == sharded.to_local().data_ptr()
            assert (type(found), found.grad_fn, found.requires_grad) == (torch.Tensor, None, False)
            assert found.requires_grad_() is not private.local_shard(sharded)
            assert not private.local_shard(sharded).requires_grad
    finally:
        dist.destroy_process_group()


def test_a_storage_with_a_weak_reference_gives_its_key_to_no_other():
    first = torch.zeros(1000)
    key, reference = (
        private.storage_key(first.untyped_storage()),
        private.weak_reference(first.untyped_storage()),
    )
    del first
    others = [torch.zeros(1000) for _ in range(64)]
    assert all(private.storage_key(other.untyped_storage()) != key for other in others)
    assert reference.expired()


def test_a_split_rnn_is_many_products():
    class Names(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    layer, x = torch.nn.LSTM(4, 3), torch.zeros(5, 2, 4)
    with private.split_rnn(layer), Names():
        layer(x)
    assert seen.count("addmm") == 6
    assert "mkldnn_rnn_layer" not in seen
