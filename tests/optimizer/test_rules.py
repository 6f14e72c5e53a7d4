from __future__ import annotations

import math

import pytest
import torch

from mptrain.config.allowed_targets import PACKAGES
from mptrain.config.section_checks import check_compatible
from mptrain.config.targets import Target
from mptrain.optimizer import SGD, Adagrad
from mptrain.optimizer.rules import Group, UpdateInputs
from mptrain.precision.policy import Policy
from mptrain.system.errors import ConfigError
from tests.capability import without
from tests.loops import each
from tests.optimizer.kinds import RULES

SHAPES = [(), (1,), (7,), (16, 17), (3, 5, 2), (64, 33)]


def stride(lr=0.125, step=1.0, grad_scale=1.0, skip=0.0):
    return UpdateInputs(*(torch.tensor([value]) for value in (lr, step, grad_scale, skip)))


def group_of(rule, generator, weight_decay=0.0, dtype=torch.float32):
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    states = [rule.state(weight) for weight in weights]
    return Group(weights, {key: [state[key] for state in states] for key in states[0]}, weight_decay)


def tensors_of(group):
    return [*group.weights, *(tensor for tensors in group.state.values() for tensor in tensors)]


def draws(generator):
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@each("weight_decay", [0.0, 0.25])
@each("scale", [1.0, 2.0**16, 1000.0 / 0.3])
@each("name", [*RULES, "adagrad from 0.125"])
def test_a_rule_without_a_kernel_computes_what_the_kernel_computes(name, weight_decay, scale):
    """Up to the rounding of one multiply-add, 2^-23 of each weight and state, in every one of 20 updates."""
    rule = Adagrad(initial_accumulator=0.125) if name.startswith("adagrad f") else RULES[name]
    fused, plain = (group_of(rule, torch.Generator().manual_seed(0), weight_decay) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        grads = [grad * scale for grad in draws(generator)]
        skip = float(step % 4 == 2)
        rule.apply(fused, [grad.clone() for grad in grads], stride(step=step + 1.0, grad_scale=scale, skip=skip))
        with without(fused=False):
            rule.apply(plain, grads, stride(step=step + 1.0, grad_scale=scale, skip=skip))
        for mine, theirs in zip(tensors_of(plain), tensors_of(fused), strict=True):
            assert mine.shape == theirs.shape
            assert torch.allclose(mine, theirs, rtol=(step + 1) * 2.0**-22, atol=(step + 1) * 2.0**-24)


@each("value", [math.inf, -math.inf, math.nan])
@each("name", RULES)
@each("fused", [True, False])
def test_trap_13_a_refused_call_changes_no_bit_whatever_the_gradients_hold(name, value, fused):
    rule = RULES[name]
    group = group_of(rule, torch.Generator().manual_seed(0), weight_decay=0.5)
    tensors = tensors_of(group)
    before = [tensor.clone() for tensor in tensors]
    grads = [torch.full(shape, value) for shape in SHAPES]
    with without(fused=fused):
        rule.apply(group, grads, stride(skip=1.0))
    assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))


@each("name", RULES)
def test_trap_17_the_kernels_refuse_at_exactly_one(name):
    """A sum of flags, such as 2, is no refusal to them: this is why the verdict's flag is 0 or 1."""
    moved = {}
    for flag in (0.0, 1.0, 2.0):
        group = group_of(RULES[name], torch.Generator().manual_seed(0))
        before = group.weights[3].clone()
        RULES[name].apply(group, draws(torch.Generator().manual_seed(1)), stride(skip=flag))
        moved[flag] = not torch.equal(before, group.weights[3])
    assert moved == {0.0: True, 1.0: False, 2.0: True}


def test_state_is_typed_like_the_weight_it_belongs_to():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rule in RULES.values():
            assert all(tensor.dtype == dtype for tensor in rule.state(torch.zeros(3, dtype=dtype)).values())
    assert SGD(momentum=0.0).state(torch.zeros(3)) == {}


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov=true requires momentum"):
        SGD(momentum=0.0, nesterov=True)


@each(
    ("target", "key", "values"),
    [
        ("SGD", "momentum", [1.0, -0.1, math.nan]),
        ("SGD", "lr", [-1.0, math.nan, math.inf]),
        ("Adam", "eps", [0.0, -1e-8, 1.0, math.nan]),
        ("AdamW", "weight_decay", [-0.1, math.nan, math.inf]),
        ("Adam", "betas", [[1.0, 0.9], [0.9], [0.9, -0.1], 0.9]),
        ("Adagrad", "initial_accumulator", [-1.0, math.inf]),
    ],
)
def test_constants_outside_their_ranges_are_refused(target, key, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"optimizer.{key}="):
            Target(f"mptrain.optimizer.{target}", {key: value}, PACKAGES["optimizer"]).check("optimizer")


HALF_STATE = Policy(
    "fp16_pure", "float16", "float16", autocast=False, master_weights=False, optimizer_state="parameters"
)
FP32_STATE = Policy("fp16_pure", "float16", "float16", autocast=False, master_weights=False)


@each(("eps", "refused"), [(1e-8, True), (2.0**-25, True), (2.0**-24, False), (1e-4, False)])
@each("rule", ["Adam", "AdamW", "Adagrad"])
def test_trap_30_an_eps_that_is_zero_in_fp16_is_refused(rule, eps, refused):
    problems = check_compatible(HALF_STATE, Target(f"mptrain.optimizer.{rule}", {"eps": eps}, PACKAGES["optimizer"]))
    assert len(problems) == refused
    for problem in problems:
        assert f"optimizer.eps={eps:g}" in problem.what
        assert "5.96e-08 (2^-24)" in problem.what
        assert "optimizer.eps=1e-4" in problem.hint
    assert check_compatible(FP32_STATE, Target(f"mptrain.optimizer.{rule}", {"eps": eps}, PACKAGES["optimizer"])) == []
