"""What optimizers of torch lose of updates of half-precision weights: told from their state, and seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.numerics.lost_updates import RoundedUpdates, lost_at_start, lost_decays, states_of
from mptrain.optimizer import compensated, stochastic

HALF = torch.bfloat16
OPTIMIZERS = {
    "AdamW loop": lambda params, lr: torch.optim.AdamW(params, lr, foreach=False),
    "AdamW foreach": lambda params, lr: torch.optim.AdamW(params, lr, foreach=True),
    "AdamW fused": lambda params, lr: torch.optim.AdamW(params, lr, fused=True),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr, weight_decay=0.01),
    "SGD with momentum": lambda params, lr: torch.optim.SGD(params, 100 * lr, momentum=0.9),
}


def network(dtype=HALF):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 80), nn.LayerNorm(80), nn.GELU(), nn.Linear(80, 10)).to(dtype)


def backward(model, step):
    torch.manual_seed(step)
    inputs, targets = torch.randn(32, 30), torch.randint(0, 10, (32,))
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs.to(model[0].weight.dtype)).float(), targets).backward()


@pytest.mark.parametrize("lr", [2e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_lost_share_told_from_the_state_is_within_a_point_of_the_one_seen(kind, lr):
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters(), lr)
    for step in range(10):
        backward(model, step)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        told = seen = updates = 0
        for parameter, old in zip(model.parameters(), before, strict=True):
            update = RoundedUpdates(optimizer).exact(parameter, old, lambda tensor: tensor)
            moving = update != 0
            stays = (old.float() + update).to(HALF) == old
            told += int((moving & stays).sum())
            seen += int((moving & (parameter.detach() == old)).sum())
            updates += int(moving.sum())
        assert abs(told - seen) < 0.01 * updates


def test_the_share_at_the_start_is_that_of_weights_out_of_reach_at_the_largest_rate_of_each_group():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))  # a warm-up from 0
    assert optimizer.param_groups[0]["lr"] == 0
    known = lost_at_start(optimizer)
    assert known is not None
    assert known["lr"] == 1e-3
    assert known["dtype"] == "bfloat16"
    assert known["elements"] == sum(parameter.numel() for parameter in model.parameters())
    stays = sum(
        int(((p.float() + 0.999e-3).to(HALF) == p).logical_and((p.float() - 0.999e-3).to(HALF) == p).sum())
        for p in model.parameters()
    )
    assert abs(known["stuck"] - stays) <= 0.01 * known["elements"]
    del schedule


@pytest.mark.parametrize(
    "case",
    ["fp32 weights", "frozen half weights", "rate 0", "another optimizer", "stochastic", "compensated", "an option"],
)
def test_nothing_is_said_at_the_start_of_what_is_not_lost_or_not_known(case):
    model = network(torch.float32 if case == "fp32 weights" else HALF)
    if case == "frozen half weights":  # LoRA: FP32 adapters on a frozen base
        model.requires_grad_(requires_grad=False)
        model.append(nn.Linear(10, 10))
    kind = torch.optim.RMSprop if case == "another optimizer" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.0 if case == "rate 0" else 1e-5)
    if case == "an option":  # torchao's optimizers
        optimizer.bf16_stochastic_round = True
    optimizer = {"stochastic": stochastic, "compensated": compensated}.get(case, lambda each: each)(optimizer)
    assert lost_at_start(optimizer) is None


@pytest.mark.parametrize(
    ("state", "loses"),
    [
        ({}, True),
        ({"exp_avg": lambda p: torch.zeros_like(p, dtype=torch.float32)}, True),
        ({"master_param": lambda p: p.detach().float()}, False),  # Apex, Transformer Engine
        ({"w": lambda p: p.detach().float() + 1e-6}, False),  # a copy by another name
        ({"kahan_comp": torch.zeros_like}, False),  # optimi
        ({"compensation": lambda p: torch.zeros_like(p, dtype=torch.int16)}, False),
        ({"master_param": lambda p: torch.zeros(3)}, True),
    ],
)
def test_a_copy_in_the_state_of_an_optimizer_keeps_updates(state, loses):
    parameter = nn.Parameter(torch.randn(20, 20).to(HALF))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {name: make(parameter) for name, make in state.items()}
    assert RoundedUpdates(optimizer).are_lost(parameter) is loses
    wide = nn.Parameter(torch.randn(20, 20))
    assert RoundedUpdates(torch.optim.SGD([wide], lr=0.1)).are_lost(wide) is False


def test_moments_that_cannot_fall_are_named_with_their_decay():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert lost_decays(states_of(optimizer)) == []
    backward(model, 0)
    optimizer.step()
    assert lost_decays(states_of(optimizer)) == [{"state": "exp_avg_sq", "dtype": "bfloat16", "keeps": 0.999}]
    for other in (
        torch.optim.AdamW(network().parameters(), lr=1e-3, betas=(0.9, 0.95)),
        torch.optim.AdamW(network(torch.float32).parameters(), lr=1e-3),
        stochastic(torch.optim.AdamW(network().parameters(), lr=1e-3)),
    ):
        for group in other.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        other.step()
        assert lost_decays(states_of(other)) == []
