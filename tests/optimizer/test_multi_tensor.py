"""The multi-tensor kernels in Triton's interpreter, which computes what a device computes, on tensors of the CPU."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loops import each
from optimizer.exact_updates import DTYPES, exact, random_case, stride
from optimizer.interpreted import KERNELS, interpreter, overflow_is_no_warning, rounded  # noqa: F401 - two are fixtures
from optimizer.kinds import RULES
from small_runs import TINY, loop_of

from mptrain.engine import rehearsal
from mptrain.engine.rehearsal import kernel_fallbacks
from mptrain.numerics.overflow_check import clip_coefficient, judge
from mptrain.optimizer import SGD, Adam, AdamW, gradient_table, multi_tensor, updater
from mptrain.optimizer.gradient_table import same_order
from mptrain.optimizer.multi_tensor import (
    NORM_BLOCK,
    NORM_ROUNDS,
    PARTIALS_BLOCK,
    UPDATE_BLOCK,
    MultiTensorNorms,
    MultiTensorUpdate,
)
from mptrain.optimizer.rules import Group, UpdateInputs

triton = pytest.importorskip("triton")

FP16, BF16, FP32 = DTYPES
SHAPES = [(), (0,), (1,), (31,), (1023,), (1024,), (1025,), (3, 5, 7), (2, 8, 3, 3), (2 * UPDATE_BLOCK + 5,)]
BOUND = 2.0**-21  # of the sum of magnitudes, as the docstring of MultiTensorUpdate says
PLAIN = SGD(momentum=0.0)


def states_of(rule, weights):
    states = [rule.state(weight) for weight in weights]
    return {key: [state[key] for state in states] for key in states[0]}


def update(rule, weights, state, grads, taken, decay=0.0, publish=None):
    MultiTensorUpdate(rule, weights, state, [decay] * len(weights), publish or [None] * len(weights))(grads, taken)


def assert_same_bits(one, other):
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


@each("start", range(0, 300, 50))
def test_one_update_is_the_formula_and_torchs_within_the_bound(start):
    """Off torch's by twice as much, since torch's fused kernels are off as well."""
    for seed in range(start, start + 50):
        rule, decay, weight, state, grad, taken, half = random_case(seed)
        expected = exact(rule, decay, weight, state, grad, taken)
        theirs = {"weight": weight.clone(), **{key: value.clone() for key, value in state.items()}}
        published = None if half is None else torch.full_like(weight, math.nan, dtype=half)
        lists = {key: [theirs[key]] for key in state}
        rule.apply(Group([theirs["weight"]], lists, decay), [grad.float().clone()], taken)
        update(rule, [weight], {key: [value] for key, value in state.items()}, [grad], taken, decay, [published])
        for key, mine in {"weight": weight, **state}.items():
            value, size = expected[key]
            assert ((mine - value).abs() <= BOUND * size + 2.0**-148).all(), (seed, key)
            assert ((mine - theirs[key]).abs() <= 2 * BOUND * size + 2.0**-148).all(), (seed, key)
        if half is not None:
            assert_same_bits(published, rounded(weight, half))


@each("decay", [0.0, 0.01])
@each("name", RULES)
def test_lists_of_mixed_shapes_dtypes_and_decays_are_updated_as_torch_updates_each(name, decay):
    rule, generator = RULES[name], torch.Generator().manual_seed(0)
    masters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    masters[8] = masters[8].to(memory_format=torch.channels_last)
    decays = [decay * (index % 2) for index in range(len(SHAPES))]
    publish = [
        torch.full_like(master, math.nan, dtype=[FP16, BF16][index % 3]) if index % 3 < 2 else None
        for index, master in enumerate(masters)
    ]
    state, theirs = states_of(rule, masters), [master.clone() for master in masters]
    their_state = states_of(rule, theirs)
    step = MultiTensorUpdate(rule, masters, state, decays, publish)
    for count in range(1, 5):
        grads = [torch.randn_like(m).mul_(64).to(DTYPES[(i + count) % 3]) for i, m in enumerate(masters)]
        taken = stride(step=float(count), grad_scale=64.0, skip=float(count == 3))
        step(grads, taken)
        for index, (weight, grad) in enumerate(zip(theirs, grads, strict=True)):
            own = {key: [tensors[index]] for key, tensors in their_state.items()}
            rule.apply(Group([weight], own, decays[index]), [grad.float().clone()], taken)
    for index, (mine, weight) in enumerate(zip(masters, theirs, strict=True)):
        torch.testing.assert_close(mine, weight, rtol=3 * BOUND, atol=3 * BOUND)
        for key, tensors in state.items():
            torch.testing.assert_close(tensors[index], their_state[key][index], rtol=3 * BOUND, atol=3 * BOUND)
        if publish[index] is not None:
            assert_same_bits(publish[index], rounded(mine, publish[index].dtype))


@each("value", [math.inf, math.nan])
@each("name", RULES)
def test_trap_13_27_a_refused_first_update_changes_no_bit(name, value):
    rule = RULES[name]
    masters, publish = [torch.randn(5), torch.randn(1025)], [torch.full((5,), math.nan, dtype=FP16), None]
    state = states_of(rule, masters)
    tensors = [*masters, publish[0], *(tensor for own in state.values() for tensor in own)]
    before = [tensor.clone() for tensor in tensors]
    grads = [torch.full((5,), value, dtype=FP16), torch.full((1025,), value)]
    update(rule, masters, state, grads, stride(skip=1.0, step=0.0), 0.5, publish)
    for one, other in zip(before, tensors, strict=True):
        assert_same_bits(one, other)
    update(rule, masters, state, [torch.ones(5, dtype=FP16), torch.ones(1025)], stride(skip=2.0), 0.5, publish)
    assert not torch.equal(before[0], masters[0])  # trap 17: exactly 1 refuses
    assert publish[0].isfinite().all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_rounding_saturates_fp16_keeps_nan_and_goes_to_nearest_even(dtype):
    ties = [1 + odd * 2.0**-bit for odd in (1, 3) for bit in (8, 11)] + [2.0**-25, 3 * 2.0**-26, 3 * 2.0**-25, -1e-40]
    large = [65504.0, 65519.9, 65520.0, -65520.0, 7e4, -7e4, 3.3895e38, -3.4e38, math.inf, -math.inf, -0.0]
    nans = torch.tensor([2**31 - 1, -1, 0x7F800001], dtype=torch.int32).view(FP32)
    master = torch.cat([torch.tensor(ties + large), nans])
    published = torch.zeros_like(master, dtype=dtype)
    update(PLAIN, [master], {}, [torch.zeros_like(master)], stride(lr=0.0), 0.0, [published])
    assert_same_bits(published[:-3], rounded(master[:-3], dtype))
    assert published[-3:].isnan().all()


@each("size", [2 * UPDATE_BLOCK - 1, 2 * UPDATE_BLOCK + 3])
@each("name", RULES)
def test_nothing_beside_the_tensors_is_written_wherever_they_begin(name, size):
    """One tensor 4 bytes off 16, or all of them 8, takes all blocks the masked way: to the same bits."""
    rule, results = RULES[name], []
    for shifts in ((0, 0, 0, 0, 0), *(tuple(4 * (i == j) for i in range(5)) for j in range(5)), (8, 8, 8, 8, 8)):
        generator = torch.Generator().manual_seed(1)
        memory = [torch.full((size + 40,), 7.0, dtype=dtype) for dtype in (FP32, FP16, FP16, FP32, FP32)]
        starts = [16 + shift // tensor.itemsize for tensor, shift in zip(memory, shifts, strict=True)]
        master, published, grad, *spare = (m[at : at + size] for m, at in zip(memory, starts, strict=True))
        state = dict(zip(rule.state(master), spare, strict=False))
        for tensor in state.values():
            tensor.zero_()
        grad.copy_(torch.randn(size, generator=generator))
        master.copy_(torch.randn(size, generator=generator))
        published.fill_(math.nan)
        update(rule, [master], {key: [value] for key, value in state.items()}, [grad], stride(), 0.5, [published])
        for tensor, start in zip(memory, starts, strict=True):
            assert (tensor[:start] == 7).all()
            assert (tensor[start + size :] == 7).all()
        results.append(torch.cat([tensor.view(torch.uint8) for tensor in (master, published, *state.values())]))
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_thirty_updates_are_those_of_adamw_and_the_clip_coefficient_is_in_the_scale():
    rule, generator = AdamW(weight_decay=0.1), torch.Generator().manual_seed(3)
    master = torch.randn(50, generator=generator)
    state, weight = states_of(rule, [master]), master.double()
    first = second = torch.zeros(50, dtype=torch.float64)
    norms, step = MultiTensorNorms([master]), MultiTensorUpdate(rule, [master], state, [0.1], [None])
    for count in range(1, 31):
        grad = torch.randn(50, generator=generator)
        scale = torch.tensor([2.0**12])
        verdict = judge(norms([grad * scale]), scale, refuses=True)
        torch.testing.assert_close(verdict.grad_norm, grad.double().norm().reshape(1))
        clipped = (scale / clip_coefficient(verdict.grad_norm, 2.0)).float()
        step([grad * scale], UpdateInputs(torch.tensor([0.01]), torch.tensor([float(count)]), clipped, verdict.skip))
        g = grad.double() * min(1.0, 2.0 / grad.double().norm().item())
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        weight = weight * (1 - 0.001) - 0.01 * (first / (1 - 0.9**count)) / (
            (second / (1 - 0.999**count)).sqrt() + 1e-8
        )
    torch.testing.assert_close(master.double(), weight, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(
    not hasattr(importlib.import_module("triton._C.libtriton").interpreter, "fma_fp32"),
    reason="the interpreter of this Triton rounds a fused multiply-add twice",
)
def test_moments_shrink_by_beta_itself_and_infinite_ones_stay():
    """FP32 rounds 0.999 up by 1.3e-8; 150 steps make that 1.9e-6, while their own rounding averages out."""
    rule, weight = Adam(), torch.zeros(64)
    state = states_of(rule, [weight])
    second = state["exp_avg_sq"][0].copy_(torch.linspace(1, 2, 64))
    second[0] = math.inf
    step, before = MultiTensorUpdate(rule, [weight], state, [0.0], [None]), second.double()
    for _ in range(150):
        step([torch.zeros(64)], stride())
    assert second[0] == math.inf
    assert abs((second[1:] / before[1:]).mean() / 0.999**150 - 1) < 4e-7


def test_gradients_of_another_memory_order_are_put_in_the_weights():
    weight, grad = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(4, 3, 2, 2).half()
    expected = weight - 0.125 * grad.float()
    update(PLAIN, [weight], {}, [grad], stride())
    torch.testing.assert_close(weight, expected, rtol=2.0**-23, atol=0)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    pointwise, other = torch.randn(4, 3, 1, 1), torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last)
    table = multi_tensor.GradientTable([pointwise])
    assert table.locate([other])[1][0] is other  # strides along one element mean nothing


def test_strides_along_one_element_are_compared_in_the_first_step_only(monkeypatch):
    compared = []
    monkeypatch.setattr(gradient_table, "same_order", lambda *pair: compared.append(pair) or same_order(*pair))
    weights = [torch.randn(4, 3, 1, 1), torch.randn(4, 3, 2, 2)]
    strange = [weights[0].to(memory_format=torch.channels_last), torch.randn(4, 3, 2, 2)]
    assert strange[0].stride() != weights[0].stride()
    table = gradient_table.GradientTable(weights)
    for _ in range(3):
        assert all(one is other for one, other in zip(table.locate(strange)[1], strange, strict=True))
    assert len(compared) == 2
    turned = strange[1].to(memory_format=torch.channels_last)  # has to be copied, in each step
    for _ in range(2):
        found = table.locate([strange[0], turned])[1]
        assert found[0] is strange[0]
        assert found[1].stride() == weights[1].stride()
        assert torch.equal(found[1], turned)
    assert len(compared) == 6
    with pytest.raises(ValueError, match="do not have the shapes"):
        table.locate([strange[0], torch.randn(4, 3, 2, 3).as_strided((4, 3, 2, 1), (12, 4, 2, 1))])


def test_tensors_that_do_not_fit_are_refused():
    weight, rule = torch.zeros(4, 4), PLAIN
    with pytest.raises(ValueError, match="gaps or overlaps"):
        MultiTensorNorms([weight[:, :2]])
    with pytest.raises(ValueError, match="float64"):
        MultiTensorNorms([weight])([weight.double()])
    with pytest.raises(ValueError, match="2 gradients do not have the shapes of 1"):
        MultiTensorNorms([weight])([weight, weight])
    with pytest.raises(ValueError, match="do not have the shapes"):
        MultiTensorNorms([weight])([weight[:1]])
    for published in (torch.zeros(4, 4), torch.zeros(4, 4, dtype=FP16).t(), torch.zeros(4, dtype=BF16)):
        with pytest.raises(ValueError, match=r"FP32, and|do not match"):
            update(rule, [weight], {}, [weight], stride(), 0.0, [published])
    own = type("Own", (SGD,), {})()
    assert multi_tensor.supports(rule)
    assert not multi_tensor.supports(own)
    with pytest.raises(ValueError, match="no kernel for Own"):
        update(own, [weight], {}, [weight], stride())


def test_addresses_go_up_only_when_tensors_have_moved_and_never_over_a_table_in_use():
    table = multi_tensor.GradientTable([torch.zeros(3)])
    one, other = torch.ones(3), torch.ones(3)
    first, _ = table.locate([one])
    contents = first.clone()
    assert table.locate([one])[0] is first
    assert table.locate([other])[0] is not first
    assert torch.equal(first, contents)
    parameter = torch.nn.Parameter(torch.zeros(3))
    step = MultiTensorUpdate(SGD(lr=1.0, momentum=0.0), [parameter], {}, [0.0], [None])
    step([one], stride(lr=1.0))
    version, parameter.data = parameter._version, torch.full((3,), 5.0)
    step([one], stride(lr=1.0))
    assert parameter.tolist() == [4.0] * 3
    assert parameter._version > version  # autograd notices weights changed under a graph that saved them


def test_elements_beyond_2_to_31_and_many_partial_sums_are_found():
    """A table whose tensor begins 2^33 elements before the memory there is, and programs for its end only."""
    kernels, before, size = importlib.import_module(KERNELS), 2**33, NORM_BLOCK * NORM_ROUNDS
    grad, memory = torch.ones(size), torch.zeros(UPDATE_BLOCK)
    gradients = torch.tensor([[grad.data_ptr() - 4 * before], [kernels.FLOAT32.value]])
    rows = torch.tensor([[memory.data_ptr() - 4 * before], [0], [0], [0], [0], [before + UPDATE_BLOCK]])
    constants = torch.zeros(1, dtype=torch.float64)
    taken = stride(lr=1.0)
    kernels.update[(1,)](
        torch.tensor([[0, before // UPDATE_BLOCK]], dtype=torch.int32), rows, gradients, torch.zeros(1), constants,
        taken.lr, taken.step, taken.grad_scale, taken.skip, 1,
        rule="sgd", momentum=False, nesterov=False, decaying=False, block=UPDATE_BLOCK,
    )  # fmt: skip
    assert (memory == -1).all()
    partials = torch.full((1,), math.nan, dtype=torch.float64)
    kernels.partial_squares[(1,)](
        torch.tensor([[0, before // size]], dtype=torch.int32), torch.tensor([before + size]), gradients, partials, 1,
        block=NORM_BLOCK, rounds=NORM_ROUNDS,
    )  # fmt: skip
    assert partials.item() == size
    partials, first = torch.arange(1300, dtype=torch.float64), torch.tensor([0, 3, 3, 1300])
    kernels.norms[(3,)](partials, first, out := torch.ones(3, dtype=torch.float64), block=PARTIALS_BLOCK)
    assert out.square().round().tolist() == [3, 0, sum(range(3, 1300))]


def norms_of(grads):
    norms = MultiTensorNorms(grads)
    norms._partials.fill_(math.nan)
    found = norms(grads)
    assert found.dtype == torch.float64
    norms._partials.fill_(math.inf)
    assert_same_bits(found, norms(grads))
    shifted = [torch.cat([grad.flatten()[:1], grad.flatten()])[1:] for grad in grads]  # off 16 bytes
    torch.testing.assert_close(MultiTensorNorms(shifted)(shifted), found, rtol=1e-6, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_fp64(dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = [*SHAPES, (2 * NORM_BLOCK * NORM_ROUNDS + 1,)]
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grads[8] = grads[8].to(memory_format=torch.channels_last)
    expected = torch.stack([grad.double().norm() for grad in grads])
    torch.testing.assert_close(norms_of(grads), expected, rtol=2.0**-22 if dtype == FP16 else 2.0**-40, atol=0)
    assert norms_of([]).shape == (0,)


@each(
    ("value", "dtype"),
    [(1e30, FP32), (3.4e38, FP32), (1e-45, FP32), (1e38, BF16), (1e-39, BF16), (65504, FP16), (2.0**-24, FP16)],
)
def test_trap_9_nothing_finite_overflows_or_underflows(value, dtype):
    grads = [torch.full((size,), value, dtype=dtype) for size in (2, 9000)]
    expected = torch.tensor([grad[0].double() * math.sqrt(len(grad)) for grad in grads])
    torch.testing.assert_close(norms_of(grads), expected.double(), rtol=2.0**-22, atol=0)


@each("value", [math.inf, -math.inf, math.nan])
@each("dtype", DTYPES)
def test_norms_name_the_tensor_with_a_non_finite_element(dtype, value):
    grads = [torch.full((size,), torch.finfo(dtype).max, dtype=dtype) for size in (3, 1, 1030, 4)]
    for place, index in ((0, 2), (1, 0), (2, 1029)):
        held = [grad.clone() for grad in grads]
        held[place][index] = value
        held[2][5] = -65504.0
        assert norms_of(held).isfinite().tolist() == [other != place for other in range(4)]


def test_where_they_run(monkeypatch):
    cpu = torch.device("cpu")
    assert multi_tensor.available(cpu, PLAIN)
    for value, runs in (("0", False), ("TRUE", True)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        multi_tensor.obstacle.cache_clear()
        assert multi_tensor.available(cpu, PLAIN) == runs
    code = "import sys, mptrain.optimizer.multi_tensor as m; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def volta(monkeypatch):
    """A CUDA device whose kernels run in the interpreter."""
    trying = multi_tensor._try
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(multi_tensor, "_try", lambda device, rule: trying(torch.device("cpu"), rule))
    multi_tensor.obstacle.cache_clear()
    yield torch.device("cuda", 0)
    multi_tensor.obstacle.cache_clear()


@pytest.mark.parametrize("name", RULES)
def test_all_kernels_of_a_run_are_tried_on_cuda_before_they_are_used(name, volta, monkeypatch):
    kernels = importlib.import_module(KERNELS)
    assert multi_tensor.obstacle(volta, RULES[name]) == ""
    for failing in ("update", "partial_squares", "norms"):
        others = {other: getattr(kernels, other) for other in ("update", "partial_squares", "norms")} | {
            failing: Broken()
        }
        monkeypatch.setattr(multi_tensor, "_kernels", lambda others=others: SimpleNamespace(**others))
        multi_tensor.obstacle.cache_clear()
        assert multi_tensor.obstacle(volta, RULES[name]) == "CompilationError: no C compiler"
        assert not multi_tensor.available(volta, RULES[name])
    idle = {"update": Idle(), "partial_squares": kernels.partial_squares, "norms": kernels.norms}
    monkeypatch.setattr(multi_tensor, "_kernels", lambda: SimpleNamespace(**idle))
    multi_tensor.obstacle.cache_clear()
    assert multi_tensor.obstacle(volta, RULES[name]) == "RuntimeError: results differ from torch's"


class Idle:
    """A kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


class Broken:
    """A kernel that cannot be compiled."""

    def __getitem__(self, grid):
        raise type("CompilationError", (Exception,), {})("no C compiler\nat line 3")


def test_a_run_goes_on_with_torchs_kernels_and_says_why(volta, tmp_path, monkeypatch):
    broken = SimpleNamespace(update=Broken(), partial_squares=Broken(), norms=Broken())
    monkeypatch.setattr(multi_tensor, "_kernels", lambda: broken)
    monkeypatch.setattr(updater, "available", lambda device, rule: multi_tensor.available(volta, rule))
    loop = loop_of(tmp_path, *TINY, "train.max_steps=2", "precision=fp16_dynamic")
    monkeypatch.setattr(rehearsal, "kernel_fallbacks", lambda parts: kernel_fallbacks(replace(parts, device=volta)))
    loop.run()
    assert not loop.parts.learners[0].weights.one_pass
    said = [record.get("message", "") for record in map(json.loads, loop.storage.paths.events.read_text().splitlines())]
    assert [one for one in said if "Triton cannot be used here" in one and "CompilationError: no C compiler" in one]
