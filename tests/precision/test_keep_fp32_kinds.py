"""Containers and parametrizations can be kept in FP32; TorchScript is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.precision.apply import cast_model, input_dtype
from mptrain.system.errors import ConfigError
from tests.loops import each
from tests.precision.modes import mode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(8, 8)})
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.out = nn.Linear(8, 8)

    def forward(self, given):
        for layer in self.layers:
            given = layer(given)
        return self.out(self.normed(self.by_name["a"](given)))


@each("name", ["fp16_dynamic", "bf16"])
@each("entry", ["layers", "by_name", "normed", "normed.parametrizations", "ModuleList", "ParametrizationList"])
def test_containers_and_parametrizations_are_kept(name, entry):
    policy, model = mode(name, keep_fp32=[entry]), Net()
    kept = cast_model(model, policy)
    assert kept
    said = model(torch.randn(4, 8, dtype=input_dtype(policy)))
    assert said.dtype == input_dtype(policy)
    said.float().sum().backward()
    assert {p.dtype for module in kept.values() for p in module.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_scripted_part_is_refused_by_name():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(ConfigError, match="'1' keeps 1, which is TorchScript"):
        cast_model(model, mode("fp16_dynamic", keep_fp32=["1"]))
