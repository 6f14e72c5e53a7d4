"""Emulated quantization: FP32 values rounded to formats of 16, 8 and 4 bits under the scaling rules of the field.

A rule says in which format the operands of a product are stored, which values share a scale, and how the scale follows
from the largest magnitude among them (amax). `quantize` returns the values that are stored, in FP32: multiplied in
FP32, they give what hardware for that format gives, but for the order and precision of its sums.

    values -> |values| * encode -> rounded to the format, saturated -> * decode, with the sign of the values

Where scales are powers of two, the result is exactly what format and scales represent. FP32 scales (`fp8_tensor`,
`nvfp4`) have more bits, so the result is that rounded to FP32.

Nothing is read on the host, and no value decides what is computed. A group of values that share a scale becomes NaN if
a value in it is not finite, and so does an infinity without a scale. Hardware saturates it instead, and the overflow is
no longer seen.

Sources: Micikevicius et al. 2022 (FP8, arXiv 2209.05433); OCP Microscaling Formats v1.0, and Rouhani et al. 2023 (MX,
2310.10537); DeepSeek-AI 2024 (blocks, 2412.19437); Mishra et al. 2025 (MXFP8, 2506.08027); NVIDIA 2025 (NVFP4,
2509.25149); torchao 0.18 and TransformerEngine 2.20, where these leave a choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from mptrain.numerics.formats import BFLOAT16, FLOAT4_E2M1, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, Format
from mptrain.system.errors import UsageError

#: Operand of a product: the input of a layer, its weight, or the gradient of its output.
Operand = Literal["input", "weight", "gradient"]

#: Function of the amax of each group of values (FP32) and the format, which returns what the values are multiplied by
#: before rounding, and what after it: FP32, of the shape of amax. Where amax is not finite, their product is NaN.
Scale = Callable[[Tensor, Format], tuple[Tensor, Tensor]]

#: As a size of a `Rule.block`: the whole extent.
WHOLE = -1

#: Bits of the exponent of an FP32 number.
_EXPONENT = 0x7F800000

#: Bound of the bias of stochastic rounding, in distances of two neighbours: the last bit of FP32 numbers from 8 to 16,
#: below which every value is if measured in such distances.
_BIAS = 2.0**-20

#: Values that a Hadamard transform mixes, and as bits which of them change sign before it: TransformerEngine's.
_HADAMARD = 16
_SIGNS = 0b1101_0111_1110_1000


@dataclass(frozen=True)
class Rule:
    """Quantization of the operands of a product: formats, groups of values that share a scale, and how it is chosen.

    Attributes:
        source: Publication or program that defines it.
        elements: Format of inputs and weights.
        gradients: Format of gradients.
        scale: Scale from amax; None for no scale.
        block: Extent of a group across the reduction of the product and along it; `WHOLE` for all.
        weight_block: The same of weights.
        stochastic: Gradients are rounded stochastically.
        hadamard: Both operands of the weight gradient are to be transformed by `hadamard` first.
    """

    source: str
    elements: Format
    gradients: Format
    scale: Scale | None = None
    block: tuple[int, int] = (WHOLE, WHOLE)
    weight_block: tuple[int, int] = (WHOLE, WHOLE)
    stochastic: bool = False
    hadamard: bool = False

    @property
    def results(self) -> Format | None:
        """Format in which results of products are stored: that of 16 bits, or None for FP32."""
        return self.elements if self.elements in (FLOAT16, BFLOAT16) else None


def quantize(
    values: Tensor,
    rule: Rule,
    *,
    dim: int,
    across: int | None = None,
    operand: Operand = "input",
    generator: Generator | None = None,
) -> Tensor:
    """Return an operand of a product as a rule stores it: float32 of the same shape, in new memory.

    A last block that is shorter than the others has its own scale, like one filled up with zeros. A value near the end
    of FP32's range may be rounded to infinity.

    Args:
        values: The operand, float32 or narrower, of any shape.
        rule: The rule.
        dim: Dimension that the product sums over.
        across: Dimension over which blocks of several rows extend; None for the other one of a matrix.
        operand: Which operand it is.
        generator: Source of the random bits of stochastic rounding, on the device of ``values``.

    Raises:
        UsageError: The rule rounds stochastically and has no generator, or has square blocks and no matrix.
        IndexError: There is no such dimension.
    """
    fmt = rule.gradients if operand == "gradient" else rule.elements
    noise = generator if rule.stochastic and operand == "gradient" else None
    if rule.stochastic and operand == "gradient" and generator is None:
        raise UsageError("stochastic rounding of gradients without a generator", "give quantize a torch.Generator")
    if rule.scale is None or not values.numel():
        return round_to(values, fmt, noise)
    rows, along = rule.weight_block if operand == "weight" else rule.block
    reduction, shape = range(values.ndim)[dim], values.shape
    sizes = [rows if rows == WHOLE else 1] * values.ndim
    if rows > 1:
        if across is None and values.ndim != 2:
            what = f"blocks of {rows} rows in a tensor of {values.ndim} dimensions"
            raise UsageError(what, "say across which dimension they extend")
        sizes[1 - reduction if across is None else across] = rows
    sizes[reduction] = along
    sizes = [length if size == WHOLE or size > length else size for size, length in zip(sizes, shape, strict=True)]
    values = values.detach().float()
    magnitudes = _padded(values.abs(), sizes)
    padded = magnitudes.shape
    # Every dimension becomes two, the number of a block and the number in it, so that values of any layout stay there.
    blocks = magnitudes.view([part for size, n in zip(sizes, padded, strict=True) for part in (n // size, size)])
    amax = blocks
    for each, size in enumerate(sizes):  # rows first, which leaves fewer values of neighbours, the slow part on a CPU
        amax = amax if size == 1 else amax.amax(2 * each + 1, keepdim=True)
    encode, decode = rule.scale(amax, fmt)
    _round_saturated(blocks.mul_(encode), fmt, noise).mul_(decode)
    return magnitudes[tuple(slice(length) for length in shape)].copysign_(values)


def round_to(values: Tensor, fmt: Format, generator: Generator | None = None) -> Tensor:
    """Return values rounded to a format, to nearest with ties to even; float32 of the same shape, in new memory.

    Zeros keep their sign, and NaN stays. Formats of 16 bits overflow to infinity, as torch's conversion. In those of 8
    and 4 bits, finite values saturate at the largest, in E5M2 too, and infinities become NaN, which a conversion of
    torch makes finite in some versions.

    Args:
        values: float32 or narrower.
        fmt: The format.
        generator: Rounds stochastically, with its random bits and a bias below 2^-20 of the distance of two
            neighbours; for formats of 8 and 4 bits alone.

    Raises:
        UsageError: Stochastic rounding to a format of 16 bits, which `mptrain.numerics.rounding` has for BF16.
    """
    values = values.detach().float()
    if fmt in (FLOAT16, BFLOAT16):
        if generator is not None:
            raise UsageError(f"stochastic rounding to {fmt.name} is not among its formats", "use 8 or 4 bits")
        return values.to(getattr(torch, fmt.name)).to(torch.float32, copy=True)
    # Adding 0 times the values makes NaN of an infinity in one pass; comparing and selecting took longer than rounding.
    return _round_saturated(values.abs(), fmt, generator).add_(values, alpha=0.0).copysign_(values)


def _round_saturated(magnitudes: Tensor, fmt: Format, generator: Generator | None) -> Tensor:
    """Round magnitudes to a format of at most 8 bits in place, at most to its largest value, and return them.

    The distance of two neighbours in the format follows from the exponent of a value, but not below that of subnormal
    numbers. Adding and subtracting a power of two, 2^23 times that distance, rounds as FP32 itself: to nearest, ties to
    even. On a CPU, this took 1.0 ns an element and torch's conversion to E4M3 and back 3.8.
    """
    power = magnitudes.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    power = power.clamp_(fmt.smallest_normal, 2.0**fmt.max_exponent)
    if generator is None:
        power.mul_(2.0**FLOAT32.mantissa_bits * fmt.epsilon)
        return magnitudes.add_(power).sub_(power).clamp_(max=fmt.max)
    # A value of the format is an integer here, and stays what it is: its sum with the noise is below the next integer.
    noise = torch.empty_like(magnitudes).uniform_(0.0, 1 - _BIAS, generator=generator)
    power.mul_(fmt.epsilon)
    return magnitudes.div_(power).add_(noise).floor_().mul_(power).clamp_(max=fmt.max)


def _padded(values: Tensor, sizes: list[int]) -> Tensor:
    """Return values with zeros added up to a multiple of ``sizes`` in each dimension; the same if they have that."""
    missing = [-length % size for size, length in zip(sizes, values.shape, strict=True)]
    if missing == [0] * len(sizes):
        return values
    return F.pad(values, [part for each in reversed(missing) for part in (0, each)])


# Divisors below are tensors: with a number on either side, torch multiplies by a rounded reciprocal, on a CPU if it is
# on the left and on CUDA if it is on the right.


def scale_exact(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the FP32 scales max / amax, at which amax becomes the largest value, and their reciprocals.

    An amax of 0, or so small that the quotient overflows, has the largest FP32 number, as in TransformerEngine.
    """
    encode = (amax.new_full((), fmt.max) / amax).clamp_(max=FLOAT32.max)
    return encode, encode.reciprocal()


