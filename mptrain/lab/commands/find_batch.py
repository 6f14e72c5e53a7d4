"""``mptrain find batch``: the largest batch of a precision mode, beside that of FP32."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from mptrain.cli.messages import print_rows, waiting, warn
from mptrain.config.compose import compose
from mptrain.lab.batch_size import LargestBatch, largest_batch
from mptrain.numerics.words import TIMES
from mptrain.precision.policy import FP32
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.system.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from argparse import Namespace


def find_batch(arguments: Namespace) -> int:
    """Find the largest batch of a configuration's precision and of FP32, and print both with what they need.

    Args:
        arguments: Parsed command line: ``batch``, and the configuration.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: The configuration is invalid, its parts do not fit together, or its batch is too small.
    """
    config = compose(arguments.overrides, config_dirs=arguments.config_dir, config_name=arguments.config_name)
    if config.distributed.procs not in (None, 1):
        raise UsageError("find batch counts the memory of one process", "leave distributed.procs out")
    warn(config.warnings)
    with waiting() as tell:
        batches = {}
        for policy in dict.fromkeys((FP32, config.precision)):
            tell(f"memory of a step in {policy.name}")
            batches[policy.name] = largest_batch(replace(config, precision=policy))
    rows = [(name, _in_words(batch)) for name, batch in batches.items()]
    own, full = batches[config.precision.name], batches["fp32"]
    how = "tried with two steps" if own.tried else _COUNTED
    rows.append(("found", f"{readable_bytes(own.memory)} of memory, {how}"))
    if own.samples and full.samples and own is not full:
        rows.append(("so", f"{own.samples / full.samples:.1f} {TIMES} the batch of fp32"))
    kept = [word for word in arguments.overrides if not word.lstrip("+~").startswith("train.batch_size=")]
    if own.samples and own.tried:
        rows.append(("train", shlex.join(["mptrain", *kept, f"train.batch_size={own.samples}"])))
    print_rows("largest batch", rows)
    return EXIT_OK


_COUNTED = (
    "counted and not tried: temporary results of operators, which a CPU without half-precision arithmetic has more of, "
    "and what other programs need come on top, so stay well below"
)


def _in_words(batch: LargestBatch) -> str:
    size = "not even one sample fits" if not batch.samples else f"{batch.samples:,} samples"
    whole = ", which are all for training" if batch.all_samples else ""
    return f"{size}{whole}: {readable_bytes(batch.fixed)} with any batch, {readable_bytes(round(batch.each))} a sample"
