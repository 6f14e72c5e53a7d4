"""Comparisons as strict JSON, and back: what stands in ``comparison.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mptrain.comparison.results import (
    Aligned,
    Arm,
    ArmResult,
    Comparison,
    Equivalence,
    Interval,
    Objection,
    RunMeasures,
    Verdict,
)
from mptrain.errors import StorageError
from mptrain.files import read_bytes
from mptrain.records import as_json
from mptrain.runlog.schema_checks import is_built_as
from mptrain.runlog.state import check_schema, parse_object
from mptrain.runlog.storage import storing, write_atomically
from mptrain.runlog.strict_json import restore_nonfinite

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
    with storing(path, "read"):
        text = read_bytes(path).decode("utf-8", "replace")
    fields = parse_object(text, path)
    check_schema(fields, SCHEMA, path)
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
        values = restore_nonfinite(fields)
        found = Comparison(
            **{
                **values,
                "arms": tuple(_result(one) for one in values["arms"]),
                "objections": tuple(Objection(**one) for one in values["objections"]),
                "checks": tuple(values["checks"]),
                "notes": tuple(values["notes"]),
            }
        )
        if not is_built_as(found, Comparison) or not found.arms:
            raise ValueError("a value is of another kind than was written")
        return found
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"the comparison is damaged: {error}", "compare the runs again") from error


_INTERVALS = ("metric", "difference", "throughput", "speed", "time", "memory", "peak", "energy")


def _result(fields: dict[str, Any]) -> ArmResult:
    intervals = {name: _interval(fields[name]) for name in _INTERVALS}
    found = fields["equivalence"]
    return ArmResult(
        **{
            **fields,
            **intervals,
            "arm": Arm(fields["arm"]["name"], tuple(_run(run) for run in fields["arm"]["runs"])),
            "equivalence": None if found is None else Equivalence(**found),
            "verdict": Verdict(**fields["verdict"]),
            "aligned": tuple(
                Aligned(**{**one, "value": _interval(one["value"]), "difference": _interval(one["difference"])})
                for one in fields["aligned"]
            ),
            "differs": {key: tuple(values) for key, values in fields["differs"].items()},
            "remarks": tuple(fields["remarks"]),
        }
    )


def _run(fields: dict[str, Any]) -> RunMeasures:
    return RunMeasures(
        **{
            **fields,
            "overrides": tuple(fields["overrides"]),
            "data": {int(epoch): tuple(digests) for epoch, digests in fields["data"].items()},
            "attempts": tuple(tuple(attempt) for attempt in fields["attempts"]),
            "changes": tuple(fields["changes"]),
        }
    )


def _interval(fields: dict[str, Any] | None) -> Interval | None:
    return None if fields is None else Interval(**fields)
