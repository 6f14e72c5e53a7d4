"""A checkpoint's optimizer state is read by torch.optim, which then goes on with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.optimizer.rules import SGD
from mptrain.optimizer.torch_rule import torch_optim_state
from mptrain.optimizer.weights import Weights
from tests.small_runs import TINY, loop_of

TORCH = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.001),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.001, weight_decay=0.0),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


@pytest.mark.parametrize(
    ("optimizer", "width", "words"),
    [
        (torch.optim.Adam, 3, "momentum_buffer of weight, but Adam needs exp_avg and exp_avg_sq"),
        (torch.optim.SGD, 3, "momentum_buffer of weight, but SGD needs no state"),
        (
            lambda params: torch.optim.SGD(params, momentum=0.9),
            4,
            r"has shape \(2, 3\), but the parameter has \(2, 4\)",
        ),
    ],
    ids=["other kind", "other constants", "other shape"],
)
def test_state_of_something_else_is_refused_with_a_reason(optimizer, width, words):
    weights = Weights({"weight": nn.Parameter(torch.zeros(2, 3))}, SGD(), master_weights=True)
    model = nn.Linear(width, 2, bias=False)
    with pytest.raises(ValueError, match=words):
        torch_optim_state(weights.updater.state_dict(), optimizer(model.parameters()), dict(model.named_parameters()))


def test_a_parameter_without_state_or_name_is_named():
    weights = Weights({"weight": nn.Parameter(torch.zeros(2, 3))}, SGD(), master_weights=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(ValueError, match="no state of bias"):
        torch_optim_state(weights.updater.state_dict(), optimizer, dict(model.named_parameters()))
    with pytest.raises(ValueError, match="not in named"):
        torch_optim_state(weights.updater.state_dict(), optimizer, {})


@pytest.mark.parametrize("name", TORCH)
def test_torch_optim_goes_on_where_a_run_has_ended(tmp_path, name):
    words = (
        *TINY,
        "precision=fp32",
        f"optimizer={name}",
        "schedule=constant",
        "optimizer.weight_decay=0",
        "train.max_steps=6",
    )
    lr = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001, "adagrad": 0.01}[name]
    loop = loop_of(tmp_path, *words, f"optimizer.lr={lr}")
    loop.run()
    saved = loop.storage.store.load_latest().state
    model = loop.parts.model
    optimizer = TORCH[name](model.parameters())
    optimizer.load_state_dict(
        torch_optim_state(saved["learners"]["main"]["optimizer"], optimizer, dict(model.named_parameters()))
    )
    weights, one = loop.parts.learners[0].weights, torch.ones(1)
    before = {key: value.clone() for key, value in weights.masters.full_precision().items()}
    gradients = {key: torch.randn_like(value) for key, value in before.items()}

    def give_gradients():
        weights.gradients.zero_grad()
        for key, parameter in model.named_parameters():
            parameter.grad = gradients[key].clone()

    give_gradients()
    optimizer.step()
    theirs = {key: value.detach().clone() for key, value in model.named_parameters()}
    weights.masters.load_full_precision(before)
    give_gradients()
    weights.update(weights.judge(one, skip_on_overflow=True), torch.tensor([lr]), one)
    for key, value in weights.masters.full_precision().items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-7)
        assert not torch.equal(value, before[key])
