"""Takes the weights of a run out of its checkpoint, for programs that know nothing of runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from mptrain.config.compose import reload
from mptrain.engine.snapshot import require_same_schema
from mptrain.engine.weights_io import has_averages, in_dtype, plain_weights
from mptrain.precision.apply import about_clamped, count_beyond
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.directory import find_run
from mptrain.runlog.storage import storing, write_atomically

if TYPE_CHECKING:
    from mptrain.config.schema import Config


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        data: Where the run says what its data were.
        path: The file: a plain state dict, loadable with ``weights_only=True``.
        config: Of the run.
        step: Attempted steps of the checkpoint.
        averaged: Whether the weights are averages.
        tensors: How many there are.
        bytes: Size of the file.
        warnings: What was not written as it was trained, one sentence each.
    """

    data: Path
    path: Path
    config: Config
    step: int
    averaged: bool
    tensors: int
    bytes: int
    warnings: tuple[str, ...] = ()


def export_run(
    run: str,
    which: Literal["last", "best"],
    dtype: torch.dtype,
    *,
    average: bool,
    output: Path | None,
    trusted: Sequence[str] = (),
) -> Export:
    """Write a checkpoint's weights as a plain state dict.

    Args:
        run: The run directory, or ``last``.
        which: Which checkpoint.
        dtype: Of all floating-point tensors; FP16 saturates at 65504.
        average: Take the average of the weights, where there is one.
        output: The file; None makes one in the run's ``export`` folder. An old one is replaced.
        trusted: Words that say whose code the run's configuration may call.

    Raises:
        MptrainError: No usable checkpoint, or the disk refuses.
    """
    directory = find_run(run)
    config = reload(directory.read_config(), trusted)
    config = replace(config, overrides=tuple(directory.read_overrides()))
    loaded = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep).load(which)
    require_same_schema(loaded.state)
    averaged = average and has_averages(loaded.state)
    trained = plain_weights(loaded.state, average=averaged)
    clamped = {
        name: count
        for name, value in trained.items()
        if value.is_floating_point() and (count := count_beyond(value, dtype))
    }
    weights = in_dtype(trained, dtype)
    if output is None:
        output = (
            directory.paths.export / f"{which}{'-average' if averaged else ''}-{str(dtype).removeprefix('torch.')}.pt"
        )
        with storing(output.parent):
            output.parent.mkdir(exist_ok=True)
    file = io.BytesIO()
    torch.save(weights, file)
    write_atomically(output, file.getvalue())
    return Export(
        directory.paths.data,
        output,
        config,
        loaded.state["progress"]["step"],
        averaged,
        len(weights),
        file.tell(),
        warnings=(about_clamped(clamped, dtype),) if clamped else (),
    )