def scale_up(amax: Tensor, fmt: Format, *, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return power-of-two scales for which 2^ceil(log2(amax / max)) is stored, so that nothing saturates.

    Programs that call the factor before rounding the scale round it down. The exponent has the range of E8M0, -127 to
    127.

    Args:
        amax: Largest magnitude of each group.
        fmt: The format.
        least: Lower bound of amax.
    """
    amax = amax.clamp(min=least)
    _, decode = scale_floor(amax, fmt)
    decode = torch.where(decode * fmt.max < amax, decode * 2, decode)
    return decode.reciprocal(), decode


def scale_floor(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return power-of-two scales for which 2^(floor(log2 amax) - emax) is stored, as OCP MX v1.0 has it.

    The largest values of a group may saturate: in E4M3, those above 1.75 times a power of two. The exponent has the
    range of E8M0.
    """
    # From bits, because the logarithm of the number below a power of two is rounded to an integer; and twice the scale,
    # because the smallest, 2^-127, is no normal number.
    twice = (amax * 2.0 ** (1 - fmt.max_exponent)).clamp_(min=FLOAT32.smallest_normal)
    decode = twice.view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32).mul_(0.5)
    return decode.reciprocal(), decode


def scale_two_levels(
    amax: Tensor, fmt: Format, *, floor: float = FLOAT8_E4M3.smallest_subnormal
) -> tuple[Tensor, Tensor]:
    """Return scales in two levels (NVFP4): an E4M3 number for each block, times an FP32 number for the tensor.

    The latter is the amax of all / (448 * max), so that the largest E4M3 number belongs to the block with the largest
    magnitude. The order of operations is torchao's; TransformerEngine's may differ in the last bit of a scale.

    Args:
        amax: Largest magnitude of each block.
        fmt: The format.
        floor: Smallest scale of a block: the smallest subnormal E4M3 number, or the smallest normal one, as torchao's
            NVFP4Tensor has it. TransformerEngine has none: blocks below half the former are zeros.
    """
    # From 2^-112 on, the reciprocal of the smallest scale is an FP32 number.
    tensor = (amax.amax() / amax.new_full((), FLOAT8_E4M3.max * fmt.max)).clamp_(min=2.0**-112)
    block = round_to(amax / amax.new_full((), fmt.max) / tensor, FLOAT8_E4M3).clamp_(min=floor)
    return tensor.reciprocal() / block, tensor * block


