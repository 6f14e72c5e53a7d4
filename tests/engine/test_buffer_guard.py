from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mptrain.engine.buffer_guard import ALIGNMENT, BufferGuard


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(10.0).half().view(2, 5))
        self.register_buffer("empty", torch.zeros(0))
        self.again = nn.Module()
        self.again.register_buffer("table", self.table)


def test_guarded_buffers_keep_values_names_and_sharing_and_begin_where_kernels_like_it():
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    guard = BufferGuard(model)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value)
        assert after[name].dtype == value.dtype
    assert model.again.table is model.table
    assert guard.count == 5
    assert all(buffer.data_ptr() % ALIGNMENT == 0 for buffer in model.buffers())


def test_buffers_change_alone_and_go_back_only_where_the_step_was_refused():
    model = Odd()
    guard = BufferGuard(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    for skip in (1.0, 0.0):
        guard.snapshot()
        model.norm.running_var.fill_(float("nan"))
        model.norm.num_batches_tracked.add_(1)
        guard.restore(torch.tensor([skip]))
        kept = {name: torch.equal(value, before[name]) for name, value in model.named_buffers()}
        changed = {name for name, same in kept.items() if not same}
        assert changed == (set() if skip else {"norm.running_var", "norm.num_batches_tracked"})


def test_a_buffer_that_is_replaced_is_named_and_put_back():
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)})
    guard = BufferGuard(model)
    guarded = model["a"].running_mean
    assert guard.recapture() == []
    model["a"].running_mean = torch.ones(2)
    assert guard.recapture() == ["a.running_mean"]
    assert model["a"].running_mean is guarded
    assert guard.recapture() == []


class Indexed(nn.Module):
    """Chooses channels by an index buffer, which autograd saves, before a BatchNorm counts its batches in the same dtype."""

    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.tensor([1, 0]))
        self.register_buffer("gain", torch.ones(2))
        self.tables = [self.index]  # known by another name as well
        self.mix = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, inputs):
        return self.norm(self.mix(inputs).index_select(1, self.index) * self.gain)


def test_a_buffer_that_autograd_saved_is_not_changed_by_another_of_its_dtype():
    plain, guarded = Indexed(), Indexed()
    guarded.load_state_dict(plain.state_dict())
    guard = BufferGuard(guarded)
    inputs, gradients = torch.randn(4, 3), []
    for model in (plain, guarded):
        guard.snapshot()
        model(inputs).square().sum().backward()
        guard.restore(torch.zeros(1))
        gradients.append(model.mix.weight.grad)
    assert torch.equal(*gradients)
    assert guarded.norm.num_batches_tracked == 1


def test_a_network_changing_a_buffer_that_its_backward_pass_needs_is_still_found_out():
    model = Indexed()
    guard = BufferGuard(model)
    for change in (lambda: model.gain.add_(1), lambda: guard.restore(torch.ones(1))):
        guard.snapshot()
        loss = model(torch.randn(4, 3)).sum()
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_region_that_leaves_buffers_unchanged_is_a_change_to_a_graph_that_reaches_into_it():
    model = Indexed()
    guard = BufferGuard(model)
    with guard.unchanged():
        loss = model(torch.randn(4, 3)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_buffer_stays_the_tensor_that_the_module_knows_and_a_copy_has_memory_of_its_own():
    model = Indexed()
    known = dict(model.named_buffers())
    BufferGuard(model)
    assert all(buffer is known[name] for name, buffer in model.named_buffers())
    model.index.copy_(torch.tensor([0, 1]))
    assert model.tables[0].tolist() == [0, 1]
    twin = copy.deepcopy(model)
    twin.norm.running_mean.add_(1)
    assert not model.norm.running_mean.any()
    model.load_state_dict(twin.state_dict())
    assert model.norm.running_mean.tolist() == [1, 1]
    assert model.norm.running_mean.untyped_storage().data_ptr() == model.gain.untyped_storage().data_ptr()
