"""Triton kernels for optimizer updates and gradient norms: one launch processes a list of tensors, passed by address.

Importing this module imports Triton, so only `mptrain.optimizer.multi_tensor` does it, at the first launch.

A program processes one *block* of one tensor in one of two ways: a full block of tensors aligned to 16 bytes with wide
instructions and no mask; any other block element by element with a mask. So tensors need not be aligned, and an
unaligned tensor does not slow down the others. BF16 is read and written as integers, which is exact wherever Triton
runs, including its interpreter.
"""
# mypy: disallow-untyped-decorators=False
# No `from __future__ import annotations` here: Triton reads annotations as values.

import torch
import triton
import triton.language as tl

from mptrain.optimizer.gradient_table import DTYPE_CODES

FLOAT16 = tl.constexpr(DTYPE_CODES[torch.float16])  # dtype codes in the tables; 0 means no tensor
BFLOAT16 = tl.constexpr(DTYPE_CODES[torch.bfloat16])
FLOAT32 = tl.constexpr(DTYPE_CODES[torch.float32])


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["gradients", "lr", "step", "grad_scale", "skip"],
)
def update(
    blocks: tl.tensor,
    tensors: tl.tensor,
    gradients: tl.tensor,
    decays: tl.tensor,
    constants: tl.tensor,
    lr: tl.tensor,
    step: tl.tensor,
    grad_scale: tl.tensor,
    skip: tl.tensor,
    count: tl.tensor,
    rule: tl.constexpr,
    momentum: tl.constexpr,
    nesterov: tl.constexpr,
    decaying: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Triton kernel that unscales, updates and rounds P weights in place, with one program for each block of elements.

    Args:
        blocks: int32, shape (programs, 2): index of the tensor, number of its block.
        tensors: int64, shape (6, P): addresses of weight, first state, second state (0 for none) and rounded weight;
            dtype of the rounded weight; number of elements.
        gradients: int64, shape (2, P): addresses and dtype codes of the gradients.
        decays: float32, shape (P,): weight decay.
        constants: float64, shape (9,): momentum or eps; the upper part, lower part and complement to 1 of each beta;
            log2 of the betas. Unused constants are absent.
        lr: float32, shape (1,): learning rate.
        step: float32, shape (1,): number of the update, from 1.
        grad_scale: float32, shape (1,): divisor of the gradients.
        skip: float32, shape (1,): 1 makes every program return at once.
        count: Number P of weights.
        rule: Update rule: ``sgd``, ``adam``, ``adamw`` or ``adagrad``.
        momentum: Whether SGD has a momentum buffer.
        nesterov: Whether SGD uses Nesterov momentum.
        decaying: Whether any weight decay is nonzero.
        block: Number of elements of a block.
    """
    if tl.load(skip) == 1.0:
        return
    program = tl.program_id(0).to(tl.int64)
    index = tl.load(blocks + 2 * program)
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * block
    weight_at = tl.load(tensors + index)
    first_at = tl.load(tensors + count + index)
    second_at = tl.load(tensors + 2 * count + index)
    rounded_at = tl.load(tensors + 3 * count + index)
    rounded_dtype = tl.load(tensors + 4 * count + index)
    left = tl.load(tensors + 5 * count + index) - start
    gradient_at = tl.load(gradients + index)
    gradient_dtype = tl.load(gradients + count + index)
    decay = tl.load(decays + index)
    divisor = tl.load(grad_scale)
    rate = tl.load(lr)
    root = rate
    if rule == "adam" or rule == "adamw":
        # In FP64, as in torch: 1 - 0.999^step is too inaccurate in FP32.
        taken = tl.load(step).to(tl.float64)
        decay = decay * rate if rule == "adamw" else decay
        rate = tl.div_rn(rate, (1.0 - tl.exp2(taken * tl.load(constants + 7))).to(tl.float32))
        root = tl.sqrt_rn((1.0 - tl.exp2(taken * tl.load(constants + 8))).to(tl.float32))
    wide = (left >= block) & (((weight_at | first_at | second_at | rounded_at | gradient_at) & 15) == 0)
    if wide:
        _update_block(
            weight_at, first_at, second_at, rounded_at, rounded_dtype, gradient_at, gradient_dtype, start, left,
            decay, constants, divisor, rate, root, rule, momentum, nesterov, decaying, block, 4,
        )  # fmt: skip
    else:
        _update_block(
            weight_at, first_at, second_at, rounded_at, rounded_dtype, gradient_at, gradient_dtype, start, left,
            decay, constants, divisor, rate, root, rule, momentum, nesterov, decaying, block, 0,
        )  # fmt: skip


@triton.jit
def _update_block(
    weight_at: tl.tensor,
    first_at: tl.tensor,
    second_at: tl.tensor,
    rounded_at: tl.tensor,
    rounded_dtype: tl.tensor,
    gradient_at: tl.tensor,
    gradient_dtype: tl.tensor,
    start: tl.tensor,
    left: tl.tensor,
    decay: tl.tensor,
    constants: tl.tensor,
    divisor: tl.tensor,
    rate: tl.tensor,
    root: tl.tensor,
    rule: tl.constexpr,
    momentum: tl.constexpr,
    nesterov: tl.constexpr,
    decaying: tl.constexpr,
    block: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """Update the elements of a block from ``start`` on; ``left`` elements remain in the tensor.

    Bias corrections are in ``rate`` and ``root``. AdamW's ``decay`` already includes the learning rate.
    """
    lanes = tl.arange(0, block)
    weight = _load(weight_at, start, lanes, left, tl.float32, wide)
    if rule != "sgd" or momentum:
        first = _load(first_at, start, lanes, left, tl.float32, wide)
    if rule == "adam" or rule == "adamw":
        second = _load(second_at, start, lanes, left, tl.float32, wide)
    # Load the gradient last: loads after its branches would not be issued until the branches are resolved.
    if gradient_dtype == FLOAT32:
        grad = _load(gradient_at, start, lanes, left, tl.float32, wide)
    elif gradient_dtype == FLOAT16:
        grad = _load(gradient_at, start, lanes, left, tl.float16, wide).to(tl.float32)
    else:
        grad = _load_bfloat16(gradient_at, start, lanes, left, wide)

    grad = tl.div_rn(grad, divisor)
    if decaying and rule != "adamw":
        grad = tl.where(decay != 0, grad + decay * weight, grad)  # 0 times an infinite weight would be NaN
    if rule == "sgd":
        if momentum:
            kept = tl.load(constants).to(tl.float32)
            first = kept * first + grad
            grad = grad + kept * first if nesterov else first
            _store(first_at, start, lanes, left, first, tl.float32, wide)
        weight = weight - rate * grad
    elif rule == "adagrad":
        first = first + grad * grad
        _store(first_at, start, lanes, left, first, tl.float32, wide)
        weight = weight - tl.div_rn(rate * grad, tl.sqrt_rn(first) + tl.load(constants).to(tl.float32))
    else:
        first = _moment(first, grad, constants + 1, 1.0)
        second = _moment(second, grad, constants + 4, grad)
        _store(first_at, start, lanes, left, first, tl.float32, wide)
        _store(second_at, start, lanes, left, second, tl.float32, wide)
        eps = tl.load(constants).to(tl.float32)
        change = tl.div_rn(rate * first, tl.div_rn(tl.sqrt_rn(second), root) + eps)
        if decaying and rule == "adamw":
            change = tl.where(decay != 0, change + decay * weight, change)
        weight = weight - change
    _store(weight_at, start, lanes, left, weight, tl.float32, wide)
    _store_rounded(rounded_at, rounded_dtype, start, lanes, left, weight, wide)


@triton.jit
def _moment(old: tl.tensor, grad: tl.tensor, constants: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return the moving average ``beta old + (1 - beta) grad factor``.

    A beta is the sum of two positive FP32 numbers, so that an infinite moment stays infinite. A single FP32 number
    would be off by 1e-5 of 1 - 0.999, with the same sign in every step. The result is rounded once, because two
    roundings would lose the lower part of beta in every step.
    """
    upper = tl.load(constants).to(tl.float32)
    lower = tl.load(constants + 1).to(tl.float32)
    complement = tl.load(constants + 2).to(tl.float32)
    return tl.fma(upper, old, lower * old + complement * grad * factor)


@triton.jit
def _pointers(
    address: tl.tensor, start: tl.tensor, lanes: tl.tensor, dtype: tl.constexpr, wide: tl.constexpr
) -> tl.tensor:
    """Return pointers to elements ``start + lanes`` of the tensor at an address.

    A nonzero ``wide`` is the number of elements that one instruction moves; Triton is told of the alignment. ``wide``
    should be the same for all tensors of a block, or elements would change threads between load and store.
    """
    base = address.to(tl.pointer_type(dtype))
    if wide:
        base = tl.multiple_of(base, wide * dtype.primitive_bitwidth // 8)
    return base + start + lanes


@triton.jit
def _load(
    address: tl.tensor,
    start: tl.tensor,
    lanes: tl.tensor,
    left: tl.tensor,
    dtype: tl.constexpr,
    wide: tl.constexpr,
) -> tl.tensor:
    """Load elements ``start + lanes``; lanes from ``left`` on give zeros, which is possible only with ``wide`` 0."""
    pointers = _pointers(address, start, lanes, dtype, wide)
    return tl.load(pointers) if wide else tl.load(pointers, mask=lanes < left, other=0)


@triton.jit
def _store(
    address: tl.tensor,
    start: tl.tensor,
    lanes: tl.tensor,
    left: tl.tensor,
    values: tl.tensor,
    dtype: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """Store elements ``start + lanes``; lanes from ``left`` on are skipped, which is possible only with ``wide`` 0."""
    pointers = _pointers(address, start, lanes, dtype, wide)
    if wide:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=lanes < left)


@triton.jit
def _load_bfloat16(
    address: tl.tensor, start: tl.tensor, lanes: tl.tensor, left: tl.tensor, wide: tl.constexpr
) -> tl.tensor:
    """Load BF16 elements as FP32, whose upper 16 bits they are."""
    bits = _load(address, start, lanes, left, tl.uint16, wide)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_rounded(
    address: tl.tensor,
    dtype: tl.tensor,
    start: tl.tensor,
    lanes: tl.tensor,
    left: tl.tensor,
    values: tl.tensor,
    wide: tl.constexpr,
) -> None:
    """Store FP32 values as FP16 (saturating at 65504), as BF16, or not at all; rounded to even, NaN stays NaN."""
    if dtype == FLOAT16:
        limited = tl.where(values > 65504.0, 65504.0, values)  # comparisons are false for NaN, which is kept
        limited = tl.where(limited < -65504.0, -65504.0, limited)
        _store(address, start, lanes, left, limited.to(tl.float16), tl.float16, wide)
    elif dtype == BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(values == values, nearest, 0x7FC0)
        _store(address, start, lanes, left, nearest.to(tl.uint16), tl.uint16, wide)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["gradients"])
def partial_squares(
    blocks: tl.tensor,
    numels: tl.tensor,
    gradients: tl.tensor,
    partials: tl.tensor,
    count: tl.tensor,
    block: tl.constexpr,
    rounds: tl.constexpr,
) -> None:
    """Triton kernel that sums the squares of each chunk of ``block * rounds`` gradient elements, one program per chunk.

    FP16 values are squared exactly in FP32, where ``rounds`` squares are added; the remaining sums are in FP64. Squares
    of BF16 and FP32 values could overflow FP32, so they are computed in FP64.

    Args:
        blocks: int32, shape (programs, 2): index of the gradient, number of its chunk.
        numels: int64, shape (P,): number of elements of each gradient.
        gradients: int64, shape (2, P): addresses and dtype codes of the gradients.
        partials: float64, shape (programs,): the result.
        count: Number P of gradients.
        block: Number of elements that a program reads at once.
        rounds: Number of reads of a program.
    """
    program = tl.program_id(0).to(tl.int64)
    index = tl.load(blocks + 2 * program)
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * (block * rounds)
    left = tl.load(numels + index) - start
    address = tl.load(gradients + index)
    dtype = tl.load(gradients + count + index)
    wide = (left >= block * rounds) & ((address & 15) == 0)
    if dtype == FLOAT16:
        if wide:
            total = _squares(address, start, left, tl.float16, tl.float32, block, rounds, 8)
        else:
            total = _squares(address, start, left, tl.float16, tl.float32, block, rounds, 0)
    elif dtype == BFLOAT16:
        if wide:
            total = _squares(address, start, left, tl.bfloat16, tl.float64, block, rounds, 8)
        else:
            total = _squares(address, start, left, tl.bfloat16, tl.float64, block, rounds, 0)
    else:
        if wide:
            total = _squares(address, start, left, tl.float32, tl.float64, block, rounds, 4)
        else:
            total = _squares(address, start, left, tl.float32, tl.float64, block, rounds, 0)
    tl.store(partials + program, total)


@triton.jit
def _squares(
    address: tl.tensor,
    start: tl.tensor,
    left: tl.tensor,
    dtype: tl.constexpr,
    precision: tl.constexpr,
    block: tl.constexpr,
    rounds: tl.constexpr,
    wide: tl.constexpr,
) -> tl.tensor:
    """Return the sum of squares of one chunk in FP64, accumulated over the rounds in ``precision``."""
    lanes = tl.arange(0, block)
    total = tl.full((block,), 0.0, precision)
    for turn in tl.static_range(rounds):
        skipped = turn * block
        if dtype == tl.bfloat16:
            values = _load_bfloat16(address, start + skipped, lanes, left - skipped, wide)
        else:
            values = _load(address, start + skipped, lanes, left - skipped, dtype, wide)
        values = values.to(precision)
        total += values * values
    return tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def norms(partials: tl.tensor, first: tl.tensor, out: tl.tensor, block: tl.constexpr) -> None:
    """Triton kernel that computes the L2 norms of P gradients from the sums of `partial_squares`, one program for each.

    The sums are added in a fixed order, so that results are reproducible.

    Args:
        partials: float64, shape (programs of `partial_squares`,): sums of squares.
        first: int64, shape (P + 1,): index of each gradient's first partial sum, then the number of partial sums.
        out: float64, shape (P,): the result.
        block: Number of partial sums read at once.
    """
    index = tl.program_id(0)
    end = tl.load(first + index + 1)
    lanes = tl.arange(0, block)
    total = tl.full((block,), 0.0, tl.float64)
    begin = tl.load(first + index)
    while begin < end:
        total += tl.load(partials + begin + lanes, mask=begin + lanes < end, other=0.0)
        begin += block
    tl.store(out + index, tl.sqrt(tl.sum(total, axis=0)))
