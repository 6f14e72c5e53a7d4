"""A finite fault between two modules is that of the module around them, and its operator is named."""

from dataclasses import replace

import faulty_networks
import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.inspection.operator_errors import OperatorErrors
from mptrain.inspection.scale_check import check_scaling
from mptrain.probe.module_trail import ModuleTrail


class Between(nn.Module):
    """Computes something between two linear layers."""

    def __init__(self, compute, width=8):
        super().__init__()
        self.first, self.second, self.compute = nn.Linear(width, width), nn.Linear(width, width), compute

    def forward(self, given):
        return self.second(self.compute(self.first(given)))


def variance(x):
    x = x + 30
    return x - ((x * x).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2)


FAULTS = {
    "sub": variance,
    "sin": lambda x: x + (torch.arange(x.shape[1], dtype=x.dtype) * 301.7).sin(),
    "mul": lambda x: (x * 1e-4) * (x * 1e-4) * 1e4 * 1e4,
    "a cast": lambda x: (x.float() * 0.25 + 2049).to(x.dtype) - 2049,
    "add": lambda x: (x * 0.01 + 1000) - 1000,
}


def first_wrong(compute, module=""):
    torch.manual_seed(0)
    model, trail = Between(compute).half(), ModuleTrail()
    with OperatorErrors(trail, [module], 2.0**-7) as errors, trail.followed(model):
        model(torch.randn(64, 8, dtype=torch.float16))
    return errors.found.get(module)


@pytest.mark.parametrize("operator", FAULTS)
def test_the_first_operator_that_is_off_is_named(operator):
    found = first_wrong(FAULTS[operator])
    assert found is not None
    assert found.operator in (operator, "sub" if operator in ("a cast", "add") else operator)
    assert found.error > 2.0**-7


@pytest.mark.parametrize(
    "compute",
    [
        torch.tanh,
        lambda x: x.clone().mul_(2).add_(1),
        lambda x: (x - x.mean(0)) / x.std(0),
        lambda x: x.float().cumsum(0).to(x.dtype),
        lambda x: x[:, torch.argsort(x[0])],
        lambda x: x + torch.randn_like(x),
    ],
)
def test_sound_arithmetic_has_no_such_operator(compute):
    assert first_wrong(compute) is None


@pytest.mark.parametrize("operator", ["sub", "sin", "mul"])
def test_doctor_blames_the_module_around_and_not_the_next_child(operator, monkeypatch):
    fault = replace(faulty_networks.FAULTS["cancels"], make=lambda: Between(FAULTS[operator], faulty_networks.WIDTH))
    monkeypatch.setitem(faulty_networks.FAULTS, "between", fault)
    words = (*faulty_networks.with_fault("between"), "train.batch_size=16", "precision=fp16_dynamic")
    report = check_scaling(compose(words), lambda _: None)
    assert {finding.where for finding in report.findings if finding.kind in ("output", "narrow")} == {("odd",)}
    assert any(operator in finding.what for finding in report.findings)
