from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mptrain.engine.buffer_guard import BufferGuard


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(10.0).half().view(2, 5))
        self.register_buffer("empty", torch.zeros(0))
        self.again = nn.Module()
        self.again.register_buffer("table", self.table)


def test_guarded_buffers_keep_values_names_and_sharing():
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
    with guard.unharmed() as undone:
        change(model["a"])
    assert guarded.tolist() == [0, 0]
    assert (undone.changed, undone.private) == ([], [])


def appended(module):
    module.running_mean.data = torch.ones(5)


def resized(module):
    module.running_mean.resize_(5).fill_(1)


def shrunk(module):
    module.running_mean.resize_(1).fill_(1)


def emptied_and_filled(module):
    module.running_mean.resize_(0)
    module.running_mean.set_(torch.ones(4))


def of_another_dtype(module):
    module.running_mean = torch.ones(2, dtype=torch.float64)


def made(module):
    module.register_buffer("cache", torch.ones(3, 3))


def filled(module):
    module.later = torch.ones(3)


def removed(module):
    del module.running_mean


@pytest.mark.parametrize(
    "change", [appended, resized, shrunk, emptied_and_filled, of_another_dtype, made, filled, removed]
)
def test_buffers_of_another_shape_leave_others_alone_and_go_back_where_the_step_was_refused(change):
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)})
    model["a"].register_buffer("later", None)
    guard, plain = BufferGuard(model), copy.deepcopy(model)
    change(plain["a"])
    plain["b"].running_mean.add_(1)
    before, after = ({n: v.clone() for n, v in one.named_buffers()} for one in (model, plain))

    def passes():
        change(model["a"])
        model["b"].running_mean.add_(1)

    def has(values):
        now = dict(model.named_buffers())
        return list(now) == list(values) and all(
            now[name].dtype == value.dtype and torch.equal(now[name], value) for name, value in values.items()
        )

    with guard.unharmed():
        passes()
    assert has(before)
    guard.snapshot()
    passes()
    guard.restore(torch.ones(1))
    assert has(before)
    with guard.unchanged():
        passes()
    assert has(before)
    guard.snapshot()
    passes()
    guard.restore(torch.zeros(1))
    assert has(after)
    guard.snapshot()  # as they are now
    model["a"].running_var.fill_(7)
    for buffer in model["a"].buffers():
        buffer.zero_()
    guard.restore(torch.ones(1))
    assert has(after)


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


def test_a_half_precision_buffer_that_a_pass_writes_counts_as_changed_even_if_it_stays_the_same():
    model = nn.BatchNorm1d(2).half()
    guard = BufferGuard(model)
    with guard.unharmed() as undone, guard.unchanged():
        model.running_mean.lerp_(torch.full((2,), 1e-8, dtype=torch.float16), 0.1)
    assert undone.changed == ["running_mean"]
    with guard.unharmed() as undone, guard.unchanged():
        pass
    assert undone.changed == []
