"""Wrappers of optimizers of BF16 weights: nothing is lost, and everything that a loop asks of an optimizer works."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from mptrain.numerics.rounding import with_compensation
from mptrain.optimizer import compensated, stochastic, without_masters
from mptrain.system.errors import ConfigError
from tests.small_runs import environment

WRAPPERS = [stochastic, compensated]
KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-5),
}


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.GELU(), nn.Linear(50, 10)).to(dtype)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        torch.manual_seed(step)
        inputs, targets = torch.randn(16, 30), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.to(model[0].weight.dtype)).float(), targets).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def exact(parameter, state):
    kept = state.get("compensation")
    return parameter.detach().float() if kept is None else with_compensation(parameter, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_weights_follow_the_same_optimizer_in_fp32_where_bf16_alone_stands_still(wrap, kind):
    start = network(torch.float32)
    ends = {}
    for name in ("fp32", "bf16", "wrapped"):
        model = network(torch.float32 if name == "fp32" else torch.bfloat16)
        optimizer = KINDS[kind](model.parameters())
        train(model, wrap(optimizer) if name == "wrapped" else optimizer, 40)
        values = [exact(parameter, optimizer.state[parameter]) for parameter in model.parameters()]
        moved = [after - before for after, before in zip(values, start.parameters(), strict=True)]
        ends[name] = torch.cat([each.detach().flatten() for each in moved])
    wanted = ends["fp32"]
    gain = {name: float(end @ wanted / (wanted @ wanted)) for name, end in ends.items()}
    assert 0.9 < gain["wrapped"] < 1.1
    assert gain["bf16"] < 0.75
    state = {
        tensor.dtype for entry in optimizer.state.values() for key, tensor in entry.items() if key != "compensation"
    }
    assert state == {torch.float32}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_weights_do_not_depend_on_how_many_are_updated_together(wrap, monkeypatch):
    together = train(model := network(), wrap(torch.optim.AdamW(model.parameters(), lr=1e-4)), 5)
    monkeypatch.setattr(without_masters, "_TOGETHER", 1)
    apart = train(model := network(), wrap(torch.optim.AdamW(model.parameters(), lr=1e-4)), 5)
    assert all(torch.equal(together[name], apart[name]) for name in together)


def test_the_seed_chooses_the_random_bits():
    ends = [
        train(model := network(), stochastic(torch.optim.AdamW(model.parameters(), lr=1e-4), seed=seed), 3)
        for seed in (0, 0, 1)
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_loaded_state_dict_continues_with_the_same_bits(wrap):
    model = network()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    whole = train(model, optimizer, 3, start=3)
    other = network()
    resumed = wrap(torch.optim.AdamW(other.parameters(), lr=1e-3))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    continued = train(other, resumed, 3, start=3)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_state_of_steps_before_the_wrapper_is_kept_in_fp32_from_then_on():
    model = network()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, plain, 2)
    optimizer = stochastic(plain)
    train(model, optimizer, 1, start=2)
    assert all(entry["exp_avg"].dtype == torch.float32 and entry["step"] == 3 for entry in optimizer.state.values())


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_loops_do_with_an_optimizer_works(wrap):
    model = network()
    optimizer = wrap(torch.optim.AdamW(model[0].parameters(), lr=1e-3))
    optimizer.add_param_group({"params": list(model[1:].parameters()), "lr": 1e-2})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, 2)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-3]
    assert len(calls) == 2
    loss = optimizer.step(lambda: torch.tensor(3.0))
    assert float(loss) == 3.0
    model[0].weight.grad = None  # as of one that no pass has reached
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_fp32_weights_beside_bf16_ones_are_updated_as_without_the_wrapper():
    model, alone = network(), network()
    for each in (model, alone):
        each[1].float()
    gradients = [torch.randn(50), torch.randn(50)]
    for each, wrap in ((model, stochastic), (alone, lambda optimizer: optimizer)):
        optimizer = wrap(torch.optim.AdamW(each.parameters(), lr=1e-3))
        for parameter, gradient in zip(each[1].parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(model[1].weight, alone[1].weight)


class CountsForAll(torch.optim.SGD):
    """Optimizer that keeps a number for all of its weights, as schedule-free ones do."""

    def step(self, closure=None):
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_needs_all_weights_together_is_refused_by_name_or_pays(monkeypatch):
    monkeypatch.setattr(without_masters, "_TOGETHER", 1)
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match="CountsForAll counts its steps for all weights together") as refused:
        train(model, stochastic(CountsForAll(model.parameters(), lr=0.1)), 1)
    assert "at_once=True" in refused.value.hint
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer = stochastic(CountsForAll(model.parameters(), lr=0.1), at_once=True)
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["calls"] == 2


class CountsBytes(torch.optim.AdamW):
    """AdamW that remembers the bytes of the weights and gradients that each call updates, and whose they are."""

    def step(self, closure=None):
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        vars(self).setdefault("calls", []).append(
            (sum(each.nbytes + each.grad.nbytes for each in params), {each.dtype for each in params})
        )
        return super().step(closure)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_step_has_copies_of_a_few_weights_at_a_time(wrap, monkeypatch):
    monkeypatch.setattr(without_masters, "_TOGETHER", 4000)
    model = network()
    inner = CountsBytes(model.parameters(), lr=1e-3)
    train(model, wrap(inner), 2)
    largest = max(parameter.numel() for parameter in model.parameters())
    assert len(inner.calls) >= 4
    assert all(dtypes == {torch.float32} and size <= 8 * max(largest, 1000) for size, dtypes in inner.calls)
    assert sum(size for size, _ in inner.calls) == 2 * 8 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_it_cannot_do_is_refused(wrap):
    with pytest.raises(ConfigError, match="no BF16 weights"):
        wrap(torch.optim.SGD(network(torch.float32).parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="FP16 weights"):
        wrap(torch.optim.SGD(network(torch.float16).parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="LBFGS steps with a closure"):
        wrap(torch.optim.LBFGS(network().parameters()))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_one_step_leaves_no_copies_and_groups_as_they_were(wrap):
    model = network()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer, 1)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    assert {id(key) for key in optimizer.state} == {id(parameter) for parameter in model.parameters()}


@pytest.mark.distributed
def test_shards_on_two_ranks_have_the_bits_of_the_whole_and_what_they_lose_is_told():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.optimizer.sharded_rounding"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["stochastic"] is True
    assert answers["compensated"] is True
    assert answers["fp32 shards"] is True
    assert answers["fp32 shards lose"] is False
    told, seen = answers["shares"]
    assert 0.2 < seen < 1
    assert abs(told - seen) < 0.01
    assert 0 < answers["watched"] < 1


@pytest.mark.process
@pytest.mark.parametrize("wrap", ["stochastic", "compensated"])
@pytest.mark.parametrize(("kernels", "expected"), [("fused=True", 8), ("foreach=True", 12), ("foreach=False", 16)])
def test_a_step_takes_as_much_memory_as_the_page_says(wrap, kernels, expected):
    """Resident memory at the peak of a step, beyond that before it, of one parameter of 16 million weights."""
    program = f"""
