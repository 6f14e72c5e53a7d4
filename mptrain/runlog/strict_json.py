"""Small files of strict JSON, and back from it to numbers: the inverse of `mptrain.records.as_json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from mptrain.errors import OlderLayout, StorageError
from mptrain.files import read_bytes
from mptrain.records import as_json
from mptrain.runlog.atomic_files import storage_errors

#: The release that wrote files whose schema number is below that of today, where they do not say it themselves.
_OLDER: Final = "0.1"

#: Levels of mappings and lists that whoever reads a record can walk through.
DEEPEST: Final = 60

_TOO_DEEP: Final = f"it is nested deeper than {DEEPEST} levels"


def parse_strict(text: str) -> Any:
    """The value of a JSON text; NaN and Infinity, which Python would accept, are not JSON.

    Raises:
        ValueError: The text is not strict JSON, or nested deeper than anything that was ever written.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > DEEPEST and is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def indented_json(fields: Mapping[str, Any]) -> str:
    """Return the text of a small file: indented strict JSON, with its non-finite numbers as `mptrain.records.as_json` lists them."""
    return json.dumps(json.loads(as_json(dict(fields))), indent=2, allow_nan=False) + "\n"


def read_object(path: Path, schema: int | None = None, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the JSON object in a small file.

    Args:
        path: The file.
        schema: The version of its layout; None where it has none.
        missing_ok: Return an empty object where there is no such file.

    Raises:
        OlderLayout: An older mptrain wrote it; names the folder that it lies in.
        StorageError: It cannot be read, is damaged, or has no schema number or a newer one.
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
    """Refuse a file of another layout than this version writes."""
    schema = fields.get("schema")
    if type(schema) is not int or schema < 1:
        raise damaged(path, "no schema number")
    if schema > known:
        raise StorageError(
            f"{path} has schema {schema}, this mptrain reads {known}", "use the newer mptrain that wrote it"
        )
    if schema < known:
        versions = fields.get("versions")
        named = versions.get("mptrain") if isinstance(versions, dict) else None
        raise OlderLayout({path.parent: named if isinstance(named, str) and named else _OLDER})


def damaged(path: Path, why: str) -> StorageError:
    """Return the error that refuses a small file."""
    return StorageError(f"{path} is damaged: {why}", "restore the file from a copy, or start the run again")


def is_too_deep(value: Any) -> bool:
    """Return whether plain containers are nested deeper than `DEEPEST` levels; looks without recursion."""
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
    """The fields with their non-finite numbers, and without the list of them; the same object where there are none.

    Args:
        fields: A parsed object; ``nonfinite`` maps paths (``loss``, ``metrics.loss``, ``scales.3``) to ``inf``,
            ``-inf`` or ``nan``.

    Raises:
        KeyError, IndexError: A listed path leads nowhere.
        ValueError, TypeError, AttributeError: The list is not one that `mptrain.records.as_json` writes.
    """
    if "nonfinite" not in fields:
        return fields
    values: dict[str, Any] = _copy(fields)
    for path, kind in values.pop("nonfinite", {}).items():
        place, key = _find(values, path)
        if place[key] is not None:
            raise ValueError(f"{path} is finite and listed as {kind}")
        place[key] = float(kind)
    return values


def _find(values: Any, path: str) -> tuple[Any, Any]:
    """The container and the key that a path leads to; a key may itself contain dots."""
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
    """The same plain containers anew, with the same values in them."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


#: One for all texts: `json.loads` makes one for each text that it refuses constants in.
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)
