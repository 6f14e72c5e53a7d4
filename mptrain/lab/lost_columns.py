"""Columns of a batch that a cast to half precision rounds away, such as a time in seconds or a pressure in pascals."""

from __future__ import annotations

import torch

from mptrain.numerics.words import listed
from mptrain.system.device import in_widest
from mptrain.workloads.base.batch import Batch

#: Share of a column's deviation that rounding may change; beyond it most of what the column tells is lost.
LOST = 0.5


def lost_columns(batch: Batch, dtype: torch.dtype) -> str:
    """Return the input columns whose differences between samples a cast loses, such as ``columns 0, 3``, or nothing.

    The batch is one before the cast to ``dtype``. Inputs of another rank than ``[N, columns]`` are one column.
    """
    inputs = batch.inputs
    if not inputs.is_floating_point() or inputs.dtype == dtype:
        return ""
    rows = in_widest(inputs if inputs.ndim == 2 else inputs.flatten().unsqueeze(1))
    spread = (rows - rows.mean(0)).square().mean(0).sqrt()
    cast = in_widest(rows.to(dtype))
    off = (cast - rows).square().mean(0).sqrt()
    infinite = rows.isfinite().all(0) & ~cast.isfinite().all(0)
    lost = ((spread > 0) & ~(off <= LOST * spread) | infinite).nonzero().flatten().tolist()
    if not lost or inputs.ndim != 2:
        return "the inputs" if lost else ""
    return f"column{'s' * (len(lost) > 1)} {listed(list(map(str, lost)), 5)}"
