"""``summary.json`` of a run directory: the final numbers of a training run, with a schema number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mptrain.errors import StorageError
from mptrain.runlog.atomic_files import write_atomically
from mptrain.runlog.schema_checks import (
    Kind,
    each,
    find_mismatch,
    having,
    is_count,
    is_flag,
    is_mapping,
    is_number,
    is_text,
    mapping,
    optional,
)
from mptrain.runlog.strict_json import indented_json, read_object, restore_nonfinite

SCHEMA = 2

_NUMBERS = mapping(optional(is_number))
_LEARNER: dict[str, Kind] = {
    **dict.fromkeys(("updates", "skipped"), is_count),
    "skip_rate": is_number,
    "overflows": mapping(is_count),
    "scale": mapping(is_number),
}
_MEASURED = ("terms_per_second", "steady_terms_per_second", "train_seconds", "data_wait", "energy_joules")

#: Expected kinds of the fields that reports and comparisons read. Other fields are not checked.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("metric_name", "stopped_early"), optional(is_text)),
    "higher_is_better": optional(is_flag),
    **dict.fromkeys(("metric", "best_val", *_MEASURED), optional(is_number)),
    **dict.fromkeys(("metric_split", "term"), is_text),
    "intervals": optional(mapping(optional(lambda ends: each(is_number)(ends) and len(ends) == 2))),
    **dict.fromkeys(("val", "test"), optional(_NUMBERS)),
    "steps": is_count,
    "learners": mapping(having(_LEARNER)),
    **dict.fromkeys(("planned_steps", "steady_steps", "memory_before", "peak_memory", "threads"), optional(is_count)),
    "samples": optional(is_count),
    **dict.fromkeys(("unusable_samples", "converted_files"), optional(mapping(is_count))),
    "facts": optional(is_mapping),
}


def write_summary(path: Path, numbers: Mapping[str, Any]) -> None:
    """Write the final numbers of a run (metrics, counts of updates, times) atomically, as indented strict JSON.

    Non-finite numbers are read back unchanged. Raise ValueError if ``schema`` or ``nonfinite`` is among the names.
    """
    if reserved := {"schema", "nonfinite"} & set(numbers):
        raise ValueError(f"a summary must not contain {sorted(reserved)}")
    write_atomically(path, indented_json({"schema": SCHEMA, **numbers}))


def read_summary(path: Path) -> dict[str, Any]:
    """Read the final numbers of a run, by name and without the schema number; empty if they are not yet written.

    Fields that reports and comparisons use are checked. Raise OtherVersion if another version wrote the file.
    """
    if not (fields := read_object(path, SCHEMA, missing_ok=True)):
        return {}
    del fields["schema"]
    try:
        numbers = restore_nonfinite(fields)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged: its list of non-finite numbers is invalid", "restore it from a copy"
        ) from error
    if wrong := find_mismatch(numbers, _KINDS):
        raise StorageError(f"{path} is damaged: '{wrong}' has an invalid value", "restore it from a copy")
    return numbers
