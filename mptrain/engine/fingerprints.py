"""Digests (SHA-256) of initial weights, code, data and labels, which show that runs had the same start and data.

They are computed on the host, from values that exist anyway. Nothing here may change the run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.loader import Loader


#: Maximum number of values per sample in a digest of evaluated data: all of a text, one in some hundred of a picture.
VALUES = 256


@dataclass(frozen=True)
class StartFingerprints:
    """Digest of the initial weights and memory use of a run, taken before its first step.

    ``initial_weights`` is that of the FP32 weights, drawn or loaded, in hexadecimal; empty for a resumed run.
    ``memory`` is in bytes, before the model was built. ``code`` is the digest of a model of the user's own
    (`digest_of_code`), None for the others.
    """

    initial_weights: str = ""
    memory: int = 0
    code: str | None = None


def digest_of_code(model: nn.Module) -> str:
    """Return the digest of a model's code, and of its structure in words with the plain attributes of its modules.

    The code is the source of the methods, and the plain attributes, of its classes that are not torch's; functions that
    they call are not looked at. It is empty if a method has no readable source, as one typed at Python's own prompt.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    try:
        sources = sorted(_source(kind) for kind in kinds if kind.__module__.partition(".")[0] != "torch")
    except (OSError, TypeError):
        return ""
    values = [f"{name} {_plain_attributes(vars(module))}" for name, module in model.named_modules()]
    return hashlib.sha256("\n".join([*sources, repr(model), *values]).encode("utf-8", "surrogateescape")).hexdigest()


def _source(kind: type) -> str:
    """Return the source of each method of a class: that of the class itself is not known in a notebook."""
    pieces = [kind.__name__, _plain_attributes(vars(kind))]
    for _, value in sorted(vars(kind).items()):
        inner = getattr(value, "__func__", value)  # of static and class methods
        functions = (inner.fget, inner.fset) if isinstance(inner, property) else (inner,)
        pieces += [textwrap.dedent(inspect.getsource(one)) for one in functions if inspect.isfunction(one)]
    return "\n".join(pieces)


def _plain_attributes(values: Mapping[str, Any]) -> str:
    own = {name: value for name, value in values.items() if not name.startswith("_") and name != "training"}
    return repr(sorted((name, value) for name, value in own.items() if isinstance(value, bool | int | float | str)))


def sample_digests(batch: Batch) -> list[bytes]:
    """Return the digest (32 bytes) of every sample of a host batch, to recognise evaluations on the same data.

    It covers name, dtype and up to `VALUES` values of each tensor. Trailing zeros of a sample are left out: they pad
    the shorter samples of a batch, and would make the digest of a sample depend on the other samples in its batch.
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
    """Return the hexadecimal digest of an evaluated split from `sample_digests` of all its batches, in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def data_order(loader: Loader, epoch: int, batch: Batch) -> dict[str, Any]:
    """Return JSON values: ``epoch`` (from 0), digests of ``order`` and ``first_batch``, and ``samples`` in that."""
    return {
        "epoch": epoch,
        "order": digest_of_order(loader.order(epoch)),
        "first_batch": digest_of_batch(batch),
        "samples": batch.samples,
    }


def digest_of_weights(model: nn.Module) -> str:
    """Return the hexadecimal digest of a model's parameters and persistent buffers: names, dtypes, shapes, values."""
    named = (item for item in model.state_dict(keep_vars=True).items() if isinstance(item[1], torch.Tensor))
    return _digest(named)


def digest_of_batch(batch: Batch) -> str:
    """Return the hexadecimal digest of all tensors of a host batch as fetched, including augmentation."""
    return _digest(batch.tensors().items())


def digest_of_order(order: Tensor) -> str:
    """Return the hexadecimal digest of the order in which an epoch visits its samples (int64 [N], their indices)."""
    return _digest([("order", order)])


def digest_of_labels(labels: Any) -> str:
    """Return the hexadecimal digest of a data set's labels (plain JSON values), such as the names of its classes."""
    return hashlib.sha256(json.dumps(labels).encode()).hexdigest()


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        _update(digest, name, tensor)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    host = tensor.detach().cpu().contiguous()
    digest.update(f"{name} {host.dtype} {tuple(host.shape)} ".encode())
    digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
