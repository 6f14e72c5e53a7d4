"""Digests of samples by content, by which a run recognises the samples that it was trained on.

They are of the stored sample, before it is resized or augmented, and leave out its target: a picture stays the same one
in another folder, under another name, and with a corrected label.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mptrain.system.files import open_to_read

#: Bytes of a digest. Among a million samples, another one is taken for one of them with a probability of 5e-14.
SIZE = 8

#: Largest file that is read as a whole, in bytes; of a larger one, `PART` bytes each at its start, middle and end.
WHOLE, PART = 1 << 16, 1 << 14


def tensor_digests(values: Tensor) -> list[bytes]:
    """Return a digest of each sample in ``[N, ...]``, of its bytes."""
    rows = values.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8)  # NumPy has no bfloat16
    return [hashlib.blake2b(row, digest_size=SIZE).digest() for row in rows.numpy()]


def file_digests(paths: Sequence[str]) -> list[bytes]:
    """Return a digest of each file: of its size and content, or for large files of parts of it (see `WHOLE`).

    A file that cannot be read gets the digest of its path; reading the sample says what is wrong with it. Files are
    read in parallel, because a file system may take long to answer.
    """
    chunks = [paths[start : start + 256] for start in range(0, len(paths), 256)]
    with ThreadPoolExecutor(8) as pool:
        return [digest for digests in pool.map(_file_digests, chunks) for digest in digests]


def _file_digests(paths: Sequence[str]) -> list[bytes]:
    return [hashlib.blake2b(_identity(path), digest_size=SIZE).digest() for path in paths]


def _identity(path: str) -> bytes:
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE:
                return file.read()
            places = (0, (size - PART) // 2, size - PART)
            return b"".join([str(size).encode(), *(os.pread(file.fileno(), PART, place) for place in places)])
    except OSError:
        return os.fsencode(path)
