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


@pytest.mark.parametrize("rows", [slice(0, 2), slice(None, None, 2)], ids=["contiguous", "strided"])
def test_buffers_that_are_views_of_the_same_memory_stay_so(rows):
    model = nn.Module()
    model.register_buffer("whole", torch.arange(12.0).view(4, 3))
    model.register_buffer("part", model.whole[rows])
    model.register_buffer("other", torch.ones(2))
    guard = BufferGuard(model)
    guard.snapshot()
    model.part += 1
    model.other += 1
    assert torch.equal(model.whole[rows], model.part)
    guard.restore(torch.ones(1))
    assert torch.equal(model.whole, torch.arange(12.0).view(4, 3))
    assert torch.equal(model.whole[rows], model.part)
    assert torch.equal(model.other, torch.ones(2))


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


def rebound(buffer):
    buffer.data = torch.full_like(buffer, 3)


def replaced(module):
    module.running_mean = torch.full((2,), 3.0)


@pytest.mark.parametrize("change", [replaced, lambda module: rebound(module.running_mean)])
def test_a_buffer_that_is_replaced_or_moved_keeps_its_new_values_in_its_old_memory(change):
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)})
    guard = BufferGuard(model)
    guarded, address = model["a"].running_mean, model["a"].running_mean.data_ptr()
    for skip in (0.0, 1.0):
        guard.snapshot()
        change(model["a"])
        guard.restore(torch.tensor([skip]))
        assert model["a"].running_mean is guarded
        assert guarded.data_ptr() == address
        assert guarded.tolist() == [0 if skip else 3] * 2
        guarded.zero_()
    with guard.unharmed() as (changed, unguarded):
        change(model["a"])
    assert guarded.tolist() == [0, 0]
    assert (changed, unguarded) == ([], [])


def test_a_buffer_that_outgrows_its_memory_is_put_back_after_a_rehearsal_and_others_stay_guarded():
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)})
    guard = BufferGuard(model)

    def grow():
        model["a"].running_mean.data = torch.ones(5)
        model["b"].running_mean.data = torch.ones(2)

    with guard.unharmed() as (_, unguarded):
        grow()
    assert unguarded == ["a.running_mean"]
    assert [model[name].running_mean.tolist() for name in "ab"] == [[0, 0], [0, 0]]
    guard.snapshot()
    grow()
    guard.restore(torch.ones(1))
    assert [model[name].running_mean.tolist() for name in "ab"] == [[1] * 5, [0, 0]]
    assert len(guard.notes) == 1


@pytest.mark.parametrize("name", ["table", "hidden"])
def test_a_buffer_that_cannot_be_taken_back_is_named_once_and_a_rehearsal_leaves_it_alone(name):
    model = Odd()
    model.register_buffer("hidden", None)
    guard, before = BufferGuard(model), getattr(model, name)
    with guard.unharmed() as (_, unguarded):
        setattr(model, name, torch.zeros(3, 3))
    assert unguarded == [name]
    assert getattr(model, name) is before
    for _ in range(2):
        guard.snapshot()
        setattr(model, name, torch.zeros(3, 3))
        guard.restore(torch.ones(1))
    assert guard.notes == [
        f"the buffer {name} becomes a tensor that a skipped step cannot restore: of another shape or dtype, or shared"
    ]


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


def test_a_half_precision_buffer_that_a_pass_writes_counts_as_changed_even_if_it_stays_the_same():
    model = nn.BatchNorm1d(2).half()
    guard = BufferGuard(model)
    with guard.unharmed() as (changed, _), guard.unchanged():
        model.running_mean.lerp_(torch.full((2,), 1e-8, dtype=torch.float16), 0.1)
    assert changed == ["running_mean"]
    with guard.unharmed() as (changed, _), guard.unchanged():
        pass
    assert changed == []
