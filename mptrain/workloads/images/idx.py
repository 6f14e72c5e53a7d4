"""Reads IDX, the format of *The MNIST database* (LeCun, Cortes, Burges) and its successors, plain or gzipped.

Two zero bytes, a type code (8: unsigned byte), the number of dimensions, each dimension as a big-endian
32-bit integer, then the values in row-major order.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from mptrain.errors import DataError

_UNSIGNED_BYTE = 8


def read_idx(path: Path) -> Tensor:
    """The array in a file, uint8, with the shape that the file states.

    Raises:
        DataError: The file cannot be read, is cut short, or is not IDX of unsigned bytes.
    """
    hint = f"remove {path} and fetch it again"
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", hint) from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise DataError(f"{path} is not an IDX file of unsigned bytes", hint)
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} is cut short within its header", hint)
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(f"{path} holds {len(content) - start} values, but its header says {math.prod(shape)}", hint)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
