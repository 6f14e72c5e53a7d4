"""What a look at the tensors of an update allocates, and what it says where it looks at a sample."""

from __future__ import annotations

import functools
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mptrain.integrations.updates import UpdateHistograms
from mptrain.numerics.exponents import nonzero, total
from mptrain.numerics.overflow_check import judge
from mptrain.numerics.tensors import count_exponents

ONE = torch.ones(1)


class LiveBytes(TorchDispatchMode):
    """Largest sum of bytes of the storages that operators have made and that are still referred to."""

    def __init__(self, known):
        super().__init__()
        self.now = self.most = 0
        self._ids = {one.untyped_storage()._cdata for one in known}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and (one.device.type == "cpu" or isinstance(one, FakeTensor)):
                storage = one.untyped_storage()
                if storage._cdata not in self._ids:
                    self._take(storage._cdata, storage.nbytes(), one)
        return result

    def _take(self, place, size, tensor):
        self._ids.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self._free, place, size)

    def _free(self, place, size):
        self._ids.discard(place)
        self.now -= size


def tensors_of(shapes, dtype):
    made = torch.Generator().manual_seed(0)
    weights = {f"w{at}": torch.randn(shape, generator=made).to(dtype) for at, shape in enumerate(shapes)}
    return {name: (one, torch.randn(one.shape, generator=made).to(dtype)) for name, one in weights.items()}


def looked_at(tensors, rate):
    look = UpdateHistograms("main", 1, {}, set())
    norms = torch.stack([grad.double().norm() for _, grad in tensors.values()])
    verdict = judge(norms, ONE, skip_on_overflow=False)
    known = [one for pair in tensors.values() for one in pair]
    with LiveBytes(known) as live:
        look.backward_ended(tensors, verdict)
    with torch.no_grad():
        for weight, grad in tensors.values():
            weight.sub_(rate * grad)
    with live:
        look.update_ended(tensors, ONE, verdict.skip, moves=lambda _: True, loses=lambda _: True, exact=lambda *_: None)
    (record,) = look.records()
    return record, live.most


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["plain", "transposed", "gaps"])
def test_a_look_needs_a_few_megabytes_or_the_largest_weight(dtype, layout):
    tensors = tensors_of([(1500, 1400)] * 12 + [(3,), (0, 4)], dtype)
    if layout == "transposed":
        tensors = {name: (one.t(), grad) if one.dim() > 1 else (one, grad.t()) for name, (one, grad) in tensors.items()}
        tensors = {name: (one, grad.reshape(one.shape)) for name, (one, grad) in tensors.items()}
    if layout == "gaps":
        tensors = {name: (one[..., ::2], grad[..., ::2]) for name, (one, grad) in tensors.items()}
    record, most = looked_at(tensors, 1e-2)
    of_all = sum(one.numel() * one.itemsize for one, _ in tensors.values())
    assert most < 20e6 + max(one.numel() * one.itemsize for one, _ in tensors.values())
    assert of_all > 1.1 * most or layout == "gaps" or dtype == torch.bfloat16
    assert {name: total(counts) for name, counts in record.tensors["weights"].items()} == {
        name: one.numel() for name, (one, _) in tensors.items()
    }


@pytest.mark.long
def test_a_look_at_100_million_parameters_on_a_device_needs_less_than_their_embedding(monkeypatch):
    monkeypatch.setattr(
        "mptrain.engine.histograms.is_countable", lambda tensor: True
    )  # fakes have operators of their own
    monkeypatch.setattr("mptrain.numerics.rounding.in_widest", lambda tensor: tensor.double())  # asks the device
    monkeypatch.setattr("mptrain.engine.histograms.widest", lambda device: torch.float64)
    shapes = [(50304, 768), *[(768, 768)] * 40, *[(768, 3072)] * 17, (768,)]
    with FakeTensorMode():
        make = functools.partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        tensors = {f"w{at}": (make(shape), make(shape)) for at, shape in enumerate(shapes)}
        one = torch.ones(1, device="cuda")
        verdict = judge(torch.ones(len(shapes), device="cuda").double(), one, skip_on_overflow=False)
        look = UpdateHistograms("main", 1, {}, set())
        with LiveBytes([one for pair in tensors.values() for one in pair]) as live:
            look.backward_ended(tensors, verdict)
            look.update_ended(
                tensors, one, verdict.skip, moves=lambda _: True, loses=lambda _: True, exact=lambda *_: None
            )
    assert look.failure == ""
    assert sum(one.numel() for one, _ in tensors.values()) > 100e6
    assert 8e6 < live.most < 24e6 < tensors["w0"][0].nbytes


