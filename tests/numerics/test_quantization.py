from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch

from mptrain.numerics.formats import (
    BFLOAT16,
    FLOAT4_E2M1,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    Format,
)
from mptrain.numerics.quantization import (
    RULES,
    hadamard,
    quantize,
    round_to,
    scale_floor,
    scale_two_levels,
    scale_up,
)
from mptrain.system.errors import UsageError
from tests.loops import each

NARROW = (FLOAT8_E4M3, FLOAT8_E5M2, FLOAT4_E2M1)
FORMATS = (*NARROW, FLOAT16, BFLOAT16)
#: The same formats by others.
OTHERS = {
    FLOAT8_E4M3: ml_dtypes.float8_e4m3fn,
    FLOAT8_E5M2: ml_dtypes.float8_e5m2,
    FLOAT4_E2M1: ml_dtypes.float4_e2m1fn,
    FLOAT16: np.float16,
    BFLOAT16: ml_dtypes.bfloat16,
}
ROLES = ("input", "weight", "gradient")


def values_of(fmt: Format) -> np.ndarray:
    """All values of a format in FP32, from its bits as ml_dtypes reads them."""
    codes = np.arange(1 << fmt.bits).astype(np.uint8 if fmt.bits <= 8 else np.uint16)
    return codes.view(OTHERS[fmt]).astype(np.float32)


def finite_of(fmt: Format) -> np.ndarray:
    """All finite values of a format, sorted, a zero of each sign among them."""
    values = values_of(fmt)
    return np.sort(values[np.isfinite(values)])


def numbers(fmt: Format, count: int, seed: int = 0) -> np.ndarray:
    """``count`` FP32 numbers within a format's range: two thirds random in all its binades and four below, with mantissas
    of any length, and one third the midpoints of two neighbours and their FP32 neighbours."""
    generator = np.random.default_rng(seed)
    edge = count // 3
    lowest = math.log2(fmt.smallest_subnormal) - 4
    size = 2 ** generator.uniform(lowest, math.log2(fmt.max), count - edge)
    short = (size.astype(np.float32).view(np.uint32) & 0xFFFFC000).view(np.float32)  # where ties are frequent
    size = np.where(generator.random(len(size)) < 0.5, size.astype(np.float32), short)
    sides = generator.choice(np.float32([-1, 1]), len(size))
    values = finite_of(fmt).astype(np.float64)
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    around = np.concatenate(
        [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    )
    return np.clip(np.concatenate([size * sides, generator.choice(around, edge)]), -fmt.max, fmt.max).astype(np.float32)


def same_bits(ours: torch.Tensor, theirs: np.ndarray | torch.Tensor) -> int:
    """Count elements that differ, the sign of zeros included."""
    other = torch.as_tensor(theirs)
    assert ours.dtype == other.dtype == torch.float32
    assert ours.shape == other.shape
    differ = ours.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)
    return int((differ & ~(ours.isnan() & other.isnan())).sum())


