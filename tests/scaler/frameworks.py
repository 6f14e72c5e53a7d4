"""What each framework does to its loss scale, told on plain numbers and with each framework's own bookkeeping.

Nothing here is shaped like our rules: counters start, reset and are compared where their source does so. Each takes
the overflows of a run, the first scale and the framework's own window, and returns the scale of the step after each.
"""

from __future__ import annotations

import math
import struct

import torch

FLT_MAX = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny


def fp32(value: float) -> float:
    """Rounded to FP32 once."""
    return struct.unpack("f", struct.pack("f", value))[0]


def torch_amp(overflows, scale, window):
    """The kernel itself."""
    held, tracker, scales = torch.tensor(scale), torch.zeros((), dtype=torch.int32), []
    for overflow in overflows:
        torch._amp_update_scale_(held, tracker, torch.tensor(float(overflow)), 2.0, 0.5, window)
        scales.append(held.item())
    return scales


def apex(overflows, scale, window):
    unskipped, scales = 0, []
    for overflow in overflows:
        if overflow:
            scale, unskipped = scale / 2, 0
        else:
            unskipped += 1
        if unskipped == window:
            scale, unskipped = min(2.0**24, scale * 2), 0
        scales.append(scale)
    return scales


def deepspeed(overflows, scale, window, *, consecutive=False, shift=2):
    last_overflow, left, scales = -1, shift, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if shift == 1 or left == 1:
                scale = max(scale / 2, 1.0)
            else:
                left -= 1
            last_overflow = iteration
        else:
            if consecutive:
                left = shift
            stable = iteration - last_overflow - 1
            if stable > 0 and stable % window == 0:
                left = shift
                scale *= 2
        scales.append(scale)
    return scales


def megatron(overflows, scale, window):
    growth, left, scales = 0, 2, []
    for overflow in overflows:
        if overflow:
            growth = 0
            left -= 1
            if left <= 0:
                scale = max(scale * 0.5, 1.0)
        else:
            growth += 1
            if growth == window:
                growth, left = 0, 2
                scale *= 2
        scales.append(scale)
    return scales


def fairseq(overflows, scale, window, *, tolerance=0.0):
    last_overflow, last_rescale, since_rescale, scales = -1, -1, 0, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            last_overflow = iteration
            since_rescale += 1
            if since_rescale / (iteration - last_rescale) >= tolerance:
                scale, before = scale / 2, scale
                last_rescale, since_rescale = iteration, 0
                if scale <= 1e-4:
                    scale = before  # and the run ends
        elif (iteration - last_overflow) % window == 0:
            scale *= 2
            last_rescale = iteration
        scales.append(scale)
    return scales


def colossalai(overflows, scale, window):
    growth, bad, scales = 0, 0, []
    for overflow in overflows:
        if overflow:
            bad += 1
            growth = 0
            if bad >= 2:
                scale = max(scale * 0.5, 1.0)
        else:
            growth += 1
            if growth == window:
                growth = bad = 0
                scale = min(scale * 2, 2.0**32)
        scales.append(scale)
    return scales


def keras(overflows, scale, window):
    counter, scales = 0, []
    for overflow in overflows:
        if overflow:
            counter, scale = 0, fp32(scale / 2)
        elif counter == window - 1:
            counter, scale = 0, scale * 2
        else:
            counter += 1
        scales.append(scale)
    return scales


def mxnet(overflows, scale, window):
    decided, unskipped, scales = scale, 0, []
    for overflow in overflows:
        scale = decided
        if overflow:
            decided, unskipped = scale / 2, 0
        else:
            unskipped += 1
        if unskipped == window:
            decided, unskipped = min(2.0**24, scale * 2), 0
        scales.append(scale)
    return scales


def nnabla(overflows, scale, window):
    counter, scales = 0, []
    for overflow in overflows:
        if overflow:
            scale, counter = scale / 2, 0
        else:
            if counter > window:
                scale, counter = scale * 2, 0
            counter += 1
        scales.append(scale)
    return scales


def flax(overflows, scale, window):
    finite_steps, scales = 0, []
    for overflow in overflows:
        grow = finite_steps == window
        if overflow:
            scale = max(fp32(scale * 0.5), TINY)
        elif grow:
            scale = min(scale * 2, FLT_MAX)
        finite_steps = 0 if grow or overflow else finite_steps + 1
        scales.append(scale)
    return scales


def paddle(overflows, scale, window):
    good, bad, scales = 0, 0, []
    for overflow in overflows:
        if overflow:
            good, bad = 0, bad + 1
            if bad == 2:
                scale, bad = max(fp32(scale * fp32(0.8)), 1.0), 0
        else:
            bad, good = 0, good + 1
            if good == window:
                grown, good = scale * 2, 0
                scale = grown if grown <= FLT_MAX else scale
        assert math.isfinite(scale)
        scales.append(scale)
    return scales


#: By preset: the framework, and how much longer our ``growth_interval`` is than the window it is told.
FRAMEWORKS = {
    "torch": (torch_amp, 0),
    "apex": (apex, 0),
    "deepspeed": (deepspeed, 0),
    "megatron": (megatron, 0),
    "fairseq": (fairseq, 0),
    "colossalai": (colossalai, 0),
    "keras": (keras, 0),
    "mxnet": (mxnet, 0),
    "nnabla": (nnabla, 1),
    "flax": (flax, 1),
    "paddle": (paddle, 0),
}
