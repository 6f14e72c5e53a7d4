"""``mptrain find lr`` and ``find batch``: a learning rate range test, and the largest batch of a precision mode."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mptrain.cli.blocks import print_blocks
from mptrain.cli.messages import print_rows, say, waiting, warn
from mptrain.config.compose import compose
from mptrain.config.schema import Config
from mptrain.engine.rehearsal import rehearse
from mptrain.engine.step import train_step
from mptrain.lab.doctor.check import first_batch
from mptrain.lab.pages.rate_range import range_test_page, read_range_test, result_blocks
from mptrain.lab.range_test import range_test_words
from mptrain.precision.policy import FP32
from mptrain.report.html_and_markdown import write_page
from mptrain.run.resume import launch
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.runlog.run_reader import read_run
from mptrain.system.device import total_memory
from mptrain.system.errors import EXIT_OK, ConfigError, NumericsError, UsageError, out_of_memory
from mptrain.system.words import TIMES

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from pathlib import Path

    from mptrain.run.attempt import RunInfo
    from mptrain.runlog.record_writer import Sink


#: Beginnings of overrides that are about the test and not about the training that follows.
_OF_TEST = ("schedule.", "run.", "train.max_steps=", "train.epochs=", "optimizer.lr=", "train.max_consecutive")


def find_rate(arguments: Namespace) -> int:
    """Train a few hundred updates with a rising learning rate, and print which rates train and which do not.

    Args:
        arguments: Parsed command line: ``lr``, and the configuration.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: The configuration is invalid, the loss did not fall, or the run failed for another reason than its
            loss.
    """
    if arguments.words != ["lr"]:
        raise UsageError(
            "find takes what to find, and a configuration", "write mptrain find lr model=resnet18, or find batch"
        )
    words = range_test_words(arguments.overrides)
    config = compose(words, config_dirs=arguments.config_dir, config_name=arguments.config_name)
    warn(config.warnings)
    roots: list[Path] = []

    def begun(info: RunInfo) -> Sequence[Sink]:
        roots.append(info.root)
        say(f"range test: {info.planned:,} updates, run={info.root}")
        return []

    try:
        root = launch(config, begun).root
    except NumericsError:  # a rate that is too high ends the run, which is what the test is for
        if not roots:
            raise
        root = roots[0]
    range_test = read_range_test(read_run(root).steps())
    kept = [word for word in arguments.overrides if not word.lstrip("+~").startswith(_OF_TEST)]
    kept += [word for folder in arguments.config_dir for word in ("--config-dir", folder)]
    kept += ["--config-name", arguments.config_name] if arguments.config_name != "train" else []
    command = shlex.join(["mptrain", *kept, f"optimizer.lr={range_test.suggested:g}"])
    written = write_page(
        range_test_page(root.name, range_test, command), root, root / "range-test.html", root / "range-test.md"
    )
    print_blocks(*result_blocks(range_test, command))
    say(f"\n{written.html}")
    return EXIT_OK


@dataclass(frozen=True)
class LargestBatch:
    """Largest batch of a precision mode: ``samples``, 0 if not even one fits.

    Attributes:
        fixed: Bytes that a step needs with any batch, counted; ``each`` are those of each sample.
        memory: Bytes of the device's memory, or of the machine's for a CPU.
        tried: Whether steps were run with batches of this and larger sizes; otherwise the number is computed.
        all_samples: Whether the batch has all training samples, so that larger ones could not be tried.
    """

    samples: int
    fixed: int
    each: float
    memory: int
    tried: bool
    all_samples: bool = False


def largest_batch(config: Config) -> LargestBatch:
    """Return the largest batch with which a configuration can train; it stays divided into ``train.accumulate`` parts.

    Raises:
        ConfigError: The configured batch is too small to see what a sample needs, or parts do not fit together.
        DataError: The training split has no usable sample.
    """
    parts, batch = first_batch(config)
    parts.model.train()
    half, accumulate = batch.split(2)[0], parts.plan.accumulate
    if half.samples // accumulate == batch.samples // accumulate:
        what = f"the batch of {batch.samples} samples is too small to see what each of them needs"
        raise ConfigError(what, f"set train.batch_size={max(8, 4 * accumulate)} or more")
    whole, less = (rehearse(parts, parts.prepare(trial_batch)).memory["activations"] for trial_batch in (batch, half))
    for learner in parts.learners:  # after which every optimizer has its state
        train_step(learner, parts.model, parts.prepare(batch), parts.plan)
    each = (whole - less) / (batch.samples - half.samples)
    fixed = sum(rehearse(parts, parts.prepare(half)).memory.values()) - round(each * half.samples)
    device, available = parts.device, len(parts.loaders["train"].split)
    memory = total_memory(device)
    counted = max(0, int((memory - fixed) / each)) if each > 0 else 0
    largest = LargestBatch(counted, fixed, each, memory, tried=False)
    if device.type != "cuda":
        return largest
    # The sizes that are tried need this memory.
    del parts, batch, half
    samples = largest_that_fits(lambda size: _fits(config, size), max(1, counted), available)
    return replace(largest, samples=samples, tried=True, all_samples=samples == available)


def largest_that_fits(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """Return a size that fits, within 3 % of the largest one up to ``most``; 0 if none does. Tries ``guess`` first."""
    low, high, size = 0, most + 1, min(guess, most)
    while low < size < high:
        low, high = (size, high) if fits(size) else (low, size)
        between = min(2 * low, (low + high) // 2) or high // 2
        size = between if high - low > low // 32 else most if high > most else low
    return low


def _fits(config: Config, size: int) -> bool:
    """Return whether two steps with a batch of a size run in the memory that is free on the device."""
    try:
        parts, batch = first_batch(replace(config, train=replace(config.train, batch_size=size)))
        parts.model.train()
        for _ in range(2):
            for learner in parts.learners:
                train_step(learner, parts.model, parts.prepare(batch), parts.plan).loss.item()
    except RuntimeError as error:
        if out_of_memory(error) is None:
            raise
        return False
    finally:
        parts = batch = None  # type: ignore[assignment]  # before the next size is tried
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
    return True


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
