"""Largest batch that a precision mode can train: tried where a device says when it is full, else counted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mptrain.config.schema import Config
from mptrain.engine.rehearsal import rehearse
from mptrain.engine.step import train_step
from mptrain.lab.doctor import first_batch
from mptrain.system.device import total_memory
from mptrain.system.errors import ConfigError, out_of_memory


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
    whole, less = (rehearse(parts, parts.prepare(one)).memory["activations"] for one in (batch, half))
    for learner in parts.learners:  # after which every optimizer has its state
        train_step(learner, parts.model, parts.prepare(batch), parts.plan)
    each = (whole - less) / (batch.samples - half.samples)
    fixed = sum(rehearse(parts, parts.prepare(half)).memory.values()) - round(each * half.samples)
    device, available = parts.device, len(parts.loaders["train"].split)
    memory = total_memory(device)
    counted = max(0, int((memory - fixed) / each)) if each > 0 else 0
    found = LargestBatch(counted, fixed, each, memory, tried=False)
    if device.type != "cuda":
        return found
    del parts, batch, half
    samples = largest_that_fits(lambda size: _fits(config, size), max(1, counted), available)
    return replace(found, samples=samples, tried=True, all_samples=samples == available)


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
