from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mptrain.optimizer import SGD, Adagrad, Adam, AdamW, Weights, torch_optim_state
from mptrain.system.errors import CheckpointError, ConfigError
from tests.loops import each
from tests.optimizer.kinds import KINDS, RULES, SHAPES, make, run, state_of

ONE = torch.ones(1)
BAD = [math.inf, -math.inf, math.nan]


def update(weights, rate=ONE, scale=ONE):
    verdict = weights.judge(scale, skip_on_overflow=True)
    weights.update(verdict, rate, scale)
    return verdict


def assert_same_bits(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value.flatten().view(torch.uint8), after[key].flatten().view(torch.uint8)), key


@each("value", BAD)
@each("kind", KINDS)
@each("rule", RULES)
def test_trap_13_23_24_a_refused_update_changes_no_bit(rule, kind, value):
    model, weights = make(kind, RULES[rule], clip_norm=1.0)
    for _ in range(3):
        run(model, weights)
    before = state_of(model, weights)
    for _ in range(3):
        verdict = run(model, weights, poison=value)
        assert verdict.skip == 1
        assert_same_bits(before, state_of(model, weights))
    run(model, weights)
    assert not torch.equal(before["step"], state_of(model, weights)["step"])


@each("kind", KINDS)
@each("rule", RULES)
def test_trap_27_a_first_step_that_overflows_changes_nothing_of_what_follows(rule, kind):
    fresh_model, fresh = make(kind, RULES[rule])
    model, weights = make(kind, RULES[rule])
    run(model, weights, poison=math.nan)
    for step in range(3):
        run(fresh_model, fresh, seed=step)
        run(model, weights, seed=step)
    assert_same_bits(state_of(fresh_model, fresh), state_of(model, weights))


@each("kind", KINDS)
def test_trap_15_where_overflows_are_applied_they_reach_the_weights(kind):
    model, weights = make(kind, SGD(lr=0.1, momentum=0.0))
    verdict = run(model, weights, poison=math.nan, refuse=0.0)
    assert verdict.overflow
    assert verdict.skip == 0
    assert not model.matrix.isfinite().all()
    assert weights.updater.state_dict()["step"] == 1


@each("kind", KINDS)
def test_trap_14_parameters_without_gradients_are_named_and_left_alone(kind):
    model, weights = make(kind, AdamW(lr=0.1, weight_decay=0.5, decay_norms_and_biases=True))
    run(model, weights)
    assert weights.gradients.missing() == []
    before = state_of(model, weights)
    run(model, weights, without=("bias", "scalar"))
    after = state_of(model, weights)
    assert weights.gradients.missing() == ["bias", "scalar"]
    for key in before:
        if key != "step":
            assert torch.equal(before[key], after[key]) == (key.split(".")[1] in ("bias", "scalar")), key


@each("kind", KINDS)
def test_trap_14_a_step_in_which_nothing_has_a_gradient_is_no_crash(kind):
    model, weights = make(kind, SGD())
    before = state_of(model, weights)
    weights.gradients.zero_grad()
    weights.gradients.accumulate()
    verdict = update(weights)
    assert weights.gradients.missing() == list(SHAPES)
    assert verdict.norms.tolist() == [-1.0] * len(SHAPES)
    assert not verdict.overflow
    for key, value in state_of(model, weights).items():
        assert key == "step" or torch.equal(value, before[key])


@each("value", [1.0, math.inf, math.nan])
@each("kind", KINDS)
@each("missing", [(), ("bias",)])
def test_a_verdict_that_names_offenders_only_is_otherwise_the_same(kind, value, missing):
    model, weights = make(kind, SGD())
    weights.gradients.zero_grad()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if name not in missing:
            parameter.grad = torch.full_like(parameter, number + 1.0)
    last = [p for name, p in model.named_parameters() if name not in missing][-1]
    last.grad.view(-1)[-1] = value
    weights.gradients.accumulate()
    scale = torch.tensor([8.0])
    all_of_them = weights.judge(scale, skip_on_overflow=True)
    offenders = weights.judge(scale, skip_on_overflow=True, offenders_only=True)
    assert torch.equal(all_of_them.skip, offenders.skip)
    assert torch.equal(all_of_them.applied, offenders.applied)
    torch.testing.assert_close(all_of_them.grad_norm, offenders.grad_norm, rtol=1e-14, atol=0, equal_nan=True)
    if math.isfinite(value) and not missing:
        assert offenders.norms.tolist() == [0.0] * len(SHAPES)
        assert all_of_them.norms.min() > 0
    else:
        assert torch.equal(all_of_them.norms.nan_to_num(1e9, 2e9), offenders.norms.nan_to_num(1e9, 2e9))


