"""Runs in the modes of emulated formats: what is emulated in them, what is refused, and which random bits they draw."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.engine.evaluate import evaluate
from mptrain.engine.rehearsal import rehearse
from mptrain.engine.step import accumulate_gradients, train_step
from mptrain.precision.emulation import Emulation, products_of
from mptrain.system.errors import ConfigError, EnvironmentRefused
from mptrain.system.records import EvalRecord, EventRecord
from tests.loops import each
from tests.precision.modes import mode
from tests.small_runs import TINY, Kept, loop_of, parts_of, steps_of

CPU = torch.device("cpu")
MODES = ["fp8_current_emulated", "mxfp8_emulated", "nvfp4_emulated"]
X = torch.linspace(-3.0, 3.0, 256).sin().view(8, 32)


class Tied(nn.Module):
    """A layer, and two modules with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.third.weight = self.second.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def first_batch(parts):
    parts.model.train()
    return parts.prepare(next(parts.loaders["train"].batches(0)))


def gradients(parts, batch):
    learner = parts.learners[0]
    learner.weights.gradients.zero_grad()
    accumulate_gradients(learner, parts.model, batch, parts.plan)
    return {name: grad.clone() for name, grad in learner.weights.gradients.by_name().items()}


def test_only_modes_with_a_rule_emulate():
    model = Tied()
    assert type(products_of(mode("fp32"), model, {}, CPU)) is not Emulation
    assert isinstance(products_of(mode("mxfp8_emulated"), model, {}, CPU), Emulation)


@each(
    ("kept", "emulated"), [([], {"first", "second", "third"}), (["first"], {"second", "third"}), (["third"], {"first"})]
)
def test_kept_modules_and_those_that_share_their_parameters_multiply_in_fp32(kept, emulated):
    model, plain = Tied(), {}
    inputs = {name: torch.randn(8, 32) for name in ("first", "second", "third")}
    for name, given in inputs.items():
        plain[name] = model.get_submodule(name)(given)
    products = products_of(mode("mxfp8_emulated"), model, {name: model.get_submodule(name) for name in kept}, CPU)
    with products.context:
        changed = {name for name in inputs if not torch.equal(model.get_submodule(name)(inputs[name]), plain[name])}
    assert changed == emulated


def test_another_model_with_the_same_names_is_emulated_alike():
    model, copy = Tied(), Tied()
    copy.load_state_dict(model.state_dict())
    products = products_of(mode("mxfp8_emulated"), model, {"first": model.first}, CPU)
    with products.context:
        expected = model(X)
    with products.of(copy).context:
        assert torch.equal(copy(X), expected)
    with products.context:
        assert torch.equal(copy(X), model.third(model.second(model.first(X)))) is False


@each("name", MODES)
def test_a_run_trains_evaluates_and_sees_an_overflow(tmp_path, name):
    kept = Kept()
    words = (*TINY, f"precision={name}", "inject.step=3", "inject.tensor=activation_gradient:3", "inject.value=inf")
    loop = loop_of(tmp_path, *words, kept=kept)
    loop.run()
    steps = steps_of(loop)
    assert [step["step"] for step in steps if step["skipped"]] == [3]
    losses = [step["loss"] for step in steps]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert kept.of(EvalRecord)[-1].split == "test"
    assert loop.parts.plan.products.context is loop.parts.plan.products.mode  # also after the rehearsal
    assert not [event for event in kept.of(EventRecord) if event.kind == "warning"]


def test_an_infinite_input_is_skipped_and_changes_no_weight():
    parts, _ = parts_of(*TINY, "precision=mxfp8_emulated")
    batch, before = first_batch(parts), {k: v.clone() for k, v in parts.full_precision().items()}
    bad = batch.inputs.clone()
    bad.view(-1)[0] = float("inf")
    values = train_step(parts.learners[0], parts.model, dataclasses.replace(batch, inputs=bad), parts.plan)
    assert values.skip.all()
    assert all(torch.equal(value, before[name]) for name, value in parts.full_precision().items())


