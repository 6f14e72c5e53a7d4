"""What a run began with: digests by which a comparison proves that its arms began alike, and saw the same data.

Computed on the host, from values that are there anyway; nothing here changes anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.loader import Loader


#: Of a sample that are part of a digest of evaluated data: all of a text, and one of some hundred of a picture.
VALUES = 256


@dataclass(frozen=True)
class StartFingerprints:
    """What was so before the first step.

    Attributes:
        initial_weights: SHA-256 of the FP32 weights as they were drawn, or taken over; empty for a run that goes on.
        memory: Bytes in use before the model was built (see `mptrain.engine.memory.memory_in_use`).
    """

    initial_weights: str = ""
    memory: int = 0


def sample_digests(batch: Batch) -> list[bytes]:
    """SHA-256 of every sample of a host batch: of each tensor its dtype and up to `VALUES` values.

    The zeros at the end of a sample do not count: they are what pads the shorter samples of a batch, so the same sample
    would have another digest among other samples.
    """
    digests = [hashlib.sha256() for _ in range(batch.samples)]
    for name, tensor in batch.tensors().items():
        values = tensor.reshape(len(tensor), -1).numpy()
        head = f"{name} {tensor.dtype} ".encode()
        there = values[:, ::-1] != 0
        ends = (values.shape[1] - there.argmax(1)) * there.any(1) if values.shape[1] else [0] * len(values)
        for digest, row, end in zip(digests, values, ends, strict=True):
            digest.update(head)
            digest.update(row[: int(end) : max(1, -(-int(end) // VALUES))].tobytes())
    return [digest.digest() for digest in digests]


def digest_of_samples(digests: Iterable[bytes]) -> str:
    """SHA-256, in hexadecimal, of samples in their order: other samples, another order and other targets give another one."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def data_order(loader: Loader, epoch: int, batch: Batch) -> dict[str, Any]:
    """What an epoch consists of, JSON values: number, digests of the order of its samples and of its first batch.

    Args:
        loader: Of the training split.
        epoch: From 0.
        batch: Its first, as it was fetched.
    """
    return {
        "epoch": epoch,
        "order": digest_of_order(loader.order(epoch)),
        "first_batch": digest_of_batch(batch),
        "samples": batch.samples,
    }


def digest_of_weights(model: nn.Module) -> str:
    """SHA-256, in hexadecimal, of all parameters and lasting buffers: names, shapes and values, in their order."""
    named = (item for item in model.state_dict(keep_vars=True).items() if isinstance(item[1], torch.Tensor))
    return _digest(named)


def digest_of_batch(batch: Batch) -> str:
    """SHA-256, in hexadecimal, of a host batch as it was fetched, augmentation included."""
    return _digest(batch.tensors().items())


def digest_of_order(order: Tensor) -> str:
    """SHA-256, in hexadecimal, of sample numbers in their order, an int64 tensor ``[N]``."""
    return _digest([("order", order)])


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        _update(digest, name, tensor)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    host = tensor.detach().cpu().contiguous()
    digest.update(f"{name} {host.dtype} {tuple(host.shape)} ".encode())
    digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
