from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from mptrain.engine.rehearsal import rehearse
from mptrain.engine.ring import Ring
from mptrain.engine.step import Learner, train_step
from mptrain.scaler import NoScaler
from mptrain.system.errors import ConfigError
from mptrain.system.records import EventRecord, OverflowRecord, ScaleRecord, StepRecord
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Objective
from tests.capability import without
from tests.loops import each
from tests.small_runs import TINY, Kept, loop_of, parts_of, steps_of


def batches(parts, count, size=16):
    loader = parts.loaders["train"]
    loader.batch_size = size
    return [parts.prepare(batch) for batch, _ in zip(loader.batches(0), range(count), strict=False)]


def ring_for(parts):
    return Ring(64, len(parts.learners[0].weights.names), parts.device)


def state_of(parts):
    learner = parts.learners[0]
    flat = {f"model.{k}": v for k, v in parts.model.state_dict().items()}
    flat |= {f"best.{k}": v for k, v in parts.full_precision().items()}
    flat |= {f"updates.{learner.name}": learner.updates}
    for name, state in learner.weights.updater.state_dict()["state"].items():
        flat |= {f"state.{name}.{key}": value for key, value in state.items()}
    flat["step"] = learner.weights.updater.state_dict()["step"]
    return {key: value.clone() for key, value in flat.items()}


def assert_equal_states(before, after):
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


MODES = ["fp32", "amp_dynamic", "amp_static", "amp_bf16", "fp16_dynamic", "fp16_static", "fp16_noscale", "fp16_pure"]


@each(("precision", "poison"), zip(MODES, itertools.cycle([float("inf"), float("nan")]), strict=False))
def test_trap_23_24_25_a_refused_step_changes_no_bit_but_the_scale(precision, poison):
    parts, _ = parts_of("model=cnn", "dataset.train_samples=96", f"precision={precision}")
    ring = ring_for(parts)
    good, *_ = batches(parts, 3)
    bad = dataclasses.replace(good, inputs=good.inputs.clone())
    bad.inputs[0] = poison
    parts.model.train()
    ring.record(train_step(parts.learners[0], parts.model, good, parts.plan))
    before = state_of(parts)
    for _ in range(3):
        ring.record(train_step(parts.learners[0], parts.model, bad, parts.plan))
    assert_equal_states(before, state_of(parts))
    ring.record(train_step(parts.learners[0], parts.model, good, parts.plan))
    rows = ring.take(wait=True)
    assert [row.overflow for row in rows] == [False, True, True, True, False]
    assert not torch.equal(before["step"], state_of(parts)["step"])


HALF_WEIGHTS = ["fp16_dynamic", "fp16_pure", "bf16", "bf16_pure", "bf16_stochastic", "bf16_kahan"]


@pytest.mark.parametrize("precision", HALF_WEIGHTS)
def test_trap_23_32_a_refused_step_leaves_weights_that_half_precision_cannot_hold_as_they_began(tmp_path, precision):
    words = (*TINY, "train.max_steps=1", f"precision={precision}")
    initial = parts_of(*TINY)[0].model.state_dict()
    name = next(iter(initial))
    initial[name][0, :5] = torch.finfo(torch.float32).max
    initial[name][1, :5] = -torch.finfo(
        torch.float32
    ).max  # one of the two passes the ReLU, whatever the sign of the inputs
    initial[name][2, :3] = -1e5
    torch.save(initial, tmp_path / "weights.pt")
    loop = loop_of(tmp_path, *words, f"model.weights={tmp_path / 'weights.pt'}")
    before = state_of(loop.parts)
    assert all(value.isfinite().all() for value in before.values())
    count = 10 if precision.startswith("bf16") else 13
    [warning] = loop.parts.warnings
    assert warning.startswith(f"{count} values in weights and buffers are beyond ")
    assert warning.endswith(f"{name} ({count})")
    loop.run()
    [row] = steps_of(loop)
    assert row["skipped"]
    assert_equal_states(before, state_of(loop.parts))


