"""Every operator is seen, with the module it belongs to, and nothing is changed by looking."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mptrain.engine.module_trail import LOSS, ModuleTrail
from mptrain.engine.observer import Observer
from mptrain.engine.step import accumulate_gradients
from mptrain.lab.step.repetition import observe_step, saved_step_at
from tests.small_runs import TINY, parts_of


def observed(model, given, loss=lambda output: output.float().sum()):
    trail = ModuleTrail()
    observer = Observer(trail)
    with trail.followed(model), observer:
        loss(model(given)).backward()
    return observer


def names(observer, phase):
    return [(one.module, one.operator) for one in observer.operations if one.phase == phase]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x):
        return self.shared(torch.relu(self.shared(x)))


def test_operators_belong_to_their_modules_forward_and_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    seen = observed(model, torch.randn(3, 4))
    assert names(seen, "forward") == [("0", "addmm"), ("1.0", "relu"), ("1.1", "addmm"), (LOSS, "sum")]
    backward = names(seen, "backward")
    assert [module for module, operator in backward if operator == "mm"] == ["1.1", "1.1", "0"]
    assert ("1.0", "threshold_backward") in backward


def test_a_shared_module_is_one_module_and_its_calls_are_counted():
    seen = observed(Twice(), torch.randn(3, 4))
    assert names(seen, "forward") == [("shared", "addmm"), ("", "relu"), ("shared", "addmm"), (LOSS, "sum")]
    assert seen.trail.calls == {"": 1, "shared": 2}
    assert ("", "threshold_backward") in names(seen, "backward")


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_what_the_backward_pass_repeats_belongs_to_its_module():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    seen = observed(Checkpointed(inner, reentrant=False), torch.randn(3, 4, requires_grad=True))
    assert ("inner.0", "addmm") in names(seen, "forward")
    assert ("inner.0", "addmm") in names(seen, "backward")
    products = [module for module, operator in names(seen, "backward") if operator == "mm"]
    assert products == ["inner.2", "inner.2", "inner.0", "inner.0"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_the_backward_pass_repeats_is_counted_once(reentrant):
    seen = observed(Checkpointed(nn.Linear(4, 4), reentrant), torch.randn(3, 4, requires_grad=True))
    assert seen.trail.calls == {"": 1, "inner": 1}
    assert [module for module, operator in names(seen, "backward") if operator == "mm"] == ["inner"] * 2


def test_what_goes_into_a_module_by_name_goes_in_too():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Takes()

        def forward(self, x):
            return self.inner(x, other=x / 0)

    class Takes(nn.Module):
        def forward(self, x, other):
            return x * other

    seen = observed(Named(), torch.ones(3, requires_grad=True))
    assert [(call.module, call.finite_inputs) for call in seen.trail.ended] == [("inner", False), ("", True)]


def test_dtypes_and_magnitudes_are_those_of_the_results():
    seen = observed(nn.Linear(4, 4).half(), torch.full((2, 4), 2.0, dtype=torch.float16))
    [product] = [one for one in seen.operations if one.operator == "addmm"]
    assert (product.inputs, product.outputs[0].dtype, product.finite_inputs) == (("float16",), "float16", True)
    assert product.largest_input == 2.0
    assert product.zero_inputs == 0
    total = product.outputs[0].zeros + sum(product.outputs[0].counts)
    assert total == 8


def test_the_first_infinite_operator_is_told_from_those_behind_it():
    class Grows(nn.Module):
        def forward(self, x):
            return (x.half() * 300).mul_(300).float() + 1

    seen = observed(nn.Sequential(Grows(), nn.ReLU()), torch.ones(3, requires_grad=True))
    [broken] = [one for one in seen.operations if one.breaks and one.phase == "forward"]
    assert (broken.module, broken.operator, broken.largest_input) == ("0", "mul_", 300)
    assert (broken.outputs[0].dtype, broken.outputs[0].inf) == ("float16", 3)
    assert not next(one for one in seen.operations if one.operator == "relu").finite_inputs


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.masked_fill(x > 0, -math.inf).exp(),
        lambda x: (x + torch.full_like(x, -math.inf).triu(1)).exp(),
        lambda x: torch.where(x > 0, x, -math.inf).exp(),
    ],
)
def test_a_mask_of_minus_infinity_is_nothing_that_breaks(fill):
    class Masks(nn.Module):
        def forward(self, x):
            return fill(x)

    seen = observed(Masks(), torch.randn(4, 4, requires_grad=True))
    assert not [one for one in seen.operations if one.breaks]
    assert any(not one.finite for one in seen.operations)


def test_memory_that_nobody_has_written_to_is_not_looked_at():
    seen = observed(nn.Identity(), torch.ones(3, requires_grad=True), lambda x: torch.empty_like(x).copy_(x).sum())
    assert {"empty_like", "ones_like", "detach"}.isdisjoint(one.operator for one in seen.operations)
    assert ("(loss)", "copy_") in names(seen, "forward")


class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad.float() * 2


class Careful(Wide):
    @staticmethod
    def backward(ctx, grad):
        return (grad.float() * 2).to(grad.dtype)


class Widens(Wide):
    @staticmethod
    def forward(ctx, x):
        return x.float() * 2


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


def test_a_function_of_another_dtype_is_told_from_one_that_casts():
    given = torch.ones(3, 4, dtype=torch.float16)
    model = nn.Sequential(nn.Linear(4, 4).half(), Calls(Wide), Calls(Careful), Calls(Widens))
    functions = observed(model, given).functions
    assert functions.keys() == {("WideBackward", "1"), ("CarefulBackward", "2"), ("WidensBackward", "3")}
    wide, careful, widens = (functions[key] for key in sorted(functions, key=lambda key: key[1]))
    assert (wide.takes, wide.gives, wide.corrected) == (("float16",), ("float16",), [("float32", "float16")])
    assert careful.corrected == []
    assert (widens.takes, widens.gives) == (("float16",), ("float32",))


def test_what_torch_refuses_is_kept_with_its_place():
    class Mixes(nn.Module):
        def forward(self, x):
            return torch.zeros(3, 4).index_add_(0, torch.arange(3), x.half())

    trail = ModuleTrail()
    observer = Observer(trail)
    model = nn.Sequential(nn.Identity(), Mixes())
    with pytest.raises(RuntimeError), trail.followed(model), observer:
        model(torch.ones(3, 4))
    assert (observer.refusal.module, observer.refusal.operator) == ("1", "index_add_")
    assert observer.refusal.inputs == ("float32", "float16")
    assert trail.raised_in[0] == "1"


def hooks_of(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic", "amp_bf16"])
def test_looking_changes_no_bit_of_a_step_or_of_generators(precision):
    words = (
        "model=cnn",
        "dataset.train_samples=32",
        "train.batch_size=16",
        f"precision={precision}",
        "train.accumulate=2",
    )
    (parts, options), (others, _) = parts_of(*words), parts_of(*words)
    moment = saved_step_at(parts, options, None, 1)
    batch = others.prepare(next(others.loaders["train"].batches(0)))
    others.model.train()
    torch.manual_seed(0)
    total = accumulate_gradients(others.learners[0], others.model, batch, others.plan)
    plain = others.learners[0].weights.gradients.by_name()
    generator = torch.get_rng_state()

    before, hooks = {name: value.clone() for name, value in parts.model.state_dict().items()}, hooks_of(parts.model)
    found, gradients = {}, parts.learners[0].weights.gradients
    clear = gradients.zero_grad

    def keep_and_clear():
        found.update({name: grad.clone() for name, grad in gradients.by_name().items()})
        clear()

    object.__setattr__(gradients, "zero_grad", keep_and_clear)
    torch.manual_seed(0)
    object.__setattr__(moment, "random", {**moment.random, "torch": torch.get_rng_state()})
    [seen] = observe_step(parts, moment)
    assert seen.loss == total.item()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], grad) for name, grad in plain.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())
    assert hooks_of(parts.model) == hooks


def test_every_learner_of_a_task_is_seen_with_its_own_gradients(tmp_path):
    parts, options = parts_of("model=dcgan", "dataset.train_samples=16", "train.batch_size=8", "precision=amp_dynamic")
    seen = observe_step(parts, saved_step_at(parts, options, None, 1))
    assert [one.learner for one in seen] == ["discriminator", "generator"]
    backward = [{one.module.split(".")[0] for one in each.of("backward")} for each in seen]
    assert backward[0] <= {"discriminator", LOSS}
    assert "generator" in backward[1]


def test_a_step_is_reached_as_training_reaches_it():
    words = (*TINY, "precision=fp16_dynamic", "model.dropout=0.2")
    parts, options = parts_of(*words)
    moment = saved_step_at(parts, options, None, 9)  # in the second epoch
    others, _ = parts_of(*words)
    assert moment.step == 9
    assert moment.state["progress"]["epoch"] == 1
    fetched = list(others.loaders["train"].batches(1))[2]
    assert torch.equal(moment.batch.inputs, others.prepare_float32(fetched).inputs)
    assert int(parts.learners[0].updates) == 8
