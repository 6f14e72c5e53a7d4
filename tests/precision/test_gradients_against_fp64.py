"""Unscaled gradients of a small network, at every scale from 2^0 to 2^24, against those of FP64.

Weights and inputs are half-precision numbers, so that all modes compute the same function. What scaling does to FP16
gradients is predicted by an FP64 network whose gradient tensors are rounded to FP16 one by one, and by nothing fitted.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.numerics.formats import FLOAT16
from mptrain.optimizer import SGD, Weights
from mptrain.precision.apply import autocast, cast_model, input_dtype
from mptrain.precision.upcast import products
from tests.precision.modes import mode

CPU = torch.device("cpu")
SCALES = [2.0**exponent for exponent in range(25)]
#: Roundings that a value may pass on its way from input to gradient: three layers of product and tanh, there and back.
ROUNDINGS = 14
LOW = 2.0**-22.5  # largest gradient of a loss that needs scaling; no power of two, so that no edge is met exactly
HIGH = 2.0**-4.5  # largest gradient of a loss that 2^24 is too much for


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    return model.half().double()


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 20, generator=generator).half().double(), torch.randint(5, (64,), generator=generator)


def backward(model, weight, scale, round_gradient):
    """Gradients of parameters and of layer outputs, unscaled; each passes through ``round_gradient`` while scaled."""
    model, (inputs, targets) = copy.deepcopy(model), samples()
    found, value = {}, inputs
    for parameter in model.parameters():
        parameter.register_hook(round_gradient)
    for index, layer in enumerate(model):
        value = layer(value)
        value.register_hook(round_gradient)
        value.register_hook(lambda grad, index=index: found.__setitem__(f"output {index}", grad / scale))
    (F.cross_entropy(value, targets) * weight * scale).backward()
    found |= {name: parameter.grad / scale for name, parameter in model.named_parameters()}
    return found


@functools.cache
def exact(largest):
    """FP64 gradients of a loss weighted so that the largest of them has this size; and that weight."""
    plain = backward(network(), 1.0, 1.0, lambda grad: grad)
    weight = largest / max(grad.abs().max().item() for grad in plain.values())
    return backward(network(), weight, 1.0, lambda grad: grad), weight


def parameters_of(gradients):
    return torch.cat([grad.flatten() for name, grad in gradients.items() if not name.startswith("output")])


def relative_error(gradients, truth):
    return ((parameters_of(gradients) - parameters_of(truth)).norm() / parameters_of(truth).norm()).item()


def measured(name, largest, scale):
    """Unscaled parameter gradients of a mode, and its verdict."""
    policy, model, (inputs, targets) = mode(name, cpu_kernels="upcast"), network().float(), samples()
    cast_model(model, policy)
    weights = Weights(dict(model.named_parameters()), SGD(), master_weights=policy.master_weights)
    with products(policy, CPU).context:
        with autocast(policy, CPU):
            loss = F.cross_entropy(model(inputs.to(input_dtype(policy))).float(), targets) * exact(largest)[1]
        (loss * scale).backward()
    gradients = {key: p.grad.double() / scale for key, p in model.named_parameters()}
    weights.gradients.accumulate()
    return gradients, weights.judge(torch.tensor([scale]), skip_on_overflow=True)


@pytest.mark.parametrize("largest", [LOW, HIGH])
def test_in_fp32_every_scale_gives_the_same_bits_and_they_are_right_to_fp32(largest):
    truth, _ = exact(largest)
    first, _ = measured("fp32", largest, 1.0)
    assert relative_error(first, truth) <= ROUNDINGS * 2.0**-24
    for scale in SCALES:
        gradients, verdict = measured("fp32", largest, scale)
        assert not verdict.overflow
        assert all(torch.equal(gradients[name], first[name]) for name in gradients), scale


@pytest.mark.parametrize("largest", [LOW, HIGH])
@pytest.mark.parametrize("name", ["amp_dynamic", "fp16_dynamic"])
def test_in_fp16_the_error_at_every_scale_is_that_of_rounding_gradients_to_fp16(name, largest):
    """Up to the scale at which the largest gradient leaves the format: 65520 and more round to inf."""
    truth, weight = exact(largest)
    first = math.ceil(math.log2(FLOAT16.max * (1 + FLOAT16.epsilon / 4) / largest))
    slack = ROUNDINGS * FLOAT16.epsilon / 2
    for scale in SCALES:
        gradients, verdict = measured(name, largest, scale)
        assert bool(verdict.overflow) == (scale >= 2.0**first)
        if verdict.overflow:
            continue
        rounded = backward(network(), weight, scale, lambda grad: grad.half().double())
        assert abs(relative_error(gradients, truth) - relative_error(rounded, truth)) <= slack, scale


@pytest.mark.parametrize("name", ["amp_dynamic", "fp16_dynamic"])
def test_trap_10_scaling_brings_back_gradients_that_fp16_loses(name):
    truth, weight = exact(LOW)
    at_one, _ = measured(name, LOW, 1.0)
    rounded = backward(network(), weight, 1.0, lambda grad: grad.half().double())
    lost = parameters_of(truth).abs() < FLOAT16.smallest_subnormal / 2
    assert lost.double().mean() > 0.5
    zero, expected = (parameters_of(gradients)[lost] == 0 for gradients in (at_one, rounded))
    assert (zero == expected).double().mean() > 0.99
    assert zero.double().mean() > 0.9  # the others were lifted above the edge by what was rounded upstream
    assert relative_error(at_one, truth) > 0.1
    scaled, _ = measured(name, LOW, 2.0**20)
    assert relative_error(scaled, truth) <= ROUNDINGS * FLOAT16.epsilon / 2
    assert parameters_of(scaled)[lost].bool().double().mean() > 0.99
