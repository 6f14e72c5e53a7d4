from __future__ import annotations

import math

import pytest
import torch

from mptrain.numerics.formats import FLOAT32
from mptrain.numerics.overflow_check import HostJudge, clip_coefficient, float32_norm, gradient_norms, judge
from mptrain.system.device import widest
from tests.capability import CPU, NoFP64, without
from tests.loops import each

ONE = torch.ones(1)


@pytest.fixture(autouse=True, params=[True, False], ids=["fp64", "no_fp64"])
def fp64(request):
    """Everything here holds on a device without FP64 too."""
    with without(fp64=request.param):
        yield request.param


def verdict_of(*grads, scale=1.0, skip_on_overflow=True):
    return judge(gradient_norms(list(grads)), torch.tensor([scale]), skip_on_overflow=skip_on_overflow)


@each("bad", [math.inf, -math.inf, math.nan])
@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("length", [1, 7, 64, 1000])
def test_trap_09_one_non_finite_element_anywhere_is_an_overflow(bad, dtype, length):
    for place in {0, length // 2, length - 1}:
        grad = torch.ones(length, dtype=dtype)
        grad[place] = bad
        verdict = verdict_of(torch.ones(3), grad, torch.zeros(2, 2))
        assert verdict.overflow.item() is True
        assert verdict.skip.item() == 1.0
        assert not math.isfinite(verdict.grad_norm.item())
        assert [math.isfinite(norm) for norm in verdict.norms.tolist()] == [True, False, True]


@each(
    ("values", "norm"),
    [
        ([1e30, 1e30], math.sqrt(2) * 1e30),  # a judge by FP32 squares would see inf
        ([60000.0] * 100, 600000.0),  # beyond FP16
        ([FLOAT32.max] * 2009, None),
        ([math.inf, -math.inf, 1.0], math.inf),  # a sum that cancels hides nothing
        ([math.nan, 0.0], math.nan),
        ([], 0.0),
    ],
)
def test_trap_12_norms_overflow_only_where_an_element_does(values, norm):
    verdict = verdict_of(torch.tensor(values))
    assert verdict.overflow.item() == (norm is not None and not math.isfinite(norm))
    if norm is not None:
        assert verdict.norms.tolist() == [pytest.approx(norm, rel=1e-6, nan_ok=True)]
    assert verdict.grad_norm.isfinite().item() != verdict.overflow.item()


@each("offenders", [1, 2, 100])
def test_trap_17_the_flag_is_one_however_many_offenders_there_are(offenders):
    verdict = verdict_of(*[torch.full((2,), math.inf)] * offenders, torch.ones(2))
    assert (verdict.skip.item(), verdict.skip.dtype, verdict.skip.shape) == (1.0, torch.float32, (1,))
    assert (~verdict.norms.isfinite()).sum() == offenders


def test_trap_15_an_overflow_is_seen_also_where_it_is_to_be_applied():
    verdict = verdict_of(torch.tensor([math.inf]), skip_on_overflow=False)
    assert verdict.overflow
    assert verdict.skip == 0


def test_trap_14_a_missing_gradient_hides_no_other():
    norms = torch.tensor([-1.0, 3.0, -1.0, 4.0], dtype=widest(CPU))
    assert judge(norms, ONE, skip_on_overflow=True).grad_norm == 5.0
    assert not judge(norms, ONE, skip_on_overflow=True).overflow
    for bad in (math.inf, math.nan):
        with_bad = torch.tensor([-1.0, bad, 4.0], dtype=widest(CPU))
        assert judge(with_bad, ONE, skip_on_overflow=True).skip == 1
    assert gradient_norms([]).shape == (0,)


LARGE = [(32768,), (32769,), (100_003,), (64, 64, 5, 5), (300, 400)]


def laid_out(values, layout):
    """The same numbers in another order of memory, or with gaps."""
    if layout == "channels_last":
        return values.to(memory_format=torch.channels_last) if values.ndim == 4 else values.clone()
    if layout == "transposed":
        return values.t().contiguous().t() if values.ndim == 2 else values.clone()
    if layout == "gaps":
        return torch.stack([values, values], dim=-1)[..., 0]
    return values.clone()


@each("layout", ["contiguous", "channels_last", "transposed", "gaps"])
@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each("shape", LARGE[1:])
def test_the_norm_of_a_large_gradient_is_the_root_of_the_sum_of_its_squares(shape, dtype, layout, fp64):
    values = laid_out(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), layout)
    small = torch.ones(3)
    assert gradient_norms([small, values, small])[1].item() == pytest.approx(
        math.sqrt(math.fsum(x * x for x in values.flatten().tolist())), rel=1e-12 if fp64 else 2.0**-22
    )


@each("shape", LARGE[1:])
@each("value", [math.inf, -math.inf, math.nan])
def test_one_bad_element_of_a_large_gradient_is_found_wherever_it_is(shape, value):
    for place in (0, 32767, 32768, -1):
        values = torch.ones(shape)
        values.view(-1)[place] = value
        for layout in ("contiguous", "channels_last", "transposed"):
            norms = verdict_of(torch.ones(1), laid_out(values, layout)).norms
            assert norms.isfinite().tolist() == [True, False]


