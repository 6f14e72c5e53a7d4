"""Optimizers of torch and timm train as in a loop written by hand, in every precision mode, and resume bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from mptrain.optimizer import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Weights,
    adapt,
    timm_optimizer,
    torch_optim_state,
    torch_optimizer,
)
from mptrain.optimizer.rules import ParameterOptions
from mptrain.optimizer.torch_rule import groups_of, prefer_fused
from mptrain.system.errors import ConfigError
from tests.capability import CPU, without
from tests.loops import each
from tests.optimizer.kinds import KINDS, make, run
from tests.optimizer.torch_by_hand import SMALL, decaying, kept_batches, train_by_hand
from tests.small_runs import loop_of, parts_of, steps_of, whole_and_resumed


def muon(masters):
    matrices = {name: p for name, p in masters.items() if p.ndim == 2}
    others = {name: p for name, p in masters.items() if p.ndim != 2}
    return [torch.optim.Muon(matrices.values(), weight_decay=0.1), torch.optim.AdamW(decaying(others, 0.1), fused=True)]


def of_timm(name, masters, decay):
    import timm.optim

    return [getattr(timm.optim, name)(decaying(masters, decay))]


#: Optimizers by name: their words, and how a loop by hand makes them.
BY_NAME = {
    "RAdam": (
        "optimizer=torch optimizer.weight_decay=0.01 optimizer.betas=[0.8,0.99]",
        lambda masters: [torch.optim.RAdam(decaying(masters, 0.01), betas=(0.8, 0.99))],
    ),
    "NAdam": (
        "optimizer=torch optimizer.name=NAdam optimizer.decay_norms_and_biases=true optimizer.weight_decay=0.1",
        lambda masters: [torch.optim.NAdam(decaying(masters, 0.1, every=True))],
    ),
    "Adadelta": ("optimizer=torch optimizer.name=Adadelta", lambda masters: [torch.optim.Adadelta(masters.values())]),
    "Muon": ("optimizer=torch optimizer.name=Muon", muon),
    "AdamW": (  # fused, as torch has a kernel of it
        "optimizer=torch optimizer.name=AdamW",
        lambda masters: [torch.optim.AdamW(decaying(masters, 0.01), fused=True)],
    ),
    "SGD": (
        "optimizer=torch optimizer.name=SGD optimizer.momentum=0.9 optimizer.foreach=true",
        lambda masters: [torch.optim.SGD(masters.values(), momentum=0.9, foreach=True)],
    ),
    "lion": ("optimizer=timm optimizer.weight_decay=0.1", lambda masters: of_timm("Lion", masters, 0.1)),
    "lamb": ("optimizer=timm optimizer.name=lamb", lambda masters: of_timm("Lamb", masters, 0.01)),
}
#: Precision modes by name: their words, and what the loop by hand does.
MODES = {
    "fp32": ((), {}),
    "amp_dynamic": (("train.clip_norm=0.5",), {"scale": 2.0**16, "clip": 0.5, "overflows": (1, 20)}),
    "fp16_dynamic": ((), {"scale": 2.0**16, "overflows": (1, 20)}),
}


def spoiled(monkeypatch, steps):
    """Make the first gradient of these steps inf."""
    from mptrain.optimizer.weights import Weights

    judge, count = Weights.judge, [0]

    def spoil(self, *words, **more):
        count[0] += 1
        if count[0] in steps:
            next(iter(self.gradients.in_place().values())).view(-1)[0] = math.inf
        return judge(self, *words, **more)

    monkeypatch.setattr(Weights, "judge", spoil)


OTHERS = [
    *((name, "fp16_dynamic") for name in BY_NAME if name != "RAdam"),
    *((name, "amp_dynamic") for name in ("RAdam", "Muon", "AdamW")),
    ("lamb", "fp32"),
]


@pytest.mark.parametrize(
    ("name", "mode"), [("RAdam", "fp16_dynamic"), *(pytest.param(*pair, marks=pytest.mark.long) for pair in OTHERS)]
)
def test_thirty_steps_equal_a_loop_by_hand(name, mode, tmp_path, monkeypatch):
    words, by_hand = BY_NAME[name]
    more, loose = MODES[mode]
    words = (*SMALL, *words.split(), *more, f"precision={mode}", "train.max_steps=30")
    parts, _ = parts_of(*words)
    batches = kept_batches(monkeypatch)
    spoiled(monkeypatch, loose.get("overflows", ()))
    loop = loop_of(tmp_path, *words)
    loop.run()
    expected, updates = train_by_hand(parts, batches, by_hand, **loose)
    assert updates == 30 - len(loose.get("overflows", ()))
    assert loop.parts.learners[0].updates == updates
    found = loop.parts.learners[0].weights.masters.full_precision()
    for key, value in expected.items():
        if "clip" in loose:  # the norm is added up in another order
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(found[key], value), key


#: Optimizers whose state has other shapes, dtypes, places and kinds of values: in groups, on the host, in lists, in BF16.
KEPT_OTHERWISE = {
    "Adafactor": "optimizer=torch optimizer.name=Adafactor",
    "ASGD": "optimizer=torch optimizer.name=ASGD",
    "Adam with maxima": "optimizer=torch optimizer.name=Adam optimizer.amsgrad=true",
    "adan": "optimizer=timm optimizer.name=adan",
    "adafactorbv": "optimizer=timm optimizer.name=adafactorbv optimizer.lr=0.01",
    "adamuon": "optimizer=timm optimizer.name=adamuon",
}


def plain(value):
    """A copy of a state with tensors as dtype, device, shape and bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(value.device), tuple(value.shape), value.double().flatten().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.long
