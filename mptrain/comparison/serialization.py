"""Comparisons as strict JSON, and back: what stands in ``comparison.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mptrain.comparison.results import Comparison
from mptrain.errors import StorageError
from mptrain.records import as_json
from mptrain.runlog.schema_checks import build
from mptrain.runlog.storage import write_atomically
from mptrain.runlog.strict_json import read_object, restore_nonfinite

#: Version of the layout.
SCHEMA = 2


def write_comparisons(path: Path, groups: Mapping[str, Comparison]) -> None:
    """Write ``comparison.json``.

    Args:
        path: `mptrain.runlog.sweeps.SweepPaths.comparison`.
        groups: Group to its comparison; ``""`` is the group of arms that have none.

    Raises:
        StorageError: The disk refuses.
    """
    kept = [{"name": name, "comparison": to_json(comparison)} for name, comparison in groups.items()]
    write_atomically(path, json.dumps({"schema": SCHEMA, "groups": kept}, indent=1, allow_nan=False) + "\n")


def read_comparisons(path: Path) -> dict[str, Comparison]:
    """What `write_comparisons` wrote.

    Raises:
        StorageError: It is missing, damaged or of another version.
    """
    fields = read_object(path, SCHEMA)
    try:
        return {str(group["name"]): from_json(group["comparison"]) for group in fields["groups"]}
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is damaged: {error}", "compare the runs again") from error


def to_json(comparison: Comparison) -> dict[str, Any]:
    """JSON values only; non-finite numbers are null, and listed as in every record (`mptrain.records.as_json`).

    The courses of the runs are left out: they stand in the run directories.
    """
    fields = asdict(comparison)
    for result in fields["arms"]:
        for run in result["arm"]["runs"]:
            del run["course"]
    found: dict[str, Any] = json.loads(as_json(fields))
    return found


def from_json(fields: dict[str, Any]) -> Comparison:
    """The comparison that `to_json` was given, but for the courses of its runs.

    Raises:
        StorageError: It is damaged.
    """
    try:
        found = build(Comparison, restore_nonfinite(fields))
        if not found.arms:
            raise ValueError("it has no arms")
        return found
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"the comparison is damaged: {error}", "compare the runs again") from error