import torch
import mptrain
from mptrain.system import machine
weight = torch.nn.Parameter(torch.zeros(4096, 4096, dtype=torch.bfloat16))
optimizer = mptrain.optimizer.{wrap}(torch.optim.AdamW([weight], lr=1e-3, {kernels}))
for _ in range(3):
    weight.grad = torch.ones_like(weight)
    machine.forget_peak()
    before = machine.resident_memory()
    optimizer.step()
print((machine.resident_peak() - before) / weight.numel())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) == pytest.approx(expected, abs=0.75)


def test_random_bits_do_not_depend_on_the_default_dtype(monkeypatch):
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            model = nn.Linear(50, 50, bias=False, dtype=torch.bfloat16)
            nn.init.ones_(model.weight)
            optimizer = stochastic(torch.optim.SGD(model.parameters(), lr=1e-3))
            optimizer.param_groups[0]["rounded_updates"] = 4097
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            ends.append(model.weight.detach().clone())
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*ends)


class KeepsLists(torch.optim.SGD):
    """SGD with FP32 momentum in a list in its state, as SOAP has its factors."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter].setdefault("factors", [torch.zeros_like(parameter)])
                held[0].mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * held[0])


def test_state_in_lists_keeps_its_dtype_when_it_is_loaded():
    model = network()
    optimizer = stochastic(KeepsLists(model.parameters(), lr=1e-3))
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    whole = train(model, optimizer, 3, start=3)
    other = network()
    resumed = stochastic(KeepsLists(other.parameters(), lr=1e-3))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    continued = train(other, resumed, 3, start=3)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_flags_of_an_optimizer_are_no_counts(monkeypatch):
    monkeypatch.setattr(without_masters, "_TOGETHER", 1)
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.initialized = False
    torch.optim.lr_scheduler.ConstantLR(inner)  # counts calls of a step that it wraps
    train(model, stochastic(inner), 2)


class Fails(torch.optim.SGD):
    """SGD whose step fails, as without memory."""

    def step(self, closure=None):
        raise torch.OutOfMemoryError("no memory")


def test_a_step_that_fails_leaves_weights_groups_state_and_compensation_as_they_were():
    model = network()
    optimizer = compensated(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    train(model, optimizer, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    monkey = optimizer.inner.step
    optimizer.inner.step = Fails.step.__get__(optimizer.inner)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, 1, start=2)
    optimizer.inner.step = monkey
    after = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    for number, entries in before[1]["state"].items():
        assert entries.keys() == after[1]["state"][number].keys()
        assert torch.equal(entries["compensation"], after[1]["state"][number]["compensation"])


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_weights_that_others_set_stay_finite_and_have_no_old_compensation(wrap):
    """As pruning and resets of a layer do: beside a weight of 0, a compensation below 0 would be NaN."""
    model = network()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    mask = torch.rand(model[0].weight.shape) < 0.5
    for step in range(6):
        train(model, optimizer, 1, step)
        with torch.no_grad():
            model[0].weight.mul_(mask)
            if step == 3:
                model[0].weight.neg_()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not model[0].weight[~mask].any()


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_of_model_and_wrapper_continues_with_the_same_bits(wrap, copied):
    model = network()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-4))
    train(model, optimizer, 2)
    other, theirs = copied((model, optimizer))
    for each, stepped in ((model, optimizer), (other, theirs)):
        train(each, stepped, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert theirs.param_groups is theirs.inner.param_groups


def test_compensation_of_another_wrapper_is_used_once():
    model = network()
    first = compensated(torch.optim.SGD(model.parameters(), lr=1e-3))
    train(model, first, 3)
    then = stochastic(torch.optim.SGD(model.parameters(), lr=1e-3))
    then.load_state_dict(first.state_dict())
    before = [parameter.detach().float().clone() for parameter in model.parameters()]
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        then.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert ((new.float() - old).abs() <= 2**-7 * old.abs()).all()
    assert not any("compensation" in state for state in then.state.values())


def test_a_group_of_fp16_weights_and_a_wrapper_of_a_wrapper_are_refused():
    model = network()
    optimizer = stochastic(torch.optim.SGD(model.parameters(), lr=1e-3))
    with pytest.raises(ConfigError, match="FP16"):
        optimizer.add_param_group({"params": (nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2))})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))})
    assert len(optimizer.param_groups[1]["params"]) == 2
    with pytest.raises(ConfigError, match="rounds BF16 weights already"):
        compensated(optimizer)