@pytest.mark.parametrize("name", ["NAdam", "Muon", "AdamW", "lamb", *KEPT_OTHERWISE])
def test_an_interrupted_run_resumes_bit_for_bit(name, tmp_path):
    words = BY_NAME[name][0] if name in BY_NAME else KEPT_OTHERWISE[name]
    more = ("precision=fp16_dynamic", "train.epochs=3", "inject.step=5", "inject.tensor=gradient:0.weight")
    whole, resumed = whole_and_resumed(tmp_path, *SMALL, *words.split(), *more, after=9)
    assert resumed.notes == []
    (one,), (other,) = whole.parts.learners, resumed.parts.learners
    assert one.updates == 17
    assert plain(one.weights.updater.state_dict()) == plain(other.weights.updater.state_dict())
    for key, value in one.weights.masters.full_precision().items():
        assert torch.equal(value, other.weights.masters.full_precision()[key]), key
    assert [row["loss"] for row in steps_of(whole)] == [row["loss"] for row in steps_of(resumed)]


#: Our rules, and the same through torch's own optimizer.
TWINS = {
    "sgd": (
        SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
        "SGD",
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (Adam(weight_decay=0.1), "Adam", {"weight_decay": 0.1}),
    "adamw": (AdamW(betas=(0.8, 0.9)), "AdamW", {"betas": (0.8, 0.9)}),
    "adagrad": (Adagrad(), "Adagrad", {}),
}
#: Ways to store weights in which an optimizer of torch updates them.
ADAPTED_KINDS = [kind for kind in KINDS if kind != "fp16 in place"]


@each("kind", ["fp32", "fp16 master", "fp16 pure", "bf16 master"])
@each("twin", TWINS)
def test_our_rules_and_those_of_torch_give_the_same_weights(twin, kind):
    rule, name, arguments = TWINS[twin]
    kept = make(kind, rule, clip_norm=2.0)
    adapted = make(kind, adapt(torch_optimizer(name)[0], arguments), clip_norm=2.0)
    for step in range(20):
        for model, weights in (kept, adapted):
            run(model, weights, seed=step, scale=8.0, micro=2, poison=math.inf if step == 7 else None)
    assert adapted[1].updater.step == 19
    for key, value in kept[1].masters.full_precision().items():
        coarse = "pure" in kind  # a weight that is rounded to its neighbour once differs by a step of the format
        torch.testing.assert_close(
            adapted[1].masters.full_precision()[key],
            value,
            rtol=2e-3 if coarse else 1e-6,
            atol=1e-3 if coarse else 1e-6,
            check_dtype=False,
        )


@each("kind", ADAPTED_KINDS)
@each("kind_of", [torch_optimizer("NAdam")[0], torch_optimizer("Muon")[0], timm_optimizer("lamb")[0]])
def test_a_refused_update_changes_nothing_and_a_first_one_neither(kind_of, kind):
    rule = adapt(kind_of, {})
    fresh, late = make(kind, rule, clip_norm=1.0), make(kind, rule, clip_norm=1.0)
    run(*late, poison=math.nan)
    for step in range(3):
        run(*fresh, seed=step)
        run(*late, seed=step)
    before = plain(late[1].updater.state_dict()), {k: v.clone() for k, v in late[1].masters.full_precision().items()}
    assert before[0] == plain(fresh[1].updater.state_dict())
    run(*late, poison=math.inf)
    assert plain(late[1].updater.state_dict()) == before[0]
    for key, value in late[1].masters.full_precision().items():
        assert torch.equal(value, before[1][key])
        assert torch.equal(value, fresh[1].masters.full_precision()[key])


@each("kind", ADAPTED_KINDS)
def test_parameters_without_gradients_are_left_alone(kind):
    model, weights = make(kind, adapt(torch.optim.NAdam, {"weight_decay": 0.5}, decay_norms_and_biases=True))
    run(model, weights)
    before = state_of_parameters(model)
    run(model, weights, without=("bias", "scalar"))
    after = state_of_parameters(model)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"bias", "scalar"}


