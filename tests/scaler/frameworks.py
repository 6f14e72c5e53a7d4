"""What two frameworks with constants of their own do to a loss scale, told on plain numbers and with their own bookkeeping.

Nothing here is shaped like our rules: counters start, reset and are compared where their source does so. Each takes
the overflows of a run, the first scale and the framework's own window, and returns the scale of the step after each.
"""

from __future__ import annotations


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
