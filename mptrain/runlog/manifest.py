"""Manifest of a checkpoint: a small JSON file beside the data file. A checkpoint is valid once its manifest exists.

This module must not import torch, so that lists and reports can read manifests quickly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import CheckpointError
from mptrain.system.fields import NonNegativeInt

SCHEMA = 2
LAST = "last"
BEST = "best"
DATA = ".pt"

_NAME = re.compile(r"step-(\d{8,})\.json")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a checkpoint: the content of ``step-NUMBER.json``, which names and verifies the data file.

    Attributes:
        step: Number of steps attempted before the checkpoint, skipped ones included.
        file: Name of the data file in the same folder.
        sha256: Hexadecimal SHA-256 of the data file.
        bytes: Length of the data file.
        records: Byte length of each record file (``steps.jsonl`` ...) at the time of the checkpoint, by name; a resumed
            run truncates the files to it.
        metric: The metric of exactly these weights on validation data; None if they were not evaluated.
        digests: SHA-256 of each record file up to its length in ``records``, by name.
        schema: Version of the file's layout.
        parts: Name of the folder of tensor shards (`mptrain.runlog.checkpoint_data`); empty if there is none.
        part_files: SHA-256 of the shard files by name.
    """

    step: NonNegativeInt
    file: str
    sha256: str
    bytes: NonNegativeInt
    records: dict[str, NonNegativeInt]
    metric: float | None
    config_digest: str
    digests: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA
    parts: str = ""
    part_files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the manifest as indented strict JSON, with a digest of its own fields under ``check``."""
        fields = asdict(self)
        ordered = {"schema": fields.pop("schema"), **fields, "check": self.digest()}
        return json.dumps(ordered, indent=2, allow_nan=False) + "\n"

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of the manifest's own fields, which detects a flipped bit in a number."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def manifest_name(step: int) -> str:
    """Return the file name of the manifest of a step's checkpoint, such as ``step-00000123.json``."""
    return f"step-{step:08d}.json"


def step_of(path: Path) -> int:
    """Return the step number in the file name of a checkpoint's manifest; -1 for a path with any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def manifests_in(folder: Path) -> list[Path]:
    """List the manifests of the checkpoints in a folder, highest step first; empty if the folder does not exist."""
    with storage_errors(folder, "read"):
        paths = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((path for path in paths if step_of(path) >= 0), key=step_of, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint and verify its own digest; the data file is not read."""
    fields = read_object(path, SCHEMA)
    if missing := Manifest.__dataclass_fields__.keys() - fields.keys():
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
    if not _is_well_typed(fields):
        raise CheckpointError(f"{path} is damaged: its fields have invalid values")
    manifest = Manifest(**{name: fields[name] for name in Manifest.__dataclass_fields__})
    sound = (
        _is_plain_name(manifest.file)
        and manifest.file.endswith(DATA)
        and all(map(_is_plain_name, (manifest.parts, *manifest.part_files) if manifest.parts else ()))
        and manifest.digest() == fields.get("check")
    )
    if not sound or manifest.step != step_of(path):
        raise CheckpointError(f"{path} is damaged: its fields are inconsistent")
    return manifest


def _is_well_typed(fields: Mapping[str, Any]) -> bool:
    """Return whether fields have the types of a manifest; without pydantic, because saving a checkpoint needs it."""
    match fields:
        case {
            "step": int(step),
            "file": str(),
            "sha256": str(),
            "bytes": int(size),
            "records": dict(records),
            "metric": None | int() | float() as metric,
            "config_digest": str(),
            "digests": dict(digests),
            "parts": str(),
            "part_files": dict(part_files),
        }:
            return (
                all(type(count) is int and 0 <= count < 2**63 for count in (step, size, *records.values()))
                and all(type(text) is str for text in (*digests.values(), *part_files.values()))
                and type(metric) is not bool
                and abs(metric or 0) < 2**1000
            )
    return False


def _is_plain_name(name: str) -> bool:
    """Return whether a name denotes a file in the same folder, so that it cannot lead out of it."""
    return re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII) is not None and PurePath(name).name == name != ".."