def state_of_parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_the_gradients_stay_scaled_for_inspection():
    model, weights = make("fp32", adapt(torch.optim.RAdam, {}), clip_norm=1.0)
    run(model, weights, scale=1024.0)
    generator = torch.Generator().manual_seed(1000)  # of `run`
    for name, grad in weights.gradients.by_name().items():
        assert torch.equal(grad, torch.randn(grad.shape, generator=generator) * 1024), name


def test_a_parameter_that_moves_or_changes_its_memory_order_is_followed():
    def trained(change):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3)
        weights = Weights(dict(model.named_parameters()), adapt(torch.optim.NAdam, {"lr": 0.1}), master_weights=False)
        for step in range(6):
            if step == 3 and change:
                model.to(memory_format=torch.channels_last)
            weights.gradients.zero_grad()
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
            one = torch.ones(1)
            weights.update(weights.judge(one, skip_on_overflow=True), torch.tensor([0.1]), one)
        return model

    moved, still = trained(True), trained(False)
    assert not moved.weight.is_contiguous()
    assert torch.equal(moved.weight, still.weight)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_trap_27_fused_kernels_skip_on_device_after_one_update(name, monkeypatch):
    """As on a device whose memory the host does not read: the flag is read until an update is applied, and never again."""
    arguments = {"fused": True, **({"momentum": 0.9} if name == "SGD" else {})}
    kind, _ = torch_optimizer(name)
    model, weights = make("fp32", adapt(kind, arguments))
    twin = make("fp32", adapt(kind, arguments))
    if not weights.updater._fused:
        pytest.skip(f"fused kernels of {name} in this torch unscale and skip nothing")  # Adagrad's of torch 2.11
    weights.updater._on_host = False
    reads = []
    monkeypatch.setattr(weights.updater, "_read", lambda skip, lr: (reads.append(1), (skip.item() == 1, lr.item()))[1])
    for step in range(8):
        poison = math.inf if step in (0, 1, 4) else None
        for one in ((model, weights), twin):
            run(*one, seed=step, scale=16.0, poison=poison)
    assert len(reads) == 3
    assert plain(weights.updater.state_dict()["state"]) == plain(twin[1].updater.state_dict()["state"])
    for key, value in state_of_parameters(model).items():
        torch.testing.assert_close(value, twin[0].get_parameter(key), rtol=1e-6, atol=1e-7)
    run(model, weights, without=("bias",), poison=math.inf)  # all of these parameters have been updated
    assert len(reads) == 3


def test_of_a_parameter_whose_gradient_comes_late_the_host_asks_whether_its_first_update_is_skipped(monkeypatch):
    model, weights = make("fp32", adapt(torch.optim.SGD, {"fused": True, "momentum": 0.9}))
    weights.updater._on_host = False
    reads = []
    monkeypatch.setattr(weights.updater, "_read", lambda skip, lr: (reads.append(1), (skip.item() == 1, lr.item()))[1])
    for step in range(3):
        run(model, weights, seed=step, without=("bias",))
    assert len(reads) == 1
    for poison in (math.inf, None, None):
        run(model, weights, seed=3, poison=poison)
    assert len(reads) == 3
    assert all(torch.isfinite(value).all() for value in state_of_parameters(model).values())


