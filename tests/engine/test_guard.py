from __future__ import annotations

import torch
from torch import nn

from mptrain.engine.guard import ALIGNMENT, BufferGuard


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