def test_trap_22_the_learning_rate_does_not_move_on_a_refused_step():
    parts, _ = parts_of(*TINY, "precision=amp_dynamic")
    ring = ring_for(parts)
    good, *_ = batches(parts, 1)
    bad = dataclasses.replace(good, inputs=torch.full_like(good.inputs, float("inf")))
    for batch in (good, bad, bad, good):
        ring.record(train_step(parts.learners[0], parts.model, batch, parts.plan))
    rates = [row.lr for row in ring.take(wait=True)]
    assert rates[0] > rates[1] == rates[2] == rates[3]


def test_trap_02_the_scale_that_multiplied_the_loss_unscales_its_gradients_on_growth_steps_too():
    def norms(*extra):
        parts, _ = parts_of(*TINY, "precision=fp32", *extra)
        ring = ring_for(parts)
        for batch in batches(parts, 6):
            ring.record(train_step(parts.learners[0], parts.model, batch, parts.plan))
        return ring.take(wait=True)

    plain = norms()
    growing = norms("scaler=dynamic", "scaler.growth_interval=2", "scaler.init_scale=4")
    assert [row.loss_scale for row in growing] == [4, 4, 8, 8, 16, 16]
    assert [row.grad_norm for row in growing] == [row.grad_norm for row in plain]


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        ("sgd", ()),
        ("adam", ("train.clip_norm=0.5",)),
        ("adamw", ("train.accumulate=3",)),
        ("adagrad", ("train.clip_norm=0.5", "train.accumulate=4")),
    ],
)
def test_trap_05_fp32_with_scale_2_to_the_20_gives_bit_identical_losses(tmp_path, optimizer, extra):
    words = (*TINY, "precision=fp32", f"optimizer={optimizer}", "dataset.train_samples=100", *extra)
    plain = loop_of(tmp_path, *words)
    scaled = loop_of(tmp_path, *words, "scaler=static", "scaler.scale=1048576")
    plain.run()
    scaled.run()
    one, other = steps_of(plain), steps_of(scaled)
    assert [step["loss"] for step in one] == [step["loss"] for step in other]
    assert [step["grad_norm"] for step in one] == [step["grad_norm"] for step in other]
    assert {step["loss_scale"] for step in other} == {1048576.0}
    assert len(one) == 21


def test_trap_20_accumulation_over_uneven_micro_batches_equals_one_batch():
    def weights_after(accumulate):
        parts, _ = parts_of(
            *TINY, "precision=fp32", f"train.accumulate={accumulate}", "train.batch_size=32", "optimizer.momentum=0"
        )
        ring = ring_for(parts)
        for batch in batches(parts, 3, size=32):
            ring.record(train_step(parts.learners[0], parts.model, batch, parts.plan))
        return parts.full_precision(), [row.loss for row in ring.take(wait=True)]

    whole, whole_losses = weights_after(1)
    for parts in (4, 5, 32):
        split, losses = weights_after(parts)
        assert losses == pytest.approx(whole_losses, rel=1e-6)
        for name, value in whole.items():
            torch.testing.assert_close(split[name], value, rtol=1e-5, atol=1e-6)


def test_trap_20_the_scale_is_constant_within_an_accumulation_window():
    parts, _ = parts_of(*TINY, "precision=amp_dynamic", "train.accumulate=4", "scaler.growth_interval=1")
    ring = ring_for(parts)
    for batch in batches(parts, 3):
        ring.record(train_step(parts.learners[0], parts.model, batch, parts.plan))
    assert [row.loss_scale for row in ring.take(wait=True)] == [65536, 131072, 262144]


def test_trap_04_a_loss_that_is_not_a_float32_scalar_is_refused():
    parts, _ = parts_of(*TINY)
    learner = parts.learners[0]
    batch = batches(parts, 1)[0]
    for wrong in (lambda m, b: m(b.inputs).half().mean(), lambda m, b: m(b.inputs).mean().view(1)):
        learner.objective = Objective("main", ("",), wrong)
        with pytest.raises(ConfigError, match="not a float32 scalar"):
            ring_for(parts).record(train_step(learner, parts.model, batch, parts.plan))


