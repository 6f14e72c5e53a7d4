"""Manifest of a checkpoint: a small JSON file beside the data file. A checkpoint is valid once its manifest exists.

This module must not import torch, so that lists and reports can read manifests quickly.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath

from mptrain.errors import CheckpointError
from mptrain.fields import NonNegativeInt
from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.strict_json import read_object

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
        parts: Name of the folder of tensor shards (`mptrain.runlog.checkpoint_shards`); empty if there is none.
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
        found = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((path for path in found if step_of(path) >= 0), key=step_of, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint and verify its own digest; the data file is not read."""
    fields = read_object(path, SCHEMA)
    try:
        manifest = Manifest(**{name: fields[name] for name in Manifest.__dataclass_fields__})
        sound = (
            _has_own_types(manifest)
            and _is_plain_name(manifest.file)
            and manifest.file.endswith(DATA)
            and all(map(_is_plain_name, (manifest.parts, *manifest.part_files) if manifest.parts else ()))
            and manifest.digest() == fields["check"]
        )
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not sound or manifest.step != step_of(path):
        raise CheckpointError(f"{path} is damaged: its fields are inconsistent")
    return manifest


def _has_own_types(manifest: Manifest) -> bool:
    """Return whether all fields have their types; by hand, because writing checkpoints must not need pydantic."""
    tables = (manifest.records, manifest.digests, manifest.part_files)
    if not _are(dict, *tables):
        return False
    texts = (manifest.file, manifest.sha256, manifest.config_digest, manifest.parts)
    counts = (manifest.step, manifest.bytes, *manifest.records.values())
    return (
        _are(str, *texts, *manifest.digests.values(), *manifest.part_files.values())
        and _are(int, *counts)
        and 0 <= min(counts) <= max(counts) < 2**63
        and _is_metric(manifest.metric)
    )


def _is_metric(value: object) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)


def _are(kind: type, *values: object) -> bool:
    return all(type(value) is kind for value in values)


def _is_plain_name(name: str) -> bool:
    """Return whether a name denotes a file in the same folder, so that it cannot lead out of it."""
    return re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII) is not None and PurePath(name).name == name != ".."