def wide(*shape: int, spread: float = 6.0, seed: int = 0) -> torch.Tensor:
    """Normal values times powers of two that differ by row and by 16 columns, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    groups = torch.randn(*shape[:-1], -(-shape[-1] // 16), generator=generator)
    scales = torch.exp2((groups * spread).round()).repeat_interleave(16, -1)[..., : shape[-1]]
    return values * scales * (torch.rand(shape, generator=generator) > 0.1)


# --- elements ---------------------------------------------------------------------------------------------------------


@each("fmt", FORMATS)
def test_every_value_of_a_format_is_itself(fmt):
    values = finite_of(fmt)
    assert len(values) == (1 << fmt.bits) - 2 * (
        0 if fmt is FLOAT4_E2M1 else 1 if fmt is FLOAT8_E4M3 else 1 << fmt.mantissa_bits
    )
    assert same_bits(round_to(torch.from_numpy(values), fmt), values) == 0


@each("fmt", FORMATS)
def test_rounding_is_that_of_ml_dtypes(fmt):
    values = numbers(fmt, 1_000_000)
    assert same_bits(round_to(torch.from_numpy(values), fmt), values.astype(OTHERS[fmt]).astype(np.float32)) == 0


def test_ties_of_e2m1_go_to_the_even_neighbour():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(ties, FLOAT4_E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]


@each("fmt", NARROW)
def test_narrow_formats_saturate_and_show_what_is_not_finite(fmt):
    largest = torch.finfo(torch.float32).max
    for value in (fmt.max, fmt.max * 1.01, 2 * fmt.max, 1e30, largest):
        assert round_to(torch.tensor([value, -value]), fmt).tolist() == [fmt.max, -fmt.max]
    assert round_to(torch.tensor([math.inf, -math.inf, math.nan]), fmt).isnan().all()


@each("fmt", (FLOAT16, BFLOAT16))
def test_formats_of_16_bits_overflow_as_torch_does(fmt):
    values = torch.tensor([65519.0, 65520.0, -65520.0, 3.4e38, math.inf, math.nan])
    assert same_bits(round_to(values, fmt), values.to(getattr(torch, fmt.name)).float()) == 0


@each("fmt", FORMATS)
def test_zeros_keep_their_sign_and_nothing_is_a_view_of_its_input(fmt):
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0])
    rounded = round_to(values, fmt)
    assert rounded.signbit().tolist() == [False, True, False, True, False]
    assert rounded.data_ptr() != values.data_ptr()
    assert values.tolist() == pytest.approx([0.0, -0.0, 1e-30, -1e-30, 1.0])


@each("fmt", NARROW)
def test_stochastic_rounding_is_unbiased(fmt):
    draws = 40_000
    exact = torch.tensor(
        [
            fmt.smallest_subnormal * 0.3,
            fmt.smallest_normal * 1.1,
            1.1,
            1.45,
            -2.7,
            fmt.max * 0.9,
            -fmt.smallest_subnormal / 64,
        ]
    )
    generator = torch.Generator().manual_seed(3)
    rounded = round_to(exact.expand(draws, -1), fmt, generator).double()
    error = rounded.std(0) / draws**0.5
    assert ((rounded.mean(0) - exact).abs() <= 4 * error).all()
    assert all(len(column.unique()) == 2 for column in rounded.unbind(1))
    assert np.isin(rounded.numpy(), finite_of(fmt)).all()


@each("fmt", NARROW)
def test_stochastic_rounding_keeps_what_is_exact_and_repeats_with_its_generator(fmt):
    values = torch.from_numpy(finite_of(fmt)).expand(2000, -1)
    assert same_bits(round_to(values, fmt, torch.Generator().manual_seed(0)), values) == 0
    others = torch.randn(1000)
    before = torch.get_rng_state()
    first, second = (round_to(others, fmt, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    beyond = torch.tensor([1.01, 1.4, 3.0, 1e9]).repeat(500) * fmt.max
    assert (round_to(beyond, fmt, torch.Generator()) == fmt.max).all()
    assert round_to(torch.tensor([math.inf, math.nan]), fmt, torch.Generator()).isnan().all()


def test_noise_never_reaches_the_next_value():
    largest = torch.tensor(15.0).expand(1 << 24)  # of its binade: noise of 24 bits would reach 16 eight times
    assert (round_to(largest, FLOAT8_E4M3, torch.Generator().manual_seed(0)) == 15).all()


def test_stochastic_rounding_to_16_bits_is_refused():
    with pytest.raises(UsageError, match="bfloat16"):
        round_to(torch.ones(1), BFLOAT16, torch.Generator())


# --- scales, against a plain reference --------------------------------------------------------------------------------


def nearest(exact: np.ndarray, fmt: Format) -> np.ndarray:
    """Round FP64 numbers by searching all values of a format, saturated."""
    values = np.unique(finite_of(fmt).astype(np.float64))
    exact = np.clip(exact, values[0], values[-1])
    above = np.clip(np.searchsorted(values, exact), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    with np.errstate(under="ignore"):
        even = (np.abs(high).astype(OTHERS[fmt]).view(np.uint8) & 1) == 0
    up = np.where(exact - low == high - exact, even, exact - low > high - exact)
    return np.where(up, high, low)


def by_hand(values: np.ndarray, name: str, dim: int, role: str, floor: float = 2.0**-9) -> np.ndarray:
    """Quantize a matrix block by block in FP64; the FP32 scales of two rules are rounded where they are FP32."""
    rule = RULES[name]
    fmt = rule.gradients if role == "gradient" else rule.elements
    matrix = (values if dim == 1 else values.T).astype(np.float64)
    across, along = rule.weight_block if role == "weight" else rule.block
    across, along = (matrix.shape[0] if across < 0 else across), (matrix.shape[1] if along < 0 else along)
    result = np.empty_like(matrix)
    whole = np.float32(np.abs(values).max()) / np.float32(448 * fmt.max)
    for row in range(0, matrix.shape[0], across):
        for column in range(0, matrix.shape[1], along):
            block = matrix[row : row + across, column : column + along]
            amax = np.abs(block).max()
            if name == "fp8_unscaled":
                stored = nearest(block, fmt)
            elif amax == 0:
                stored = block
            elif name == "fp8_tensor":
                encode = np.float32(fmt.max) / np.float32(amax)
                stored = nearest((block.astype(np.float32) * encode).astype(np.float64), fmt) * np.float64(1 / encode)
            elif name == "nvfp4":
                unrounded = np.float32(amax) / np.float32(fmt.max) / whole
                scale = np.float32(max(nearest(np.float64(unrounded)[None], FLOAT8_E4M3)[0], floor))
                encode = (1 / whole) / scale
                stored = nearest((block.astype(np.float32) * encode).astype(np.float64), fmt) * np.float64(
                    whole * scale
                )
            else:
                if name == "mxfp8_floor":
                    power = math.frexp(amax)[1] - 1 - fmt.max_exponent
                else:
                    least = 1e-12 if name == "fp8_row" else 0.0  # as torchao has it
                    fraction, power = math.frexp(max(amax, least) / fmt.max)
                    power -= fraction == 0.5
                power = max(power, -127)
                stored = nearest(block * 2.0**-power, fmt) * 2.0**power
            result[row : row + across, column : column + along] = np.copysign(stored, block)
    with np.errstate(over="ignore"):
        return (result if dim == 1 else result.T).astype(np.float32)


def quantized(values: torch.Tensor, name: str, dim: int, role: str, **changes) -> torch.Tensor:
    """Quantize with gradients rounded to nearest."""
    return quantize(values, replace(RULES[name], stochastic=False, **changes), dim=dim, operand=role)


SCALED = [name for name, rule in RULES.items() if rule.scale is not None]


@pytest.mark.parametrize("name", [*SCALED, "fp8_unscaled"])
def test_a_rule_quantizes_as_done_by_hand(name):
    for role in ROLES:
        for dim in (0, 1):
            for shape, spread in (((20, 300), 3.0), ((300, 20), 6.0), ((1, 7), 0.0), ((17, 1), 0.0)):
                values = wide(*shape, spread=spread, seed=dim)
                assert same_bits(quantized(values, name, dim, role), by_hand(values.numpy(), name, dim, role)) == 0


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block", "mxfp8", "mxfp8_floor", "mxfp4"])
def test_powers_of_two_are_right_at_the_ends_of_the_range_of_fp32(name):
    sizes = torch.exp2(torch.arange(-149.0, 128.0)).unsqueeze(1)
    values = torch.cat([sizes * factor for factor in (1.0, 1.75, 1.7500001, 1.9999999)]) * torch.rand(1, 32).clamp(
        min=0.1
    )
    values[:, 0] = values[:, 0].abs()
    assert values.isfinite().all()
    assert same_bits(quantized(values, name, 1, "input"), by_hand(values.numpy(), name, 1, "input")) == 0


def test_the_neighbours_of_a_power_of_two_have_scales_of_their_own():
    for exponent in (-100, -3, 0, 10, 100):
        exact = np.float32(448 * 2.0**exponent)
        amax = torch.tensor([np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(np.inf))])
        assert scale_up(amax, FLOAT8_E4M3)[1].tolist() == [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]
        exact = np.float32(2.0**exponent)
        amax = torch.tensor([np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(np.inf))])
        powers = [2.0 ** (exponent - 9), 2.0 ** (exponent - 8), 2.0 ** (exponent - 8)]
        assert scale_floor(amax, FLOAT8_E4M3)[1].tolist() == powers


def test_a_fifth_of_blocks_saturates_under_the_floor_and_none_if_rounded_up():
    values = torch.randn(20_000, 32) * torch.exp2(torch.rand(20_000, 1) * 8)
    amax = values.abs().amax(1, keepdim=True)
    encode, _ = scale_floor(amax, FLOAT8_E4M3)
    share = (amax * encode > 448).float().mean().item()
    assert share == pytest.approx(math.log2(2 / 1.75), abs=0.015)
    encode, _ = scale_up(amax, FLOAT8_E4M3)
    assert (amax * encode <= 448).all()
    assert (amax * encode > 224).all()


# --- against torchao --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_floor", "mxfp4", "mxfp4_floor"])
def test_microscaling_is_that_of_torchao(name):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    values = torch.cat([wide(200, 512, spread=spread) for spread in (0.0, 3.0, 15.0)])
    values[:, :32] *= 0.0
    scaling = mx.ScaleCalculationMode.FLOOR if "floor" in name else mx.ScaleCalculationMode.RCEIL
    theirs = mx.MXTensor.to_mx(values, torch.float4_e2m1fn_x2 if "4" in name else torch.float8_e4m3fn, 32, scaling)
    rule = replace(RULES["mxfp4"], scale=scale_floor) if name == "mxfp4_floor" else RULES[name]
    assert same_bits(quantize(values, rule, dim=1), theirs.dequantize().float()) == 0


@pytest.mark.long
def test_nvfp4_is_that_of_torchao_with_its_floor():
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    for spread, seed in ((0.0, 0), (3.0, 1), (8.0, 2)):
        values = wide(300, 512, spread=spread, seed=seed)
        scale = theirs.per_tensor_amax_to_scale(values.abs().max())
        other = theirs.NVFP4Tensor.to_nvfp4(values, per_tensor_scale=scale).dequantize()
        floor = partial(scale_two_levels, floor=FLOAT8_E4M3.smallest_normal)
        assert same_bits(quantized(values, "nvfp4", 1, "input", scale=floor), other) == 0
        differs = same_bits(quantized(values, "nvfp4", 1, "input"), other)
        assert (differs > 0) == (spread > 0)  # blocks with smaller scales than that floor


@pytest.mark.long
@pytest.mark.parametrize("rowwise", [True, False])
def test_rows_and_tensors_are_those_of_torchao(rowwise):
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    config = pytest.importorskip("torchao.float8.config").ScalingGranularity
    linear = pytest.importorskip("torchao.float8.float8_training_tensor").LinearMMConfig()
    values = wide(300, 500, spread=6.0)
    values[3] *= 1e-14  # an amax below what torchao's scales go down to
    values[4] = 0
    granularity = {"scaling_granularity": config.AXISWISE, "axiswise_dim": -1} if rowwise else {}
    theirs = scaling.hp_tensor_to_float8_dynamic(
        values, torch.float8_e4m3fn, linear, round_scales_to_power_of_2=rowwise, **granularity
    ).to_original_precision()
    ours = quantize(values, RULES["fp8_row" if rowwise else "fp8_tensor"], dim=1)
    if rowwise:
        assert same_bits(ours, theirs) == 0
    else:  # torchao divides by the scale, where hardware multiplies by its reciprocal
        torch.testing.assert_close(ours, theirs, rtol=2.0**-23, atol=0.0)


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALED)
def test_edges_of_every_rule(name):
    for role in ROLES:
        zeros = torch.tensor([0.0, -0.0]).repeat(20, 25)
        assert same_bits(quantized(zeros, name, 1, role), zeros) == 0
        equal = torch.full((33, 70), -1.75)
        assert torch.equal(quantized(equal, name, 1, role), by_hand_equal(equal, name, role))
        assert quantized(torch.empty(0, 5), name, 1, role).shape == (0, 5)
        assert quantized(torch.empty(3, 0), name, 1, role).shape == (3, 0)
        ragged = wide(33, 70)
        padded = torch.nn.functional.pad(ragged, (0, 512 - 70, 0, 512 - 33))
        assert same_bits(quantized(ragged, name, 1, role), quantized(padded, name, 1, role)[:33, :70]) == 0
        half = ragged.bfloat16()
        assert same_bits(quantized(half, name, 1, role), quantized(half.float(), name, 1, role)) == 0


def by_hand_equal(equal: torch.Tensor, name: str, role: str) -> torch.Tensor:
    return torch.from_numpy(by_hand(equal.numpy(), name, 1, role))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(name, bad):
    values = wide(300, 300, spread=1.0)
    values[5, 200] = bad
    for role in ROLES:
        whole = name in ("fp8_tensor", "nvfp4")
        across, along = RULES[name].weight_block if role == "weight" else RULES[name].block
        across, along = (300 if across < 0 or whole else across), (300 if along < 0 or whole else along)
        group = torch.zeros(300, 300, dtype=torch.bool)
        row, column = 5 // across * across, 200 // along * along
        group[row : row + across, column : column + along] = True
        result = quantized(values, name, 1, role)
        assert torch.equal(result.isnan(), group)
        assert result[~group].isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_the_layout_in_memory_and_the_sign_of_a_dimension_change_nothing(name):
    values = wide(48, 80)
    for role in ROLES:
        expected = quantized(values, name, 0, role)
        assert same_bits(quantized(values.t().contiguous().t(), name, -2, role), expected) == 0
        assert same_bits(quantized(values.t(), name, 1, role).t(), expected) == 0
        assert same_bits(quantized(values.repeat(2, 3)[:48, :80], name, 0, role), expected) == 0
        if role != "weight":  # rows of a batch
            assert (
                same_bits(quantized(values.t().reshape(4, 20, 48), name, -1, role).reshape(80, 48).t(), expected) == 0
            )
    images = wide(2, 48, 6, 5)
    flat = images.movedim(1, -1).reshape(-1, 48)
    expected = quantized(flat, name, 1, "input")
    channels_last = images.contiguous(memory_format=torch.channels_last)
    assert same_bits(quantized(channels_last, name, 1, "input").movedim(1, -1).reshape(-1, 48), expected) == 0


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4", "fp8_tensor"])
def test_square_blocks_make_a_weight_the_same_in_both_directions(name):
    weight = wide(200, 300)
    assert same_bits(quantized(weight, name, 0, "weight"), quantized(weight, name, 1, "weight")) == 0


def test_blocks_of_a_row_make_a_weight_differ_in_both_directions():
    weight = wide(200, 300)
    assert same_bits(quantized(weight, "mxfp8", 0, "weight"), quantized(weight, "mxfp8", 1, "weight")) > 100


@pytest.mark.parametrize(
    "name", [*(name for name in SCALED if name not in ("fp8_tensor", "nvfp4")), "fp8_unscaled", "bf16"]
)
def test_what_a_rule_with_powers_of_two_stores_is_exact_in_bf16_and_is_stored_again(name):
    for role in ROLES:
        once = quantized(wide(64, 256), name, 1, role)
        assert torch.equal(once.bfloat16().float(), once)
        assert torch.equal(quantized(once, name, 1, role), once)


def test_gradients_have_the_format_and_the_rounding_of_their_rule():
    values = wide(64, 128, spread=0.0)
    rule = RULES["fp8_tensor"]
    as_input = replace(rule, elements=FLOAT8_E5M2)
    assert torch.equal(quantize(values, rule, dim=1, operand="gradient"), quantize(values, as_input, dim=1))
    assert not torch.equal(quantize(values, rule, dim=1, operand="gradient"), quantize(values, rule, dim=1))
    rule, generator = RULES["nvfp4"], torch.Generator().manual_seed(0)
    draws = torch.stack([quantize(values, rule, dim=1, operand="gradient", generator=generator) for _ in range(400)])
    low, high = draws.amin(0), draws.amax(0)
    up = (draws > (low + high) / 2).double().mean(0)
    largest = values.abs().unflatten(1, (8, 16)).amax(2).repeat_interleave(16, 1)
    clear = (up > 0.03) & (up < 0.97) & (values.abs() < 0.93 * largest)  # the largest may saturate
    deviation = ((low + up * (high - low) - values) / ((up * (1 - up) / 400).sqrt() * (high - low)))[clear]
    assert clear.double().mean() > 0.7
    assert deviation.abs().max() < 6
    assert deviation.mean().abs() < 0.05
    assert torch.equal(quantize(values, rule, dim=1, generator=generator), quantize(values, rule, dim=1))
    with pytest.raises(UsageError, match="generator"):
        quantize(values, rule, dim=1, operand="gradient")


def test_what_has_no_meaning_is_refused():
    with pytest.raises(UsageError, match="128 rows in a tensor of 3"):
        quantize(torch.ones(2, 3, 4), RULES["fp8_block"], dim=2, operand="weight")
    for shape, dim in (((2, 3), 2), ((2, 3), -3), ((), 0)):
        with pytest.raises(IndexError):
            quantize(torch.ones(shape), RULES["mxfp8"], dim=dim)


@pytest.mark.parametrize("name", RULES)
def test_no_value_is_read_on_the_host_and_no_gradient_passes(name):
    for role in ROLES:
        for shape in ((64, 100), (33, 0)):
            values = torch.empty(shape, device="meta", requires_grad=True)
            result = quantized(values, name, 1, role)
            assert (result.shape, result.dtype, result.requires_grad) == (values.shape, torch.float32, False)
    assert round_to(torch.empty(5, device="meta"), FLOAT8_E4M3, torch.Generator()).is_meta
    assert hadamard(torch.empty(5, 33, device="meta"), 1).shape == (5, 48)


# --- Hadamard transform -----------------------------------------------------------------------------------------------


def test_the_hadamard_transform_is_the_matrix_with_its_signs():
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    matrix = torch.ones(1, 1)
    while len(matrix) < 16:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    expected = torch.tensor(signs).unsqueeze(1) * matrix / 4
    torch.testing.assert_close(expected @ expected.t(), torch.eye(16))
    assert torch.equal(hadamard(torch.eye(16), 1), expected)
    assert torch.equal(hadamard(torch.eye(16), 0), expected.t())
    values = wide(5, 3, 40)
    padded = torch.nn.functional.pad(values, (0, 8)).unflatten(-1, (3, 16))
    torch.testing.assert_close(hadamard(values, -1), (padded @ expected).flatten(-2), rtol=1e-5, atol=1e-5)


def test_a_product_is_unchanged_by_the_hadamard_transform_of_both_operands():
    inputs, gradients = torch.randn(50, 7), torch.randn(50, 9)
    product = hadamard(gradients, 0).t() @ hadamard(inputs, 0)
    torch.testing.assert_close(product, gradients.t() @ inputs, rtol=1e-4, atol=1e-4)
