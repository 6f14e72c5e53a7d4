"""Settings of torch that hold for a whole process, and their restoration."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore afterwards what keys of a run set: torch's threads, deterministic and benchmark mode, and precision."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    mode = torch.get_deterministic_debug_mode()
    try:
        with _matmul_precision_restored():
            yield
    finally:
        torch.set_num_threads(threads)
        if torch.get_deterministic_debug_mode() != mode:  # setting it imports torch's compiler
            torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _matmul_precision_restored() -> Iterator[None]:
    """Restore what `mptrain.precision.apply.set_matmul_precision` sets when the context ends."""
    cuda, cudnn, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mha
    names = [(cuda.matmul, f"allow_{dtype}_reduced_precision_reduction") for dtype in ("fp16", "bf16")]
    places: list[tuple[Any, str]] = [*names, (cuda.matmul, "fp32_precision")]
    places += [(getattr(cudnn, kind), "fp32_precision") for kind in ("conv", "rnn")]
    before = [getattr(*place) for place in places]
    fused, sums = mha.get_fastpath_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()
    try:
        yield
    finally:
        mha.set_fastpath_enabled(fused)
        cuda.allow_fp16_bf16_reduction_math_sdp(sums)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cuda.matmul.allow_tf32, cudnn.allow_tf32 = before[2] == "tf32", before[3] == "tf32"
        for place, value in zip(places, before, strict=True):
            setattr(*place, value)