def test_records_name_the_tensor_that_overflowed(tmp_path):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "precision=amp_dynamic", "train.max_steps=3", kept=kept)
    name, parameter = list(loop.parts.model.named_parameters())[2]
    parameter.register_hook(lambda grad: grad * float("inf") if loop.progress.step == 1 else grad)
    loop.run()
    (overflow,) = kept.of(OverflowRecord)
    assert overflow.step == 2
    assert overflow.phase == "calibrating"
    assert overflow.loss == "finite"
    assert {tensor for tensor, _ in overflow.tensors} == {name}
    (change,) = kept.of(ScaleRecord)
    assert (change.step, change.from_scale, change.to_scale, change.why) == (2, 65536.0, 32768.0, "overflow")
    assert [(r.step, r.updates, r.overflow, r.skipped) for r in kept.of(StepRecord)] == [
        (1, 1, False, False),
        (2, 1, True, True),
        (3, 2, False, False),
    ]


def test_trap_14_parameters_that_are_not_trained_are_named(tmp_path):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "train.max_steps=2", kept=kept)
    model = loop.parts.model
    model.register_parameter("spare", nn.Parameter(torch.ones(2)))
    model.register_parameter("fixed", nn.Parameter(torch.ones(2), requires_grad=False))
    loop.run()
    (untrained,) = [event for event in kept.of(EventRecord) if event.kind == "untrained"]
    assert untrained.fields == {"frozen": ["fixed"], "no_learner": ["spare"], "no_gradient": []}
    (warning,) = [event for event in kept.of(EventRecord) if event.kind == "warning"]
    assert warning.fields["message"] == "1 parameters belong to no learner and are not trained: spare"


def test_trap_15_a_static_scale_that_applies_overflows_records_them_and_moves_the_weights(tmp_path):
    kept = Kept()
    loop = loop_of(
        tmp_path, *TINY, "precision=fp16_static", "scaler.scale=16777216", "scaler.on_overflow=apply",
        "train.max_steps=2", kept=kept,
    )  # fmt: skip
    loop.run()
    assert all(record.overflow and not record.skipped for record in kept.of(StepRecord))
    assert kept.of(StepRecord)[-1].updates == 2
    assert any(not value.isfinite().all() for value in loop.parts.full_precision().values())


@pytest.fixture(scope="module")
def valueless():
    """torch has no implementation of its fused optimizers for tensors without values: they write in place, no more."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
        for overload in ("", ".tensor_lr"):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}{overload}", "Meta"):
                library.impl(f"{name}{overload}", lambda *args, **kwargs: None)
    return library


def fake_steps(objective=None, overrides=()):
    """Two steps whose tensors have shapes and dtypes but no values."""
    with without(host=False):
        parts, _ = parts_of(*TINY, *overrides)
    learner = parts.learners[0]
    if objective is not None:
        learner.objective = Objective("main", ("",), objective)
    ring = ring_for(parts)
    batch = batches(parts, 1)[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Batch(torch.empty_like(batch.inputs), torch.empty_like(batch.targets))
        for _ in range(2):
            ring.record(train_step(learner, parts.model, fake, parts.plan))
    assert isinstance(learner.scale, torch._subclasses.FakeTensor) or learner.scaler.describe().startswith(
        ("none", "st")
    )
    assert isinstance(learner.updates, torch._subclasses.FakeTensor)


class _Curious(NoScaler):
    """A rule of somebody's: begins at 4, and looks at single norms."""

    seen = ()

    def initial(self, device):
        return {"scale": torch.full((1,), 4.0, device=device)}

    def after(self, state, verdict):
        object.__setattr__(self, "seen", verdict.norms.tolist())
        return state