def test_any_other_optimizer_reads_once_a_step_and_says_so(monkeypatch):
    model, weights = make("fp16 master", adapt(torch.optim.RAdam, {}))
    assert weights.updater.describe() == "torch.optim.RAdam"
    reads, read = [], type(weights.updater)._read
    monkeypatch.setattr(type(weights.updater), "_read", lambda self, *given: (reads.append(1), read(self, *given))[1])
    for step in range(4):
        run(model, weights, seed=step)
    assert len(reads) == 4
    weights.updater._on_host = False
    assert weights.updater.describe() == "torch.optim.RAdam, one host read a step"
    fused = make("fp32", adapt(torch.optim.SGD, {}))[1]
    fused.updater._on_host = False
    assert fused.updater.describe() == "torch.optim.SGD"


class OwnSGD(torch.optim.SGD):
    """An optimizer of one's own, which may have a step of its own."""


FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", [*FUSED, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Muon, OwnSGD])
def test_torchs_own_classes_are_fused_where_there_is_a_kernel_and_nobody_chose(kind):
    assert prefer_fused(kind, {"lr": 0.1}, CPU) == {"lr": 0.1, **({"fused": True} if kind in FUSED else {})}
    chosen = ({"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True})
    assert all(prefer_fused(kind, one, CPU) == one for one in chosen)
    with without(fused=False):
        assert prefer_fused(kind, {}, CPU) == {}


@pytest.mark.parametrize("kind", FUSED)
def test_fused_kernels_take_over_state_and_give_it_back(kind):
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model, weights = make("fp16 master", adapt(kind, {**more, "foreach": False}))
    other, fused = make("fp16 master", adapt(kind, more))
    for source, goal in ((weights, fused), (fused, weights)):
        for step in range(3):
            run(model if source is weights else other, source, seed=step, scale=16.0)
        saved = source.updater.state_dict()
        assert goal.updater.load_state_dict({**saved, "on_host": ["step"]}) == []
        assert plain(goal.updater.state_dict()["state"]) == plain(saved["state"])
    run(model, weights, seed=3, scale=16.0)


def test_muon_says_which_parameters_it_leaves_to_adamw():
    _, weights = make("fp32", adapt(torch.optim.Muon, {}))
    words = "torch.optim.Muon for parameters with two dimensions (1), torch.optim.AdamW for the others (2)"
    assert weights.updater.describe() == words
    vectors = {"bias": torch.nn.Parameter(torch.zeros(3))}
    with pytest.raises(ConfigError, match="there are none"):
        Weights(vectors, adapt(torch.optim.Muon, {}), master_weights=False)


class Odd(torch.optim.SGD):
    """An optimizer of one's own that does something wrong."""

    def __init__(self, params, lr=0.1, wrong=""):
        super().__init__(params, lr=lr)
        self.wrong = wrong

    def step(self, closure=None):
        super().step(closure)
        parameter = self.param_groups[0]["params"][0]
        if self.wrong == "set":
            self.state[parameter]["seen"] = {1, 2}
        if self.wrong == "object":
            self.state[parameter]["seen"] = object()
        if self.wrong == "global":
            self.state["all"]["count"] = 1
        if self.wrong == "fails":
            raise IndexError("no third dimension")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("set", "a set in 'seen'"),
        ("object", "an object in 'seen'"),
        ("global", "belongs to no parameter"),
        ("fails", "IndexError: no third dimension"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_in_its_first_update(wrong, said):
    model, weights = make("fp32", adapt(Odd, {"wrong": wrong}))
    with pytest.raises(ConfigError, match=said):
        run(model, weights)


def test_state_of_another_optimizer_is_not_loaded_and_that_is_said():
    _, ours = make("fp32", SGD())
    model, radam = make("fp32", adapt(torch.optim.RAdam, {}))
    _, nadam = make("fp32", adapt(torch.optim.NAdam, {}))
    run(model, radam)
    for weights, saved, words in (
        (radam, ours, "has the state of another optimizer, not of torch.optim.RAdam"),
        (nadam, radam, "has the state of torch.optim.RAdam, not of torch.optim.NAdam"),
        (ours, radam, "has no matching state of matrix"),
    ):
        before = plain(weights.updater.state_dict())
        (note,) = weights.updater.load_state_dict(saved.updater.state_dict())
        assert note.startswith("optimizer state reset")
        assert words in note
        assert plain(weights.updater.state_dict()) == before


def test_a_resumed_run_has_its_own_constants_and_saved_counts():
    lamb = timm_optimizer("lamb")[0]
    model, weights = make("fp32", adapt(lamb, {"betas": (0.9, 0.99)}))
    for step in range(3):
        run(model, weights, seed=step)
    _, changed = make("fp32", adapt(lamb, {"betas": (0.5, 0.5), "weight_decay": 0.3}))
    assert changed.updater.load_state_dict(weights.updater.state_dict()) == []
    groups = groups_of(changed.updater._optimizers)
    assert {(group["betas"], group["step"].item()) for group in groups} == {((0.5, 0.5), 3.0)}
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}


def test_state_in_half_precision_becomes_that_of_fp32_weights_in_another_mode():
    model, weights = make("bf16 in place", adapt(torch.optim.RAdam, {}))
    run(model, weights)
    other, wide = make("fp32", adapt(torch.optim.RAdam, {}))
    assert wide.updater.load_state_dict(weights.updater.state_dict()) == []
    saved, loaded = (one.updater.state_dict()["state"]["matrix"]["exp_avg"] for one in (weights, wide))
    assert (saved.dtype, loaded.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(saved.float(), loaded)
    run(other, wide)


@pytest.mark.parametrize("name", ["NAdam", "Muon", "lamb"])
def test_torch_optim_goes_on_where_a_run_has_ended(name):
    kind = torch_optimizer(name)[0] if name != "lamb" else timm_optimizer(name)[0]
    model, weights = make("fp32", adapt(kind, {}))
    for step in range(3):
        run(model, weights, seed=step)
    theirs = make("fp32", SGD())[0]
    theirs.load_state_dict(model.state_dict())
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    others = [p for p in theirs.parameters() if p.ndim != 2]
    makers = {"Muon": [kind(matrices), torch.optim.AdamW([{"params": others, "weight_decay": 0.0}])]}
    whole = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizers = makers[name] if name == "Muon" else [kind(whole)]
    for optimizer in optimizers:
        saved = torch_optim_state(weights.updater.state_dict(), optimizer, dict(theirs.named_parameters()))
        optimizer.load_state_dict(saved)
    run(model, weights, seed=9)
    for key, parameter in theirs.named_parameters():
        parameter.grad = weights.gradients.by_name()[key]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.125
        optimizer.step()
    for key, parameter in theirs.named_parameters():
        assert torch.equal(parameter, model.get_parameter(key)), key
    with pytest.raises(ValueError, match=f"has the state of {weights.rule.name}.*, not of torch.optim.Adamax"):
        torch_optim_state(
            weights.updater.state_dict(), torch.optim.Adamax(theirs.parameters()), dict(theirs.named_parameters())
        )


@pytest.mark.parametrize("name", ["lamb", "NAdam"])
def test_a_state_from_before_the_first_update_is_put_back_too(name):
    """As `diagnose` does: what an optimizer keeps for a group of parameters begins anew as well."""
    kind = timm_optimizer(name)[0] if name == "lamb" else torch_optimizer(name)[0]
    model, weights = make("fp32", adapt(kind, {}))
    before = plain(weights.updater.state_dict())
    fresh = {**weights.updater.state_dict(), "step": torch.zeros(1)}
    run(model, weights)
    assert plain(weights.updater.state_dict()) != before
    assert weights.updater.load_state_dict(fresh) == []
    assert plain(weights.updater.state_dict()) == before
    assert not weights.updater._begun


class Hoarder(torch.optim.SGD):
    """An optimizer with state of every kind."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["counted"] = group.get("counted", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exact"] = (
                    state.get("exact", torch.zeros_like(parameter, dtype=torch.float64)) + parameter.double() / 3
                )
                state["coarse"] = parameter.detach().bfloat16()
                state["count"] = torch.tensor(group["counted"])
                state["seen"] = [parameter.detach().half(), {"when": (group["counted"], True), "name": "it"}, None]


def test_state_of_every_kind_is_restored_in_its_dtype():
    model, weights = make("fp16 master", adapt(Hoarder, {"lr": 0.1, "momentum": 0.9}))
    for step in range(2):
        run(model, weights, seed=step)
    saved = weights.updater.state_dict()
    other = make("fp16 master", adapt(Hoarder, {"lr": 0.1, "momentum": 0.9}))[1]
    assert other.updater.load_state_dict(saved) == []
    assert plain(other.updater.state_dict()) == plain(saved)
    assert saved["state"]["matrix"]["exact"].dtype == torch.float64
    kept = plain(saved)
    run(model, weights, seed=2)
    assert plain(other.updater.state_dict()) == kept  # a copy, not the tensors of the checkpoint


class Sorted(torch.optim.SGD):
    """Groups in another order than they were given."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.param_groups.reverse()


class Split(torch.optim.SGD):
    """Each group becomes one of matrices and one of the others, which learn at a tenth of the rate."""

    def add_param_group(self, group):
        for matrices, share in ((True, 1.0), (False, 0.1)):
            if params := [one for one in group["params"] if (one.ndim == 2) is matrices]:
                super().add_param_group({**group, "params": params, "lr": group.get("lr", self.defaults["lr"]) * share})


class Growing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups.append({**self.param_groups[0], "params": []})


@pytest.mark.parametrize(("kind", "shares"), [(Sorted, (1.0, 1.0)), (Split, (1.0, 0.1))])
def test_groups_that_an_optimizer_sorts_splits_or_gives_rates_of_their_own_keep_their_rates(kind, shares):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    factors = {"0.weight": 0.5, "0.bias": 0.5, "1.weight": 1.0, "1.bias": 1.0}
    options = {name: ParameterOptions(factor, 0.0) for name, factor in factors.items()}
    weights = Weights(dict(model.named_parameters()), adapt(kind, {"lr": 0.1}), master_weights=False, options=options)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    scale = torch.ones(1)
    weights.update(weights.judge(scale, skip_on_overflow=True), torch.tensor([0.2]), scale)
    for name, one in model.named_parameters():
        rate = 0.2 * factors[name] * shares[name.endswith("bias")]
        torch.testing.assert_close(before[name] - one, torch.full_like(one, rate))


def test_groups_that_come_later_are_refused_by_name():
    model, weights = make("fp32", adapt(Growing, {"lr": 0.1}))
    with pytest.raises(ConfigError, match="Growing adds or removes groups of parameters"):
        run(model, weights)


@each("fused", [None, True])
def test_momentum_of_gradients_that_begin_late_is_torchs(fused):
    rule = adapt(torch.optim.SGD, {"momentum": 0.9, **({"fused": True} if fused else {})})
    plain = adapt(torch.optim.SGD, {"momentum": 0.9, "foreach": False})
    (model, weights), twin = make("fp32", rule), make("fp32", plain)
    for step, without_grad in enumerate([("bias",), ("bias",), (), ("scalar",), ()]):
        for one in ((model, weights), twin):
            run(*one, seed=step, without=without_grad)
    for name, one in model.named_parameters():
        torch.testing.assert_close(one, twin[0].get_parameter(name), rtol=1e-6, atol=1e-6)


class Optimistic(torch.optim.SGD):
    """Keeps a reference to the gradient, or a copy of it."""

    def __init__(self, params, lr=0.1, copies=False):
        super().__init__(params, lr=lr)
        self.copies = copies

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            before = self.state[one].get("before", torch.zeros_like(one))
            one.add_(one.grad + 0.5 * (one.grad - before), alpha=-0.1)
            self.state[one]["before"] = one.grad.clone() if self.copies else one.grad


@each("kind", KINDS)
@each("micro", [1, 2])
def test_a_gradient_that_an_optimizer_keeps_is_not_written_again(kind, micro):
    found = []
    for copies in (False, True):
        model, weights = make(kind, adapt(Optimistic, {"copies": copies}))
        for step in range(4):
            weights.gradients.zero_grad()
            generator = torch.Generator().manual_seed(step)
            for _ in range(micro):
                for one in model.parameters():
                    grad = torch.randn(one.shape, generator=generator).to(one.dtype)
                    one.grad = grad if one.grad is None else one.grad + grad
                weights.gradients.accumulate()
            scale = torch.ones(1)
            weights.update(weights.judge(scale, skip_on_overflow=True), torch.tensor([0.1]), None)
        found.append(torch.cat([one.detach().double().flatten() for one in model.parameters()]))
    assert torch.equal(*found)
