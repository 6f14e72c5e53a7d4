"""The rehearsal finds what a run cannot keep its promises about, and leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import pytest
import torch
from torch import nn

import mptrain.precision.upcast
import mptrain.run.build.parts
from mptrain.engine.rehearsal import rehearse
from mptrain.precision.census import OperatorCensus
from mptrain.precision.upcast import ATTENTION, PRODUCTS, SUMS, Products
from mptrain.system.errors import EnvironmentRefused, FirstBatchError
from mptrain.system.records import EventRecord
from tests.small_runs import TINY, Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of


def first_batch(parts):
    return parts.prepare(next(parts.loaders["train"].batches(0)))


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic"])
def test_it_leaves_weights_buffers_generators_and_gradients_as_they_were(precision):
    parts, _ = parts_of("model=cnn", "dataset.train_samples=32", "train.ema_decay=0.9", f"precision={precision}")
    parts.model.train()
    torch.manual_seed(4)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    generator = torch.get_rng_state()
    rehearse(parts, first_batch(parts))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())
    assert all(parameter.grad is None for parameter in parts.model.parameters())
    [learner] = parts.learners
    assert learner.updates == 0
    assert learner.weights.gradients.missing() == list(learner.weights.names)


def test_an_operator_without_a_half_kernel_is_refused_with_what_to_do():
    parts, _ = parts_of(*TINY, "precision=fp16_dynamic")

    def loss(model, batch):
        return torch.linalg.svdvals(model(batch.inputs)).sum()

    object.__setattr__(parts.learners[0].objective, "loss", loss)
    with pytest.raises(EnvironmentRefused, match="torch cannot compute a part of the model in") as caught:
        rehearse(parts, first_batch(parts))
    assert "precision.keep_fp32" in caught.value.hint


def test_an_error_of_another_kind_is_not_taken_for_a_missing_kernel():
    parts, _ = parts_of(*TINY, "precision=fp16_dynamic")

    def loss(model, batch):
        return model(batch.inputs) @ torch.ones(3)

    object.__setattr__(parts.learners[0].objective, "loss", loss)
    with pytest.raises(FirstBatchError, match="Sequential and Classify fail on the first batch: Runtime") as got:
        rehearse(parts, first_batch(parts))
    assert isinstance(got.value.__cause__, RuntimeError)
    assert re.search(r"inputs .* and targets .*; at test_rehearsal.py:\d+ in loss: return model", str(got.value))
    assert "look at this line" in got.value.hint


def test_a_model_of_a_library_that_does_not_fit_is_answered_with_its_module():
    parts, _ = parts_of(*TINY)
    batch = first_batch(parts)
    batch = dataclasses.replace(batch, inputs=batch.inputs[..., :5])
    with pytest.raises(FirstBatchError, match=r"and targets int64 \[16\]; in module \d+") as got:
        rehearse(parts, batch)
    assert got.value.hint.startswith("choose a model and a task for the same kind of data")


class Counter(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images):
        self.seen = self.seen + 1
        return images


def test_a_buffer_that_is_replaced_is_not_counted_twice(tmp_path):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "train.max_steps=3", kept=kept)
    counter = Counter()
    loop.parts.model.insert(0, counter)
    guard = type(loop.parts.plan.guard)(loop.parts.model)
    object.__setattr__(loop.parts.plan, "guard", guard)
    del loop.parts.loaders["val"], loop.parts.loaders["test"]
    loop.run()
    assert counter.seen.item() == 3  # the rehearsal's is not among them
    warnings = [event.fields["message"] for event in kept.of(EventRecord) if event.kind == "warning"]
    assert not any("0.seen" in warning for warning in warnings)


class Alternating(nn.Module):
    """Swaps its submodules in each pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(64, 10), nn.Linear(64, 10), []

    def forward(self, images):
        self.first, self.second = self.second, self.first
        self.seen.append(len(self.seen))
        return self.first(images.flatten(1))


def test_submodules_and_attributes_of_model_and_task_are_as_they_were():
    parts, _ = parts_of(*TINY)
    model = Alternating()
    first, guard = model.first, type(parts.plan.guard)(model)
    object.__setattr__(parts, "model", model)
    object.__setattr__(parts.plan, "guard", guard)
    task, original = parts.task, parts.learners[0].objective.loss

    def loss(net, batch):
        vars(task)["calls"] = getattr(task, "calls", 0) + 1
        vars(task)["kept"]["last"] = batch.samples
        return original(net, batch)

    vars(task)["kept"] = {}
    object.__setattr__(parts.learners[0].objective, "loss", loss)
    rehearse(parts, first_batch(parts))
    assert model.first is first
    assert list(model._modules) == ["first", "second"]
    assert model.seen == []
    assert task.kept == {}
    assert not hasattr(task, "calls")


def test_overfitting_learns_one_batch_by_heart(tmp_path):
    loop = loop_of(tmp_path, "debug=overfit", "model=mlp", "train.epochs=60", "precision=amp_dynamic")
    del loop.parts.loaders["val"], loop.parts.loaders["test"]
    loop.run()
    losses = [step["loss"] for step in steps_of(loop)]
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 20