def test_shares_of_a_sample_are_those_of_all():
    tensors = tensors_of([(3000, 1500), (7, 5)], torch.bfloat16)
    weight, gradient = tensors["w0"]
    gradient[:, ::3] = 0.0  # whole columns
    before, moving = weight.clone(), gradient != 0
    record, _ = looked_at(tensors, 1e-2)
    assert 0 < record.sampled["w0"] < weight.numel()
    assert "w1" not in record.sampled
    lost = int((moving & (weight == before)).sum())
    found_moving, found_lost = record.unchanged["w0"]
    assert found_moving == pytest.approx(int(moving.sum()), rel=0.01)
    assert found_lost == pytest.approx(lost, rel=0.01)
    assert total(record.tensors["updates"]["w0"]) == pytest.approx(weight.numel(), rel=1e-4)
    assert nonzero(record.tensors["updates"]["w0"]) == pytest.approx(int((weight != before).sum()), rel=0.01)


def test_activations_with_gaps_are_counted_in_pieces():
    values = torch.randn(40, 300, 300)[..., 1:-1, ::2]
    with LiveBytes([values]) as live:
        found = count_exponents(values)
    assert torch.equal(found, count_exponents(values.contiguous()))
    assert live.most < 1.5 * values.nbytes
    whole = torch.randn(3_000_000)
    with LiveBytes([whole]) as live:
        count_exponents(whole)
    assert live.most < whole.nbytes


class Wrapped(torch.Tensor):
    """As tensors of quantization libraries: a class with operators of its own."""

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        raise TypeError(f"{function} is not for quantized tensors")


def test_what_cannot_be_counted_is_left_out_by_name():
    tensors = tensors_of([(4, 3), (5,)], torch.float32)
    own = torch.Tensor._make_subclass(Wrapped, torch.ones(2, 2))
    sparse = torch.eye(3).to_sparse()
    look = UpdateHistograms("main", 1, {}, set())
    verdict = judge(torch.ones(2).double(), ONE, skip_on_overflow=False)
    tensors |= {"own": (own, None), "sparse": (sparse, None)}
    look.backward_ended(tensors, verdict)
    with pytest.warns(
        UserWarning, match=r"leaves out of histograms: own \(Wrapped, .*\); sparse \(Tensor, torch.sparse_coo\)"
    ):
        look.update_ended(tensors, ONE, verdict.skip, moves=lambda _: True, loses=lambda _: True, exact=lambda *_: None)
    (record,) = look.records()
    assert record.tensors["weights"].keys() == record.tensors["updates"].keys() == {"w0", "w1"}
    assert record.sampled == {"own": 0, "sparse": 0}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_weights_of_eight_bits_and_complex_ones_are_counted(dtype):
    tensors = {"w": (torch.linspace(1, 2, 24).view(6, 4).to(dtype), torch.ones(6, 4).to(dtype))}
    look = UpdateHistograms("main", 1, {}, set())
    verdict = judge(torch.ones(1).double(), ONE, skip_on_overflow=False)
    gradient = torch.view_as_real(tensors["w"][1]) if dtype.is_complex else tensors["w"][1]
    look.backward_ended({"w": (tensors["w"][0], gradient)}, verdict)
    look.update_ended(tensors, ONE, verdict.skip, moves=lambda _: True, loses=lambda _: True, exact=lambda *_: None)
    (record,) = look.records()
    assert total(record.tensors["weights"]["w"]) == (48 if dtype.is_complex else 24)
    assert record.tensors["updates"]["w"].zeros == (48 if dtype.is_complex else 24)
    assert record.unchanged["w"] == ((0, 0) if dtype.is_complex else (24, 24))


@pytest.mark.parametrize("where", ["forward", "backward", "judged", "updated", "read"])
def test_a_look_without_memory_is_given_up_and_training_goes_on(where, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    look = UpdateHistograms("main", 1, {"": model}, {id(one) for one in model.parameters()})
    calls = {"forward": 1, "backward": 3, "judged": 5, "updated": 13, "read": 99}[where]

    def count(tensor, *found):
        nonlocal calls
        calls -= 1
        if not calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return count_exponents(tensor, *found)

    monkeypatch.setattr("mptrain.engine.histograms.count_exponents", count)
    if where == "read":
        monkeypatch.setattr("mptrain.engine.histograms.read_counts", lambda *_: 1 / 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(torch.ones(3, 4)).sum().backward()
        tensors = {name: (one.detach(), one.grad) for name, one in model.named_parameters()}
        verdict = judge(torch.ones(4).double(), ONE, skip_on_overflow=False)
        look.backward_ended(tensors, verdict)
        look.update_ended(tensors, ONE, verdict.skip, moves=lambda _: True, loses=lambda _: True, exact=lambda *_: None)
        assert look.records() == []
    (found,) = said
    assert "leaves the histograms of an update out" in str(found.message)
    assert not any(module._forward_hooks for module in model.modules())