def hadamard(values: Tensor, dim: int) -> Tensor:
    """Return values with each 16 along a dimension multiplied by S H / 4: fixed signs S, the Hadamard matrix H of 16.

    Outliers spread over their 16. A product that sums over the dimension is unchanged if both operands are transformed.
    The dimension is filled up with zeros to a multiple of 16. The result is float32.

    Sums and differences instead of a product of matrices, which devices may compute in TF32 and autocast in BF16.
    """
    dim = range(values.ndim)[dim]
    padded = _padded(values.detach().float(), [_HADAMARD if each == dim else 1 for each in range(values.ndim)])
    number = torch.arange(_HADAMARD, device=values.device)
    signs = 1.0 - 2.0 * (_SIGNS >> number & 1)
    # The 16 as the slowest dimension in memory: otherwise, sums of so few neighbours take three times as long.
    groups = padded.unflatten(dim, (-1, _HADAMARD)).movedim(dim + 1, -1)
    mixed = (groups * (signs / 4)).movedim(-1, 0).contiguous()
    for _ in range(4):
        first, second = mixed.unflatten(0, (2, -1)).unbind()
        mixed = torch.stack([first + second, first - second], 1).flatten(0, 1)
    transformed: Tensor = mixed.movedim(0, dim + 1).flatten(dim, dim + 1)
    return transformed


