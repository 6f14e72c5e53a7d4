"""BatchNorm over ranks that are threads: the numbers of one rank with the whole batch, and torch's kernels called as they ask for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.parallel import sync_batchnorm
from mptrain.parallel.sync_batchnorm import CpuBatchNormOps, convert_sync_batchnorm
from mptrain.system.errors import ConfigError
from tests.loops import each
from tests.parallel.batch_norms import OPTIONS, PARTS, SHAPES, layer_of, over_ranks, whole


@each("kind", SHAPES)
@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("more", OPTIONS)
def test_ranks_with_parts_of_any_sizes_have_the_numbers_of_one(kind, dtype, more):
    layer, x, grad = layer_of(kind, **more), torch.randn(SHAPES[kind]) * 3 + 20, torch.randn(SHAPES[kind])
    if kind is nn.BatchNorm2d:
        x, grad = x.to(memory_format=torch.channels_last), grad.to(memory_format=torch.channels_last)
    x, grad = x.to(dtype), grad.to(dtype)
    found = over_ranks(layer, x, grad)
    answer, grad_x, grads, buffers = whole(layer, x, grad)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(torch.cat([one[0] for one in found]), answer.to(dtype), **close)
    torch.testing.assert_close(torch.cat([one[1] for one in found]), grad_x.to(dtype), **close)
    for index, expected in enumerate(grads):
        torch.testing.assert_close(sum(one[2][index] for one in found), expected.float(), rtol=1e-5, atol=1e-5)
    for one in found:
        for name, expected in buffers.items():
            torch.testing.assert_close(one[3][name].double(), expected.double(), rtol=1e-6, atol=1e-6)
            assert torch.equal(one[3][name], found[0][3][name])
            assert one[3][name].dtype == (torch.float32 if expected.is_floating_point() else torch.int64)


def test_running_statistics_in_half_precision_are_counted_in_fp32():
    layer = layer_of(nn.BatchNorm2d).half()
    x = torch.randn(9, 5, 100, 100).half()  # more values of a channel than FP16 has numbers
    (*_, one), *_ = over_ranks(layer, x, x)
    assert one["running_mean"].dtype == torch.float16
    torch.testing.assert_close(one["running_var"].float(), torch.full((5,), 1.0), rtol=1e-2, atol=1e-2)


def test_an_evaluation_is_each_ranks_own():
    layer = convert_sync_batchnorm(nn.Sequential(layer_of(nn.BatchNorm2d)), comm=None)
    x = torch.randn(3, 5, 2, 2)
    twin = nn.BatchNorm2d(5).eval()
    twin.load_state_dict(layer[0].state_dict())
    assert torch.equal(layer.eval()(x), twin(x))


class WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Renamed(nn.BatchNorm2d):
    def _check_input_dim(self, x):
        pass


def test_a_layer_that_computes_something_else_is_refused_and_not_replaced():
    patched = nn.BatchNorm2d(5)
    patched.forward = lambda x: x
    for odd in (WithActivation(5), patched):
        model = nn.ModuleDict({"stem": nn.BatchNorm2d(5), "act": odd})
        with pytest.raises(ConfigError, match=rf"sync_batchnorm=true: act \({type(odd).__name__}\) computes something"):
            convert_sync_batchnorm(model, comm=None)
        assert type(model["stem"]) is nn.BatchNorm2d
    kept = nn.SyncBatchNorm(5)
    layers = convert_sync_batchnorm(nn.Sequential(Renamed(5), kept), comm=None)
    assert [type(one).__name__ for one in layers] == ["SyncBatchNorm", "SyncBatchNorm"]
    assert type(layers[1]) is nn.SyncBatchNorm
    assert type(layers[0]) is sync_batchnorm.SyncBatchNorm


class AsOnCuda:
    """torch's functions for CUDA: refuses what their schemas do not take, and computes in FP32 what `CpuBatchNormOps` does."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        def call(*given):
            arguments = getattr(torch.ops.aten, name).default._schema.arguments
            assert len(given) == len(arguments)
            for value, argument in zip(given, arguments, strict=True):
                kind = str(argument.type)
                fits = {"Tensor": torch.Tensor, "float": float, "bool": bool}[
                    kind.removeprefix("Optional[").rstrip("]")
                ]
                assert isinstance(value, fits) or (kind.startswith("Optional") and value is None), (name, argument)
                if argument.name in ("mean", "invstd", "sum_dy", "sum_dy_xmu", "running_mean", "running_var", "counts"):
                    assert value.dtype == torch.float32
            self.called.append(name)
            found = getattr(CpuBatchNormOps, name)(*given)
            if name == "batch_norm_elemt" or name == "batch_norm_backward_elemt":
                return found
            return tuple(one.float() for one in found)

        return call


@pytest.mark.parametrize("more", OPTIONS, ids=str)
def test_the_kernels_of_cuda_are_called_as_their_schemas_ask(monkeypatch, more):
    cuda = AsOnCuda()
    monkeypatch.setattr(sync_batchnorm, "_kernels_for", lambda x: cuda)
    layer, x, grad = layer_of(nn.BatchNorm2d, **more), torch.randn(9, 5, 4, 3), torch.randn(9, 5, 4, 3)
    found = over_ranks(layer, x, grad)
    answer, grad_x, grads, _ = whole(layer, x, grad)
    torch.testing.assert_close(torch.cat([one[0] for one in found]), answer.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([one[1] for one in found]), grad_x.float(), rtol=1e-5, atol=1e-5)
    for index, expected in enumerate(grads):
        torch.testing.assert_close(sum(one[2][index] for one in found), expected.float(), rtol=1e-5, atol=1e-5)
    names = {name for name in vars(CpuBatchNormOps) if name.startswith("batch_norm")}
    assert set(cuda.called) == names
    assert len(cuda.called) == len(PARTS) * len(names)


def test_torch_calls_its_kernels_with_the_same_arguments():
    """Whoever changes torch's own layer changes what is asked of the kernels that both call."""
    import inspect

    from torch.nn.modules._functions import SyncBatchNorm as Torchs

    theirs = "".join(inspect.getsource(Torchs).split())
    for words in (
        "torch.batch_norm_stats(input,eps)",
        "(input,mean_all,invstd_all,running_mean,running_var,momentum,eps,counts,)",
        "torch.batch_norm_elemt(input,weight,bias,mean,invstd,eps)",
        "(grad_output,saved_input,mean,invstd,weight,self.needs_input_grad[0],self.needs_input_grad[1],self.needs_input_grad[2],)",
        "(grad_output,saved_input,mean,invstd,weight,sum_dy,sum_dy_xmu,count_tensor,)",
    ):
        assert words in theirs
