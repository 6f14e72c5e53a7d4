"""User-facing errors for data set files that are missing or cannot be downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from pickle import UnpicklingError
from tarfile import TarError

from mptrain.system.errors import DataError

NO_DOWNLOAD = "dataset=digits needs no download"

_FAILURES = (OSError, RuntimeError, EOFError, HTTPException, TarError, UnpicklingError)


def missing(what: str, where: str, other_way: str = "") -> DataError:
    """Return the error for data set files that are missing while downloads are off (``dataset.download=false``)."""
    ways = "set dataset.download=true, or set dataset.root=FOLDER to the folder that contains it"
    ways += f", {other_way}" if other_way else ""
    return DataError(f"{what} not found: looked in {where}", f"{ways}; {NO_DOWNLOAD}")


@contextlib.contextmanager
def fetching(what: str, root: Path, folder: Path | None = None) -> Iterator[None]:
    """Run a download in this context: convert its failures to `DataError`, and remove empty folders that it created.

    ``root`` was searched for the data; ``folder`` is the innermost folder that the download creates, None for ``root``.

    Raises:
        DataError: The download failed: no network, no space, wrong checksum or a damaged archive. Other exceptions pass
            through unchanged.
    """
    place = folder or root
    new = [one for one in (place, *place.parents) if not one.exists()]
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # not empty, or never created
            for one in new:
                one.rmdir()
        if not isinstance(error, _FAILURES):
            raise
        raise DataError(
            f"{what} not found in {root}, and the download failed: {type(error).__name__}: {error}",
            f"copy the files there, or set dataset.root=FOLDER to the folder that contains them; {NO_DOWNLOAD}",
        ) from error