@each("exponent", [-149, -140, -126, -76, -75, -63, 63, 64, 127])
def test_trap_12_no_square_leaves_the_range_in_a_large_gradient(exponent, fp64):
    if not fp64 and not -126 <= exponent <= 119:
        pytest.skip("norms are FP32")
    norm = gradient_norms([torch.full((65536,), 2.0**exponent)])
    assert norm.item() == 2.0 ** (exponent + 8)
    judged = judge(norm, ONE, skip_on_overflow=True)
    assert not judged.overflow
    assert judged.grad_norm.item() == 2.0 ** (exponent + 8)


@each("exponent", [0, 1, 16, 24, 60])
def test_powers_of_two_leave_the_unscaled_norm_its_bits(exponent, fp64):
    grad = torch.randn(1000)
    plain = verdict_of(grad).grad_norm
    scaled = verdict_of(grad * 2.0**exponent, scale=2.0**exponent).grad_norm
    assert torch.equal(plain, scaled)
    assert plain.item() == pytest.approx(grad.double().norm().item(), rel=1e-12 if fp64 else 2.0**-22)


def test_shapes_and_dtypes_are_as_documented():
    verdict = verdict_of(torch.ones(3), torch.ones(2, 2))
    assert (verdict.overflow.dtype, verdict.overflow.shape) == (torch.bool, (1,))
    assert (verdict.grad_norm.dtype, verdict.grad_norm.shape) == (widest(CPU), (1,))
    assert (verdict.norms.dtype, verdict.norms.shape) == (widest(CPU), (2,))


def test_the_arguments_are_left_as_they_were():
    norms, scale = torch.tensor([-1.0, math.nan], dtype=widest(CPU)), torch.tensor([2.0])
    judge(norms, scale, skip_on_overflow=True)
    assert norms[0] == -1.0
    assert scale == 2.0


@each("norm", [0.0, 1e-12, 0.5, 1.0, 2.0, 1e6, 1e30])
def test_the_clip_coefficient_is_torchs(norm, fp64):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=widest(CPU)))
    parameter.grad = torch.tensor([norm], dtype=widest(CPU))
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    coefficient = clip_coefficient(torch.tensor([norm], dtype=widest(CPU)), 1.0)
    assert coefficient.item() * norm == pytest.approx(parameter.grad.item(), rel=1e-15 if fp64 else 2.0**-23)
    assert coefficient <= 1.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_trap_21_a_non_finite_norm_clips_nothing(bad):
    assert clip_coefficient(torch.tensor([bad], dtype=widest(CPU)), 1.0).item() == 1.0


@each("norm", [0.0, 1.0, 1e30])
def test_trap_1_gradients_of_a_scale_that_fell_to_zero_are_refused(norm):
    verdict = judge(torch.tensor([norm, -1.0], dtype=widest(CPU)), torch.zeros(1), skip_on_overflow=True)
    assert verdict.overflow
    assert verdict.skip == 1


@each("layout", ["contiguous", "channels_last", "transposed", "gaps"])
@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_host_judges_as_the_device_does(dtype, layout, fp64):
    draw = torch.Generator().manual_seed(0)
    shapes = ((40, 8, 3, 3), *LARGE, (3,), (0,), (20_000,), (20_000,), ())
    grads = [laid_out(torch.randn(shape, generator=draw).to(dtype), layout) for shape in shapes]
    weights = [torch.empty_like(grad, dtype=torch.float32).contiguous() for grad in grads]
    for place in (0, 2, -1):
        weights[place] = weights[place].clone(memory_format=torch.preserve_format)
    judge_on_host, scale = HostJudge(weights), torch.tensor([8.0])
    for _ in range(2):
        expected = judge(gradient_norms(grads), scale, skip_on_overflow=True)
        found = judge_on_host(grads, scale)
        close = 1e-12 if fp64 else 2.0**-20
        assert found.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=close)
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            assert torch.equal(ours, theirs)
        assert (found.norms.shape, found.grad_norm.shape) == ((len(shapes),), (1,))
        grads = [grad * 3 for grad in grads]


