"""Reading and writing of small strict JSON files of runs and sweeps, with non-finite numbers stored beside the fields.

`restore_nonfinite` is the inverse of `mptrain.system.records.as_json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from mptrain import __version__
from mptrain.runlog.atomic_files import storage_errors
from mptrain.system.errors import OtherVersion, StorageError
from mptrain.system.files import read_bytes
from mptrain.system.records import as_json

#: Maximum nesting depth of mappings and lists in a record.
DEEPEST: Final = 60

_TOO_DEEP: Final = f"it is nested deeper than {DEEPEST} levels"


def parse_strict(text: str) -> Any:
    """Parse a JSON text strictly: NaN and Infinity, which Python accepts by default, are rejected.

    Raise ValueError if the text is not strict JSON, or is nested deeper than `DEEPEST` levels.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > DEEPEST and is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def indented_json(fields: Mapping[str, Any]) -> str:
    """Return the text of a JSON file with these fields, indented and with a line end.

    NaN and Infinity, which strict JSON lacks, become ``null`` and are listed in an additional field ``nonfinite``.
    """
    return json.dumps(json.loads(as_json(dict(fields))), indent=2, allow_nan=False) + "\n"


def read_object(path: Path, schema: int | None = None, *, missing_ok: bool = False) -> dict[str, Any]:
    """Read the JSON object in a small file of a run or sweep; non-finite numbers are not restored.

    ``schema`` is the expected version of its layout (field ``schema``); None if it has no version. With ``missing_ok``,
    a missing file is an empty object.

    Raises:
        OtherVersion: The file has another schema number.
        StorageError: The file cannot be read, is damaged, or has no schema number.
    """
    with storage_errors(path, "read"):
        try:
            content = read_bytes(path)
        except (FileNotFoundError, NotADirectoryError):
            if missing_ok:
                return {}
            raise
    try:
        fields = parse_strict(content.decode("utf-8", "replace"))
    except ValueError as error:
        raise damaged(path, f"{error}") from error
    if not isinstance(fields, dict):
        raise damaged(path, "not a JSON object")
    if schema is not None:
        _check_schema(fields, schema, path)
    return fields


def _check_schema(fields: dict[str, Any], known: int, path: Path) -> None:
    schema = fields.get("schema")
    if type(schema) is not int or schema < 1:
        raise damaged(path, "no schema number")
    if schema != known:
        versions = fields.get("versions")
        writer = versions.get("mptrain") if isinstance(versions, dict) else None
        raise OtherVersion(
            f"{path} was written by {f'mptrain {writer}' if isinstance(writer, str) else 'another version'} in schema "
            f"{schema}; mptrain {__version__} reads schema {known}",
            "use the version of mptrain that wrote it, or train again in another folder",
        )


def damaged(path: Path, why: str) -> StorageError:
    """Return (do not raise) the error for a damaged file of a run or sweep, with a hint to restore it."""
    return StorageError(f"{path} is damaged: {why}", "restore the file from a copy, or start the run again")


def is_too_deep(value: Any) -> bool:
    """Return whether dicts and lists are nested deeper than `DEEPEST` levels, for values of any depth."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def restore_nonfinite(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object's fields with the non-finite numbers that it lists under ``nonfinite`` put back.

    ``nonfinite`` maps paths (``loss``, ``metrics.loss``, ``scales.3``) to ``inf``, ``-inf`` or ``nan``. Without it, the
    same object is returned, else a copy.

    Raises:
        KeyError, IndexError: A listed path does not exist.
        ValueError, TypeError, AttributeError: ``nonfinite`` was not written by `mptrain.system.records.as_json`.
    """
    if "nonfinite" not in fields:
        return fields
    values: dict[str, Any] = _copy(fields)
    for path, kind in values.pop("nonfinite", {}).items():
        container, key = _find(values, path)
        if container[key] is not None:
            raise ValueError(f"{path} is finite but listed as {kind}")
        container[key] = float(kind)
    return values


def _find(values: Any, path: str) -> tuple[Any, Any]:
    """Return the container and the key of a path. Keys may contain dots."""
    if isinstance(values, list):
        head, _, rest = path.partition(".")
        return (values, int(head)) if not rest else _find(values[int(head)], rest)
    if path in values:
        return values, path
    for key in sorted((key for key in values if path.startswith(f"{key}.")), key=len, reverse=True):
        if isinstance(values[key], (dict, list)):
            return _find(values[key], path[len(key) + 1 :])
    raise KeyError(path)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


#: Shared decoder, because `json.loads` with ``parse_constant`` creates a decoder per call.
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)