def test_trap_14_frozen_parameters_are_left_out_and_all_frozen_is_an_error():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert Weights(dict(model.named_parameters()), SGD(), master_weights=False).names == ("weight",)
    model.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model is trainable"):
        Weights(dict(model.named_parameters()), SGD(), master_weights=False)


def with_gradient(value, dtype=torch.float32, rule=None, **options):
    parameter = nn.Parameter(torch.zeros(len(value), dtype=dtype))
    weights = Weights({"p": parameter}, rule or SGD(lr=1.0, momentum=0.0), master_weights=False, **options)
    weights.gradients.zero_grad()
    parameter.grad = torch.tensor(value, dtype=dtype)
    weights.gradients.accumulate()
    return parameter, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_trap_16_half_gradients_are_unscaled_in_fp32(dtype):
    scale = torch.tensor([65536.0])
    gradient = torch.tensor(1e-3, dtype=dtype)
    assert (torch.tensor(1e-3, dtype=torch.float16) / 65536) == 0  # what unscaling in FP16 makes of it
    parameter = nn.Parameter(torch.zeros(20, dtype=dtype))
    weights = Weights({"p": parameter}, SGD(lr=1.0, momentum=0.0), master_weights=dtype != torch.float32)
    parameter.grad = gradient.expand(20).clone()
    weights.gradients.accumulate()
    update(weights, scale=scale)
    expected = -gradient.float() / 65536
    assert torch.equal(weights.masters.full_precision()["p"], expected.expand(20))


@pytest.mark.parametrize("rule", [Adam(lr=1.0, eps=1e-6), AdamW(lr=1.0, eps=1e-6, weight_decay=0.0)])
def test_trap_16_also_where_the_fp16_parameter_itself_is_updated(rule):
    """The kernel divides in FP32: the sign of a gradient that FP16 would unscale to zero moves the weight."""
    parameter, weights = with_gradient([1e-2] * 20, torch.float16, rule, state_in_half=True)
    scale = torch.tensor([2.0**20])
    update(weights, scale=scale)
    assert (parameter < 0).all()


def test_trap_02_the_scale_handed_in_unscales_whatever_comes_next():
    for exponent in (0, 1, 15, 16):
        scale = torch.tensor([2.0**exponent])
        parameter, weights = with_gradient([3.0 * 2.0**exponent])
        update(weights, scale=scale)
        assert parameter.item() == -3.0


def test_trap_18_19_clipping_acts_on_the_global_unscaled_norm():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    weights = Weights({"a": first, "b": second}, SGD(lr=1.0, momentum=0.0), master_weights=False, clip_norm=1.0)
    scale = torch.tensor([1024.0])
    first.grad, second.grad = torch.tensor([0.3 * 1024]), torch.tensor([0.4 * 1024])
    update(weights, scale=scale)
    assert [first.item(), second.item()] == pytest.approx([-0.3, -0.4], rel=1e-6)  # norm 0.5: nothing to clip
    first.grad, second.grad = torch.tensor([3.0 * 1024]), torch.tensor([4.0 * 1024])
    verdict = update(weights, scale=scale)
    assert [first.item(), second.item()] == pytest.approx([-0.9, -1.2], rel=1e-6)  # norm 5, both divided by 5
    assert verdict.grad_norm.item() == 5.0


@pytest.mark.parametrize("refuse", [0.0, 1.0])
def test_trap_21_clipping_by_an_inf_norm_does_not_zero_the_finite_gradients(refuse):
    parameter, weights = with_gradient([2.0, math.inf], clip_norm=1.0)
    weights.update(weights.judge(ONE, skip_on_overflow=bool(refuse)), ONE, ONE)
    assert parameter[0].item() == (0.0 if refuse else -2.0)