def test_a_rule_of_somebody_else_sees_every_norm_and_its_scale_is_divided_by():
    ours, _ = parts_of(*TINY, "precision=fp32")
    theirs, _ = parts_of(*TINY, "precision=fp32")
    learner = theirs.learners[0]
    curious = Learner(learner.objective, learner.weights, _Curious(), learner.rates, theirs.device)
    for parts, one in ((ours, ours.learners[0]), (theirs, curious)):
        ring_for(parts).record(train_step(one, parts.model, batches(parts, 1)[0], parts.plan))
    assert min(curious.scaler.seen) > 0
    after = theirs.full_precision()
    assert all(torch.equal(value, after[name]) for name, value in ours.full_precision().items())


class _Wide(_Curious):
    def after(self, state, verdict):
        return {"scale": state["scale"] / (1 + verdict.grad_norm)}


class _InPlace(_Curious):
    def after(self, state, verdict):
        state["scale"].mul_(0.5)
        return state


@pytest.mark.parametrize(
    ("rule", "said"),
    [(_Wide(), r"as scale torch\.float64"), (_InPlace(), r"_InPlace.after\(\) changes the scale in place")],
)
def test_a_rule_whose_next_scale_is_none_to_use_is_refused_before_the_first_step(rule, said):
    parts, _ = parts_of(*TINY, "precision=fp32")
    learner = parts.learners[0]
    own = Learner(learner.objective, learner.weights, rule, learner.rates, parts.device)
    object.__setattr__(parts, "learners", (own,))
    with pytest.raises(ConfigError, match=said):
        rehearse(parts, batches(parts, 1)[0])


def test_a_rule_that_begins_without_a_scale_is_refused():
    learner = parts_of(*TINY, "precision=fp32")[0].learners[0]
    for state in ({}, {"scale": 4.0}):
        odd = _Curious()
        object.__setattr__(odd, "initial", lambda device, state=state: state)
        with pytest.raises(ConfigError, match="the scaler's state has as scale"):
            Learner(learner.objective, learner.weights, odd, learner.rates, learner.rates.device)


def test_a_class_that_is_no_rule_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"types.SimpleNamespace is no loss scaling rule") as caught:
        parts_of(*TINY, "scaler._target_=types.SimpleNamespace", "extensions.allow=[types]")
    assert "derive the class from mptrain.scaler.Scaler" in str(caught.value.problems[0].hint)


@pytest.mark.usefixtures("valueless")
class TestWithoutTheHost:
    """The whole step runs on tensors that have no values, so nothing in it can depend on one."""

    @each(
        ("optimizer", "mode"),
        [
            ("adamw", ("precision=fp32",)),
            ("sgd", ("precision=amp_dynamic",)),
            ("adam", ("precision=fp16_dynamic", "scaler.hysteresis=2")),
            ("adagrad", ("precision=fp16_dynamic", "train.ema_decay=0.99")),
            ("sgd", ("precision=fp16_static", "scaler.on_overflow=apply")),
            ("adam", ("precision=fp16_pure", "precision.optimizer_state=parameters", "scaler=none")),
            ("sgd", ("precision=bf16",)),
        ],
    )
    def test_no_host_read_in_the_step(self, optimizer, mode):
        eps = ["optimizer.eps=0.001"] if optimizer != "sgd" else []
        fake_steps(overrides=(f"optimizer={optimizer}", *mode, *eps, "train.clip_norm=1", "train.accumulate=3"))

    @each(
        "read",
        [
            lambda loss: loss.item(),
            lambda loss: bool(loss > 0),
            lambda loss: loss[loss > 0],
        ],
    )
    def test_planted_reads_are_found(self, read):
        def nosy(model, batch):
            loss = torch.nn.functional.cross_entropy(model(batch.inputs).float(), batch.targets)
            read(loss.detach())
            return loss

        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)):
            fake_steps(nosy)

    def test_an_objective_that_reads_nothing_passes(self):
        fake_steps(lambda model, batch: torch.nn.functional.cross_entropy(model(batch.inputs).float(), batch.targets))
