"""Watched loops of half-precision weights: what is said of updates that rounding loses, and what is not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mptrain
from mptrain.optimizer import compensated, stochastic
from mptrain.runlog import read_run
from mptrain.system.errors import UsageError

KINDS = ("no_master_weights", "frozen", "state_rounding", "not_looked_at")


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.GELU(), nn.Linear(50, 10)).to(dtype)


def watched(folder, model, optimizer, steps=4, after=lambda step: None, scaler=None):
    """Events about lost updates, and the values of the newest look."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = mptrain.watch(model, optimizer, scaler, every=1, dir=folder)
    with watch:
        for step in range(1, steps + 1):
            torch.manual_seed(step)
            optimizer.zero_grad()
            dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
            inputs = torch.randn(16, 30).to(dtype)
            loss = nn.functional.cross_entropy(model(inputs).float(), torch.randint(0, 10, (16,)))
            (loss if scaler is None else scaler.scale(loss)).backward()
            after(step)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        watch.flush()
        last = watch.last
    assert watch._given_up is False
    return [event for event in read_run(folder).events() if event["event"] in KINDS], last


def test_a_loop_of_bf16_weights_is_told_what_it_loses(tmp_path):
    model = network()
    events, last = watched(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), lr=2e-5))
    assert [event["event"] for event in events] == ["no_master_weights", "state_rounding", "frozen"]
    assert "1.weight" in events[-1]["parameters"]
    assert 0.5 < last["lost_updates"] <= 1
    assert 0.5 < last["lost_magnitude"] <= 1


@pytest.mark.parametrize("wrap", [stochastic, compensated])
def test_nothing_is_said_of_optimizers_that_lose_nothing(tmp_path, wrap):
    model = network()
    events, last = watched(tmp_path / "run", model, wrap(torch.optim.AdamW(model.parameters(), lr=2e-5)))
    assert events == []
    assert "lost_updates" not in last


class KeepsMasters(torch.optim.SGD):
    """SGD that makes FP32 master weights in its first step, as Apex and Transformer Engine do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                master = state.setdefault("master_param", parameter.detach().float())
                master -= group["lr"] * parameter.grad.float()
                parameter.copy_(master)


@pytest.mark.parametrize("first_is_skipped", [False, True])
def test_masters_in_the_state_of_an_optimizer_are_found_also_if_its_first_step_is_skipped(tmp_path, first_is_skipped):
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if first_is_skipped else None

    def overflow(step):
        if first_is_skipped and step == 1:
            model[0].weight.grad.fill_(torch.inf)

    optimizer = KeepsMasters(model.parameters(), lr=1e-6)
    events, last = watched(tmp_path / "run", model, optimizer, after=overflow, scaler=scaler)
    assert [event for event in events if event["event"] != "not_looked_at"] == []
    assert "lost_updates" not in last


@pytest.mark.parametrize(
    "case", ["adapters", "fp64", "complex", "unused", "zero rate", "zero tensor rate", "zero group"]
)
def test_weights_that_lose_nothing_or_have_no_update_are_no_alarm(tmp_path, case):
    model = network(
        torch.float64 if case == "fp64" else torch.float32 if case in ("adapters", "complex") else torch.bfloat16
    )
    groups = list(model.parameters())
    if case == "adapters":  # LoRA: FP32 adapters on a frozen BF16 base
        base = nn.Linear(30, 30).bfloat16().requires_grad_(False)

        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.adapter, self.base = model, base

            def forward(self, inputs):
                return self.adapter(inputs + self.base(inputs.bfloat16()).float())

        model = Adapted()
        groups = list(model.adapter.parameters())
    if case == "complex":
        model.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
        groups = list(model.parameters())
    rate = {"zero rate": 0.0, "zero tensor rate": torch.tensor(0.0)}.get(case, 1e-2)
    if case == "unused":
        model.append(nn.Identity())
        model.register_parameter("unused", nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
        groups = list(model.parameters())
    if case == "zero group":
        groups = [{"params": list(model[0].parameters()), "lr": 0.0}, {"params": list(model[1:].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=rate)
    events, last = watched(tmp_path / "run", model, optimizer)
    frozen = [name for event in events if event["event"] == "frozen" for name in event["parameters"]]
    assert not {"unused", "0.weight", "0.bias"} & {*frozen}
    if case in ("adapters", "fp64", "complex"):
        assert "lost_updates" not in last
    if "zero" in case and case != "zero group":
        assert frozen == []


def test_a_weight_that_moves_there_and_back_does_not_stand_still(tmp_path):
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with mptrain.watch(model, optimizer, every=2, dir=tmp_path / "run"):
        for step in range(8):
            optimizer.zero_grad()
            model(torch.full((1, 4), (-1.0) ** step * 2.0**-7).bfloat16()).sum().backward()
            optimizer.step()
    assert [event for event in read_run(tmp_path / "run").events() if event["event"] == "frozen"] == []


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_other_optimizers_are_observed_and_their_magnitudes_are_not_known(tmp_path, kind):
    model = network()
    events, last = watched(tmp_path / "run", model, kind(model.parameters(), lr=1e-5))
    assert "no_master_weights" not in {event["event"] for event in events}
    assert 0 <= last["lost_updates"] <= 1
    assert last["lost_magnitude"] != last["lost_magnitude"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_parameters_without_dimensions_are_looked_at(tmp_path, kind):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = network(), nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))

        def forward(self, inputs):
            return self.inner(inputs) * self.scale

    model = Scaled()
    events, last = watched(tmp_path / "run", model, kind(model.parameters(), lr=1e-5))
    assert "not_looked_at" not in {event["event"] for event in events}
    assert "scale" in next(event["parameters"] for event in events if event["event"] == "frozen")
    assert last["lost_updates"] > 0.5


def test_weights_without_memory_do_not_end_a_watch_before_it_has_begun():
    model = network().to("meta")
    with mptrain.watch(model, torch.optim.AdamW(model.parameters(), lr=1e-5)) as watch:
        assert watch.last == {}


def test_a_function_gets_what_was_found_before_it_was_there():
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5)).bfloat16()
    with pytest.warns(UserWarning, match="no master copy"):
        watch = mptrain.watch(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    seen = []
    with watch:
        watch.on_event(lambda event: seen.append(event.kind))
        assert seen == ["no_master_weights"]


def test_the_optimizer_inside_of_a_wrapper_is_not_the_one_to_watch():
    model = nn.Linear(20, 30).bfloat16()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
    wrapper = mptrain.optimizer.stochastic(inner)
    with pytest.raises(UsageError, match="AdamW is inside of StochasticRounding"):
        mptrain.watch(model, inner)
    with mptrain.watch(model, wrapper) as watch:
        model(torch.randn(4, 20).bfloat16()).float().sum().backward()
        wrapper.step()
    assert watch.last["step"] == 1


def test_sparse_gradients_are_looked_at_and_no_state_is_made_for_weights_without_one():
    table = nn.Embedding(50, 8, sparse=True).bfloat16()
    other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([*table.parameters(), other], lr=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mptrain.watch(table, optimizer, every=1) as watch:
            for _ in range(2):
                optimizer.zero_grad()
                table(torch.randint(0, 50, (16,))).float().sum().backward()
                optimizer.step()
    assert "lost_updates" in watch.last or watch.last["step"] == 2
    assert not optimizer.state