@pytest.mark.parametrize("rule", [SGD(lr=1.0, momentum=0.0), Adam(lr=1.0), Adagrad(lr=1.0)])
def test_trap_12_21_clipping_by_a_norm_beyond_fp32_zeroes_nothing(rule):
    parameter, weights = with_gradient([3e38, -3e38], rule=rule, clip_norm=1.0)
    verdict = update(weights)
    assert not verdict.overflow
    assert parameter.isfinite().all()
    assert parameter[0] < -0.5
    assert parameter[1] > 0.5


@each("rule", RULES)
def test_trap_05_any_power_of_two_gives_the_same_bits(rule):
    outcomes = []
    for exponent in (0, 1, 10, 20, 24):
        model, weights = make("fp32", RULES[rule], clip_norm=0.5)
        for step in range(5):
            run(model, weights, scale=2.0**exponent, micro=4, seed=step)
        outcomes.append(state_of(model, weights))
    for other in outcomes[1:]:
        assert_same_bits(outcomes[0], other)


@pytest.mark.parametrize("kind", ["fp16 master", "fp16 pure", "bf16 master"])
def test_trap_20_micro_gradients_of_half_parameters_are_summed_up_in_fp32(kind):
    """40000 + 40000 overflows in FP16, 2^-24 added to 1 vanishes there, and both are right in FP32."""
    model, weights = make(kind, SGD(lr=2.0**-20, momentum=0.0))
    weights.gradients.zero_grad()
    for part in ([40000.0, 1.0], [40000.0, 2.0**-14], [-40000.0, 2.0**-14]):
        model.bias.grad = torch.tensor([*part, 0.0], dtype=model.bias.dtype)
        weights.gradients.accumulate()
        assert model.bias.grad is None
    verdict = weights.judge(ONE, skip_on_overflow=True)
    assert not verdict.overflow
    forty_thousand = torch.tensor(40000.0, dtype=model.bias.dtype).item()
    assert verdict.norms[1].item() == math.hypot(forty_thousand, 1.0 + 2.0**-13)