def test_what_a_step_is_computed_in_is_on_record_before_the_first_and_after_each_resume(tmp_path):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "precision=fp16_dynamic", "train.max_steps=4", kept=kept)
    interrupt_after(loop, 2)
    continued = Kept()
    continue_loop(loop, *TINY, "precision=fp16_dynamic", "train.max_steps=4", kept=continued).run()
    (first,), (second,) = (
        [event for event in one.of(EventRecord) if event.kind == "operators"] for one in (kept, continued)
    )
    assert (first.step, second.step) == (0, 2)
    assert first.fields == second.fields
    [product] = [row for row in first.fields["operators"] if row["operator"] == "addmm"]
    assert (product["phase"], product["inputs"], product["outputs"], product["calls"]) == (
        "forward",
        "float16",
        "float16",
        4,
    )
    assert {"phase": "forward", "from": "float16", "to": "float32", "calls": 1} in first.fields["casts"]


def test_a_network_that_changes_its_inputs_in_place_trains_its_first_step_on_the_batch_as_it_is():
    parts, _ = parts_of(*TINY)
    parts.model.register_forward_pre_hook(lambda _, given: given[0].mul_(2))
    batch = first_batch(parts)
    before = batch.inputs.clone()
    rehearse(parts, batch)
    assert torch.equal(batch.inputs, before)


class Rarely(nn.Module):
    """Has a layer norm that only some passes go through."""

    def __init__(self, num_classes, **facts):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, num_classes)
        self.passes = 0

    def forward(self, images):
        self.passes += 1
        hidden = self.first(images.flatten(1))
        return self.last(self.norm(hidden) if self.passes % 3 == 0 else hidden)


@pytest.fixture
def native_half(monkeypatch):
    """A CPU that has half-precision arithmetic, or says so."""
    monkeypatch.setattr(mptrain.precision.upcast, "has_native_half", lambda dtype: True)


def operators_kept(tmp_path, *words):
    loop = loop_of(tmp_path, *TINY, "train.max_steps=3", "train.epochs=1", *words)
    loop.run()
    return loop, loop.parts.plan.products.operators


class Functional(Rarely):
    """Normalises by a function, for which no module stands."""

    def __init__(self, num_classes, **facts):
        super().__init__(num_classes)
        del self.norm

    def forward(self, images):
        return self.last(nn.functional.layer_norm(self.first(images.flatten(1)), (16,)))


@pytest.mark.parametrize(
    ("network", "precision", "kept"),
    [
        (None, "amp_bf16", frozenset()),
        (None, "bf16", frozenset()),
        (Rarely, "amp_bf16", SUMS | ATTENTION),
        (Functional, "amp_bf16", {torch.ops.aten.native_layer_norm.default}),
    ],
)
def test_kernels_are_kept_that_some_step_may_need(tmp_path, native_half, monkeypatch, network, precision, kept):
    if network:
        monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda config, dataset: network(**dataset.facts()))
    loop, operators = operators_kept(tmp_path, f"precision={precision}")
    assert kept <= operators
    assert isinstance(loop.parts.plan.products.context, contextlib.nullcontext) == (not operators) == (network is None)


def test_it_trains_the_same_bits_as_within_one(tmp_path, native_half, monkeypatch):
    words = ("model=cnn", "precision=amp_bf16")
    without, operators = operators_kept(tmp_path / "without", *words)
    assert operators == frozenset()
    monkeypatch.setattr(Products, "leave_out_idle", lambda *_: None)
    within, operators = operators_kept(tmp_path / "within", *words)
    assert operators == SUMS | ATTENTION
    assert steps_of(without) == steps_of(within)
    theirs = within.parts.full_precision()
    assert all(torch.equal(value, theirs[name]) for name, value in without.parts.full_precision().items())


def test_evaluation_keeps_kernels_that_training_has_no_use_for():
    """Torch computes attention by other operators where there is dropout."""
    model, images = nn.Linear(8, 96).half(), torch.randn(2, 16, 8).half()

    def attention(dropout):
        q, k, v = model(images).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    def evaluated():
        with torch.no_grad(), products.context:
            return attention(0.0)

    products, census = Products(PRODUCTS | SUMS), OperatorCensus()
    expected = evaluated()
    with census.inside(products).context:
        attention(0.1).float().sum().backward()
    products.leave_out_idle(model, census.in_half)
    assert torch.equal(evaluated(), expected)


def test_embeddings_keep_their_kernel_only_where_their_weights_are_half(tmp_path, native_half):
    words = ("model=char_lstm", "dataset=python_docs", "task=language", "train.max_steps=2")
    for precision, kept in (("amp_bf16", False), ("bf16", True)):
        parts, _ = parts_of(*words, f"precision={precision}")
        parts.plan.products.leave_out_idle(parts.model, ())
        assert (torch.ops.aten.embedding_dense_backward.default in parts.plan.products.operators) == kept