@each("sizes", [(100_000,), (100_000, 90_000), (5,), (0,), (32768,)])
@each("threads", [1, 2])
def test_the_host_judges_few_tensors_of_any_size(sizes, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        grads = [torch.ones(size) for size in sizes]
        assert HostJudge(grads)(grads, ONE).grad_norm.item() == math.sqrt(sum(sizes))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("at", [0, 1])
def test_the_host_judges_gradients_of_weights_that_are_parts_of_others(at):
    """A place with the gaps of its weight would lie upon the next one, and hide what that holds."""
    weights = [torch.empty(6, 8)[:, :4], torch.empty(5), torch.empty(170, 400)[:, ::4]]
    grads = [torch.randn(weight.shape) for weight in weights]
    expected = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    assert HostJudge(weights)(grads, ONE).grad_norm.item() == pytest.approx(expected, rel=1e-12)
    grads[at].fill_(math.inf)
    assert HostJudge(weights)(grads, ONE) is None


@each("value", [math.inf, -math.inf, math.nan])
@each("size", [1, 5, 40_000, 70_000])
def test_the_host_leaves_what_is_not_finite_to_others(size, value):
    for place in {0, size // 2, size - 1}:
        grads = [torch.full((9,), 3e38), torch.full((50_000,), -3e38), torch.ones(size)]
        judge_on_host = HostJudge(grads)
        assert judge_on_host(grads, ONE) is not None
        grads[2][place] = value
        assert judge_on_host(grads, ONE) is None
        grads[2][place] = 1.0
        assert judge_on_host(grads, ONE) is not None


@each("layout", ["contiguous", "channels_last", "transposed", "gaps"])
def test_rows_of_fp32_are_within_their_bound(layout):
    draw = torch.Generator().manual_seed(0)
    for shape in ((40_000,), (100_003,), (64, 64, 5, 5), (300, 400)):
        normal = torch.randn(shape, generator=draw)
        for values in (normal, normal.exp() * 1e-3, torch.full(shape, 1 / 3), normal * 2.0 ** (normal * 12)):
            grads = [laid_out(values, layout), torch.ones(3)]
            right = HostJudge(grads)(grads, ONE).grad_norm.item()
            found = HostJudge(grads, exact=False)(grads, ONE).grad_norm.item()
            assert found == pytest.approx(right, rel=2.0**-16 if layout == "gaps" else 2.0**-22)


@each("exponent", [-149, -140, -126, -76, -75, -63, -40, -39, -38, -37, 55, 59, 60, 63, 64, 118, 127])
def test_rows_of_fp32_leave_to_fp64_what_leaves_their_range(exponent):
    """Squares vanish or overflow in FP32; a norm of 2^-30, below which they may count, is that of elements of 2^-38 here."""
    grads = [torch.full((65536,), 2.0**exponent)]
    found = HostJudge(grads, exact=False)(grads, ONE)
    assert found.grad_norm.item() == 2.0 ** (exponent + 8)
    assert found.known_finite
    grads[0][70] = math.inf
    assert HostJudge(grads, exact=False)(grads, ONE) is None


def test_small_elements_beside_large_ones_count_in_rows_of_fp32():
    grads = [torch.full((65536,), 2.0**-64), torch.full((40_000,), 2.0**-38)]
    for order in (grads, grads[::-1]):
        right = HostJudge(order)(order, ONE).grad_norm.item()
        assert HostJudge(order, exact=False)(order, ONE).grad_norm.item() == pytest.approx(right, rel=2.0**-22)


@each("scale", [0.0, math.inf, math.nan])
def test_the_host_leaves_a_scale_that_unscales_nothing_to_others(scale):
    grads = [torch.ones(5)]
    found = HostJudge(grads)(grads, torch.tensor([scale]))
    assert (found is None) == judge(gradient_norms(grads), torch.tensor([scale]), skip_on_overflow=True).overflow.item()


@each("elements", [1, 4095, 4096, 4097, 100_000, 4096 * 1024 + 5])
@each("factor", [2.0**-120, 1.0, 2.0**120])
def test_a_norm_in_fp32_is_that_of_fp64_within_its_bound(elements, factor):
    values = torch.rand(elements) * factor
    right = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    found = float32_norm(values)
    assert found.dtype == torch.float32
    if right < FLOAT32.max:
        assert found.item() == pytest.approx(right, rel=2.0**-22)
    else:
        assert found.item() == FLOAT32.max


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_in_fp32_of_half_gradients_loses_nothing_to_underflow(dtype):
    values = torch.full((5000,), torch.finfo(dtype).smallest_normal, dtype=dtype)
    assert float32_norm(values).item() == pytest.approx(values.double().norm().item(), rel=2.0**-22)


def test_a_norm_in_fp32_is_non_finite_exactly_where_an_element_is():
    largest = FLOAT32.max
    for values, right in (
        ([largest] * 9000, largest),
        ([largest, math.inf], math.inf),
        ([largest, -math.inf, math.nan], math.nan),
        ([0.0, math.nan], math.nan),
        ([0.0] * 5000, 0.0),
        ([], 0.0),
        ([1e-45], 1e-45),
    ):
        assert float32_norm(torch.tensor(values)).item() == pytest.approx(right, nan_ok=True)


@each("scale", [1e-30, 1.0, 2.0**24, 1e38])
def test_norms_near_the_ends_of_fp32_are_judged_without_fp64_as_with_it(scale):
    """A norm beyond FP32 stands as its largest number, and is no overflow."""
    for norms in ([FLOAT32.max] * 3, [FLOAT32.max, 1e-45], [1e-38, 1e-38], [3e38, -1.0], [0.0]):
        exact = math.sqrt(math.fsum(max(norm, 0.0) ** 2 for norm in norms)) / torch.tensor(scale).item()
        with without(fp64=False), NoFP64():
            verdict = judge(torch.tensor(norms), torch.tensor([scale]), skip_on_overflow=True)
        assert not verdict.overflow
        assert verdict.grad_norm.item() == pytest.approx(min(exact, FLOAT32.max), rel=2.0**-22, abs=2.0**-148)