def test_trap_20_an_accumulated_sum_does_not_reach_into_the_next_update():
    model, weights = make("fp16 master", SGD(lr=1.0, momentum=0.0))
    norms = []
    for _ in range(2):
        verdict = run(model, weights, micro=3, seed=0)
        norms.append(verdict.grad_norm.item())
    assert norms[0] == norms[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trap_29_only_master_weights_keep_small_updates(dtype):
    lost = torch.finfo(dtype).eps / 4
    for master_weights, expected in ((True, 1.0 - 100 * lost), (False, 1.0)):
        parameter = nn.Parameter(torch.ones(1, dtype=dtype))
        weights = Weights({"p": parameter}, SGD(lr=1.0, momentum=0.0), master_weights=master_weights)
        for _ in range(100):
            weights.gradients.zero_grad()
            parameter.grad = torch.full((1,), lost, dtype=dtype)
            weights.gradients.accumulate()
            update(weights)
        assert parameter.item() == pytest.approx(expected, rel=float(torch.finfo(dtype).eps))
        assert (parameter.item() == 1.0) is not master_weights


def test_a_weight_of_3_1_is_exact_in_its_master_and_3_0996_in_half():
    drawn = torch.tensor([3.1])
    parameter = nn.Parameter(drawn.half())
    weights = Weights({"p": parameter}, SGD(), master_weights=True, initial={"p": drawn})
    assert torch.equal(weights.masters.full_precision()["p"], drawn)
    assert parameter.item() == 3.099609375
    weights.masters.copy_to_params()
    assert parameter.item() == 3.099609375
    assert torch.equal(weights.masters.full_precision()["p"], drawn)
    weights.masters.full_precision()["p"].zero_()
    assert drawn.item() == pytest.approx(3.1)


@pytest.mark.parametrize("kind", ["fp16 master", "fp16 pure", "fp16 in place"])
def test_trap_32_publishing_saturates_in_both_directions(kind):
    model, weights = make(kind, SGD(lr=1.0, momentum=0.0))
    with torch.no_grad():
        model.bias.copy_(torch.tensor([60000.0, -60000.0, 1.0]))
    weights.masters.load_full_precision({name: p.detach().float() for name, p in model.named_parameters()})
    weights.gradients.zero_grad()
    model.bias.grad = torch.tensor([-30000.0, 30000.0, 0.0], dtype=torch.float16)
    weights.gradients.accumulate()
    update(weights)
    assert model.bias.tolist() == [65504.0, -65504.0, 1.0]
    if kind == "fp16 master":
        assert weights.masters.full_precision()["bias"].tolist() == [90000.0, -90000.0, 1.0]


@each("kind", KINDS)
def test_trap_32_loading_sets_parameters_and_masters_alike(kind):
    model, weights = make(kind, Adam())
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    values["bias"] = torch.tensor([1e6, -1e6, 3.1])
    weights.masters.load_full_precision(values)
    dtype = model.bias.dtype
    limit = torch.finfo(torch.float16).max
    for name, parameter in model.named_parameters():
        expected = values[name].clamp(-limit, limit) if dtype == torch.float16 else values[name]
        assert torch.equal(parameter, expected.to(dtype)), name
    if kind.endswith("master"):
        assert all(torch.equal(weights.masters.full_precision()[name], value) for name, value in values.items())


@each("kind", KINDS)
def test_trap_32_after_a_load_the_next_update_starts_from_what_was_loaded(kind):
    model, weights = make(kind, SGD(lr=1.0, momentum=0.0))
    run(model, weights)
    weights.masters.load_full_precision({name: torch.full(shape, 2.0) for name, shape in SHAPES.items()})
    weights.gradients.zero_grad()
    model.matrix.grad = torch.full_like(model.matrix, 0.5)
    weights.gradients.accumulate()
    update(weights)
    assert torch.equal(model.matrix.float(), torch.full((4, 3), 1.5))


def test_weights_that_do_not_fit_are_refused_before_anything_moves():
    model, weights = make("fp32", SGD())
    before = state_of(model, weights)
    values = {name: value.clone() + 1 for name, value in weights.masters.full_precision().items()}
    values["matrix"] = torch.zeros(3, 4)
    del values["scalar"]
    with pytest.raises(CheckpointError, match=r"matrix is \(3, 4\), not \(4, 3\); scalar is missing"):
        weights.masters.load_full_precision(values)
    assert_same_bits(before, state_of(model, weights))


@pytest.mark.parametrize("kind", ["fp16 master", "fp16 pure", "bf16 master", "fp32"])
@pytest.mark.parametrize("rule", ["adam", "sgd momentum", "adagrad"])
def test_trap_31_loading_state_keeps_fp32_moments_and_their_bits(kind, rule, tmp_path):
    model, weights = make(kind, RULES[rule])
    for step in range(3):
        run(model, weights, seed=step)
    torch.save(
        {"state": weights.updater.state_dict(), "weights": weights.masters.full_precision()}, tmp_path / "saved.pt"
    )
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other_model, other = make(kind, RULES[rule], seed=7)
    other.masters.load_full_precision(saved["weights"])
    assert other.updater.load_state_dict(saved["state"]) == []
    state = other.updater.state_dict()["state"]
    assert all(tensor.dtype == torch.float32 for tensors in state.values() for tensor in tensors.values())
    assert_same_bits(state_of(model, weights), state_of(other_model, other))
    for step in range(3, 6):
        run(model, weights, seed=step)
        run(other_model, other, seed=step)
    assert_same_bits(state_of(model, weights), state_of(other_model, other))


def test_trap_31_half_state_loads_into_fp32_state_without_becoming_half():
    model, weights = make("fp16 in place", RULES["sgd momentum"])
    run(model, weights)
    _, wide = make("fp16 master", RULES["sgd momentum"])
    assert wide.updater.load_state_dict(weights.updater.state_dict()) == []
    buffer = wide.updater.state_dict()["state"]["matrix"]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert torch.equal(buffer, weights.updater.state_dict()["state"]["matrix"]["momentum_buffer"].float())


def test_state_of_another_optimizer_is_reported_and_not_used():
    adam_model, adam = make("fp32", Adam())
    run(adam_model, adam)
    model, sgd = make("fp32", SGD())
    before = state_of(model, sgd)
    lost = sgd.updater.load_state_dict(adam.updater.state_dict())
    assert lost == [f"optimizer state reset: the checkpoint has no matching state of {next(iter(SHAPES))}"]
    assert_same_bits(before, state_of(model, sgd))


def test_trap_33_weight_decay_acts_on_the_master_where_half_would_lose_it():
    decay = 2.0**-14  # a step of 1 - 2^-14 from 1 is lost in FP16, whose numbers below 1 are 2^-11 apart
    rule = SGD(lr=1.0, momentum=0.0, weight_decay=decay)
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    weights = Weights({"p": parameter}, rule, master_weights=True)
    for _ in range(16):
        weights.gradients.zero_grad()
        parameter.grad = torch.zeros_like(parameter)
        weights.gradients.accumulate()
        update(weights)
    expected = (1 - decay) ** 16
    assert weights.masters.full_precision()["p"][0, 0].item() == pytest.approx(expected, rel=1e-6)
    assert parameter[0, 0].item() == torch.tensor(expected).half().item() < 1.0


@each("kind", KINDS)
@each("rule", ["sgd", "sgd momentum", "adam", "adamw", "adagrad"])
def test_trap_33_decay_spares_norms_and_biases_unless_asked_not_to(rule, kind):
    for everything in (False, True):
        changed = type(RULES[rule])(
            **{**vars(RULES[rule]), "lr": 0.25, "weight_decay": 0.5, "decay_norms_and_biases": everything}
        )
        model, weights = make(kind, changed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        weights.masters.load_full_precision({name: p.detach().float() for name, p in model.named_parameters()})
        weights.gradients.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        weights.gradients.accumulate()
        update(weights, torch.tensor([0.25]))
        assert (model.matrix < 1.0).all()
        assert (model.bias < 1.0).all().item() is everything
        assert (model.scalar < 1.0).item() is everything


def test_the_gradients_of_a_refused_step_can_still_be_looked_at():
    model, weights = make("fp16 master", SGD())
    run(model, weights, poison=math.nan)
    norms = dict(zip(weights.names, weights.judge(ONE, skip_on_overflow=True).norms.tolist(), strict=True))
    assert [name for name, norm in norms.items() if not math.isfinite(norm)] == ["matrix"]


def test_sums_that_others_have_formed_are_used_as_they_are_and_let_go():
    _, weights = make("fp16 master", SGD(momentum=0.9))
    halves = [p for p in weights.params if p.dtype != torch.float32]
    sums = [(p, torch.full_like(p, 3.0, dtype=torch.float32)) for p in halves]
    for parameter in weights.params:
        parameter.grad = torch.ones_like(parameter)
    weights.gradients.take_sums(sums)
    given = {id(one) for _, one in sums}
    assert sum(id(one) in given for one in weights.gradients.in_place().values()) == len(halves)
    weights.gradients.zero_grad()
    assert not any(wide is not None for wide in weights.gradients._sums)
    assert not weights.gradients.in_place()


@each("rule", RULES)
@each("dtype", [torch.float32, torch.float16])
def test_the_layout_of_weights_and_gradients_changes_no_update(rule, dtype):
    """Rules get views in the order of memory on a CPU; torch's kernels round those elements differently that fill no vector."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "large": (16, 8, 3, 3),
        "odd": (3, 5, 2, 3),
        "pointwise": (16, 8, 1, 1),
        "volume": (2, 3, 2, 2, 2),
        "bias": (7,),
    }
    values = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    grads = [{name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()} for _ in range(3)]

    def laid_out(tensor, layout):
        kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
        return tensor.clone(
            memory_format=kinds[tensor.ndim] if layout and tensor.ndim in kinds else torch.contiguous_format
        )

    def trained(weight_layout, grad_layout):
        named = {name: nn.Parameter(laid_out(value, weight_layout)) for name, value in values.items()}
        weights = Weights(named, RULES[rule], master_weights=dtype != torch.float32)
        for step, of_step in enumerate(grads):
            weights.gradients.zero_grad()
            for name, parameter in named.items():
                if step != 1 or name != "odd":  # one that has no gradient in one step
                    parameter.grad = laid_out(of_step[name], grad_layout)
            weights.gradients.accumulate()
            update(weights, torch.full((1,), 0.1), ONE * 4)
        for name, parameter in named.items():
            assert parameter.stride() == laid_out(values[name], weight_layout).stride()
        return {**named, **weights.masters.full_precision()}

    right = trained(False, False)
    for layouts in ((True, True), (True, False), (False, True)):
        for name, value in trained(*layouts).items():
            if name in ("odd", "volume"):
                torch.testing.assert_close(value, right[name], rtol=2.0**-20, atol=2.0**-20)
            else:
                assert torch.equal(value, right[name]), (name, layouts)


@each("rule", RULES)
def test_weights_with_gaps_in_memory_are_updated_and_their_neighbours_are_not(rule):
    room = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    neighbours = room[:, 1::2].clone()
    named = {"gaps": nn.Parameter(room[:, ::2]), "dense": nn.Parameter(room[:, ::2].clone())}
    weights = Weights(named, RULES[rule], master_weights=False)
    for step in range(3):
        weights.gradients.zero_grad()
        grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for parameter in named.values():
            parameter.grad = grad.clone()
        weights.gradients.accumulate()
        weights.update(weights.judge(ONE, skip_on_overflow=True), torch.full((1,), 0.1), None)
    assert torch.equal(named["gaps"], named["dense"])
    assert torch.equal(room[:, 1::2], neighbours)


@each("rule", RULES)
@each("layout", [torch.channels_last, torch.contiguous_format])
def test_a_weight_that_a_module_gives_new_memory_is_trained_on(rule, layout):
    """As clipping of weights does: ``parameter.data = parameter.data.clamp(-1, 1)``."""
    first = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    named = {name: nn.Parameter(first.clone(memory_format=torch.channels_last)) for name in ("moved", "left")}
    weights = Weights(named, RULES[rule], master_weights=False)
    for step in range(3):
        weights.gradients.zero_grad()
        grad = torch.randn(first.shape, generator=torch.Generator().manual_seed(step))
        for parameter in named.values():
            parameter.grad = grad.clone()
        update(weights, torch.full((1,), 0.1))
        named["moved"].data = named["moved"].data.clone(memory_format=layout)
    assert torch.equal(named["moved"], named["left"])


TORCHS = {
    "sgd momentum": lambda ones: torch.optim.SGD(ones, momentum=0.9),
    "adam": lambda ones: torch.optim.Adam(ones, eps=1e-4),
    "adamw": lambda ones: torch.optim.AdamW(ones, eps=1e-4, weight_decay=0.01),
    "adagrad": lambda ones: torch.optim.Adagrad(ones, eps=1e-4),
}
OURS = {"sgd momentum": SGD(momentum=0.9), "adam": Adam(eps=1e-4), "adamw": RULES["adamw"], "adagrad": RULES["adagrad"]}
OURS["adamw"] = AdamW(weight_decay=0.01, eps=1e-4, decay_norms_and_biases=True)

#: Parameters without a gradient, and whether it overflows, by step.
MISSING = [
    ("bias",),
    ("bias",),
    (),
    ("scalar",),
    ("bias", "scalar"),
    "over",
    (),
    ("matrix", "bias", "scalar"),
    ("matrix",),
    (),
]


@each("rule", TORCHS)
@each("resumed", [False, True])
def test_each_parameter_counts_its_own_updates(rule, resumed):
    """Layers that some steps leave out, and a branch whose gradients begin late."""
    model, weights = make("fp32", OURS[rule])
    twins = {name: nn.Parameter(one.detach().clone()) for name, one in model.named_parameters()}
    torchs = TORCHS[rule](twins.values())
    for group in torchs.param_groups:
        group["lr"] = 0.125
    for step, missing in enumerate(MISSING):
        over = missing == "over"
        run(model, weights, seed=step, poison=math.inf if over else None, without=() if over else missing)
        if not over:
            for name, twin in twins.items():
                grad = model.get_parameter(name).grad
                twin.grad = None if grad is None else grad.clone()
            torchs.step()
        if resumed and step in (4, 6):
            saved = weights.updater.state_dict()
            model, weights = make("fp32", OURS[rule])
            assert weights.updater.load_state_dict(saved) == []
            with torch.no_grad():
                for name, one in model.named_parameters():
                    one.copy_(twins[name])
        for name, twin in twins.items():
            torch.testing.assert_close(model.get_parameter(name), twin, rtol=2e-6, atol=1e-6, msg=f"{name} at {step}")
    assert weights.updater.step.item() == 9
    saved = weights.updater.state_dict()
    missed = saved["missed"]
    ours, theirs = torch_optim_state(saved, torchs, twins), torchs.state_dict()
    for index, values in theirs["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(ours["state"][index][key], value, rtol=1e-5, atol=1e-6)
    assert {name: count.item() for name, count in missed.items()} == {"matrix": 2, "bias": 4, "scalar": 3}