def _plain(fmt: Format, source: str) -> Rule:
    return Rule(source, fmt, fmt)


def _microscaling(fmt: Format, scale: Scale, source: str) -> Rule:
    return Rule(source, fmt, fmt, scale, block=(1, 32), weight_block=(1, 32))


#: Operands with one bit less than FP32, which changes a gradient as rounding in FP32 does.
FINE = _plain(Format("float31", exponent_bits=8, mantissa_bits=22), "none: for comparison")

#: Rules by name.
RULES = {
    "fp16": _plain(FLOAT16, "IEEE 754; the loss scale is applied elsewhere"),
    "bf16": _plain(BFLOAT16, "Kalamkar et al. 2019, arXiv 1905.12322"),
    "fp8_unscaled": _plain(FLOAT8_E4M3, "arXiv 2209.05433 without its scales: what fails"),
    "fp8_tensor": Rule(
        "TransformerEngine, Float8CurrentScaling with Format.HYBRID", FLOAT8_E4M3, FLOAT8_E5M2, scale_exact
    ),
    "fp8_row": Rule(
        "torchao, recipe rowwise of torchao.float8",
        *(FLOAT8_E4M3, FLOAT8_E4M3, partial(scale_up, least=1e-12)),
        block=(1, WHOLE),
        weight_block=(1, WHOLE),
    ),
    "fp8_block": Rule(
        "DeepSeek-V3, arXiv 2412.19437; powers of two throughout as in TransformerEngine's Float8BlockScaling",
        *(FLOAT8_E4M3, FLOAT8_E4M3, scale_up),
        block=(1, 128),
        weight_block=(128, 128),
    ),
    "mxfp8": _microscaling(FLOAT8_E4M3, scale_up, "arXiv 2506.08027: MXFP8, scales rounded up as in cuBLAS"),
    "mxfp8_floor": _microscaling(FLOAT8_E4M3, scale_floor, "OCP Microscaling Formats v1.0, section 6.3"),
    "mxfp4": _microscaling(FLOAT4_E2M1, scale_up, "OCP Microscaling Formats v1.0, scales rounded up as in mxfp8"),
    "nvfp4": Rule(
        "arXiv 2509.25149; TransformerEngine, NVFP4BlockScaling",
        *(FLOAT4_E2M1, FLOAT4_E2M1, scale_two_levels),
        block=(1, 16),
        weight_block=(16, 16),
        stochastic=True,
        hadamard=True,
    ),
}