@each("name", MODES)
def test_a_step_is_another_one_than_in_fp32_and_than_under_another_rule(name):
    steps = {}
    for words in ((f"precision={name}",), (f"precision={name}", "precision.emulate=mxfp4"), ("precision=fp32",)):
        parts, _ = parts_of(*TINY, *words)
        steps[words] = gradients(parts, first_batch(parts))
    one, other, wide = steps.values()
    weights = [key for key in wide if key.endswith("weight")]
    assert not any(torch.equal(one[key], wide[key]) or torch.equal(one[key], other[key]) for key in weights)


def test_random_bits_follow_from_seed_step_and_rank_alone():
    parts, _ = parts_of(*TINY, "precision=nvfp4_emulated")
    batch, products = first_batch(parts), parts.plan.products
    seen = {}
    for place in ((0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 1, 1), (2**64 - 1, 10**9, 7)):
        products.begin_step(*place)
        first, again = gradients(parts, batch), gradients(parts, batch)
        assert all(torch.equal(first[key], again[key]) for key in first)
        seen[place] = first["3.weight"]
    values = list(seen.values())
    assert not any(torch.equal(one, other) for at, one in enumerate(values) for other in values[:at])


def test_dropout_draws_the_same_numbers_as_in_fp32():
    states = []
    for name in ("fp32", "nvfp4_emulated"):
        parts, _ = parts_of(*TINY, f"precision={name}", "model.dropout=0.2")
        gradients(parts, first_batch(parts))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_an_evaluation_is_emulated_unless_it_is_to_be_in_fp32():
    losses = {}
    for words in (
        ("precision=mxfp8_emulated",),
        ("precision=mxfp8_emulated", "precision.eval=fp32"),
        ("precision=fp32",),
    ):
        parts, _ = parts_of(*TINY, *words)
        result = evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False, average=False)
        losses[words] = result.record.metrics["loss"]
    same, wide, plain = losses.values()
    assert same != wide == plain


def test_products_that_stay_in_fp32_are_counted_in_one_sentence(tmp_path):
    small = ("model.width=16", "model.heads=2", "dataset.sequence_length=8", "dataset.train_samples=16")
    parts, _ = parts_of("model=transformer", *small, "train.batch_size=8", "precision=mxfp8_emulated",
                        "precision.keep_fp32=[decoder]")  # fmt: skip
    (doubt,) = rehearse(parts, first_batch(parts)).doubts
    assert doubt == (
        "of 31 calls of products in a step, these stay in FP32: 4 without a parameter as an operand, as in attention and "
        "3 of modules in precision.keep_fp32"
    )


class Elementwise(nn.Module):
    """No product at all."""

    def __init__(self, **facts):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10, 64))

    def forward(self, given):
        return (given.flatten(1).unsqueeze(1) * self.scale).tanh().mean(2)


@each(
    ("words", "why"),
    [
        (("precision.keep_fp32=[Linear]",), "precision.keep_fp32 keeps all layers"),
        (
            ("model._target_=tests.precision.test_emulated_modes.Elementwise", "extensions.allow=[tests.*]"),
            "no product",
        ),
    ],
)
def test_a_model_of_which_nothing_is_emulated_is_refused(words, why):
    parts, _ = parts_of(*TINY, "precision=mxfp8_emulated", *words)
    with pytest.raises(EnvironmentRefused, match=f"precision=mxfp8_emulated means operands in mxfp8, .*{why}"):
        rehearse(parts, first_batch(parts))


@each("words", ["train.compile=true", "train.engine=graph"])
def test_compilation_and_graphs_are_refused_by_name(words):
    with pytest.raises(ConfigError, match=f"{words} with precision.emulate=mxfp8"):
        compose([*TINY, "precision=mxfp8_emulated", words])
