"""What users are told when data is not where it was looked for, or cannot be fetched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from pickle import UnpicklingError
from tarfile import TarError

from mptrain.errors import DataError

NO_DOWNLOAD = "dataset=digits needs no download"

_FAILURES = (OSError, RuntimeError, EOFError, HTTPException, TarError, UnpicklingError)


def missing(what: str, where: str, other_way: str = "") -> DataError:
    """The error for data that is not there and was not to be fetched."""
    ways = "set dataset.download=true, or dataset.root=FOLDER to where it is"
    ways += f", {other_way}" if other_way else ""
    return DataError(f"{what} not found: looked in {where}", f"{ways}; {NO_DOWNLOAD}")


@contextlib.contextmanager
def fetching(what: str, root: Path, folder: Path | None = None) -> Iterator[None]:
    """Turn whatever a download fails with (no network, no space, a wrong checksum) into a `DataError`; leave no empty folder behind.

    Args:
        what: Name of the data.
        root: Where it was looked for.
        folder: The innermost folder that the download makes; None means ``root``.
    """
    place = folder or root
    new = [one for one in (place, *place.parents) if not one.exists()]
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # not empty, or not made
            for one in new:
                one.rmdir()
        if not isinstance(error, _FAILURES):
            raise
        raise DataError(
            f"{what} cannot be had: looked in {root}, then {type(error).__name__}: {error}",
            f"copy it there from elsewhere, or set dataset.root=FOLDER to where it is; {NO_DOWNLOAD}",
        ) from error
