"""A checkpoint's manifest: the small JSON file whose appearance makes a checkpoint valid.

It is read without torch, so that lists and reports can tell which checkpoints a run has.
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
from mptrain.runlog.schema_checks import build
from mptrain.runlog.strict_json import read_object

SCHEMA = 2
LAST = "last"
BEST = "best"
DATA = ".pt"

_NAME = re.compile(r"step-(\d{8,})\.json")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Facts about one checkpoint.

    Attributes:
        step: Attempted steps that it contains.
        file: Name of the data file in the same folder.
        sha256: Hexadecimal digest of the data file.
        bytes: Length of the data file.
        records: Byte length of each record file at that moment, by name.
        metric: The metric of exactly these weights on validation data; None if they were not evaluated.
        config_digest: Digest of the configuration that made it.
        digests: SHA-256 of so many bytes of each record file.
        schema: Version of this layout.
        parts: Name of the folder with the parts of tensors that ranks held (`mptrain.runlog.checkpoint_shards`); empty where there is none.
        part_files: SHA-256 of its files by name.
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
        """The text of the file: indented strict JSON, with a digest of its own fields under ``check``."""
        fields = asdict(self)
        ordered = {"schema": fields.pop("schema"), **fields, "check": self.digest()}
        return json.dumps(ordered, indent=2, allow_nan=False) + "\n"

    def digest(self) -> str:
        """SHA-256 of all fields: it betrays a bit flipped in a length or a metric, still valid JSON."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def manifest_name(step: int) -> str:
    """The file name of a step's manifest: ``step-00000123.json``."""
    return f"step-{step:08d}.json"


def step_of(path: Path) -> int:
    """The step in a manifest's file name; -1 if it is no such name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def manifests_in(folder: Path) -> list[Path]:
    """The manifests in a checkpoint folder, newest step first; empty if there is no such folder.

    Raises:
        StorageError: The folder cannot be read.
    """
    with storage_errors(folder, "read"):
        found = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((path for path in found if step_of(path) >= 0), key=step_of, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        StorageError: It cannot be read, is damaged or of another schema.
    """
    fields = read_object(path, SCHEMA)
    try:
        manifest = build(Manifest, {name: fields[name] for name in Manifest.__dataclass_fields__})
        sound = (
            _is_plain_name(manifest.file)
            and manifest.file.endswith(DATA)
            and all(map(_is_plain_name, (manifest.parts, *manifest.part_files) if manifest.parts else ()))
            and manifest.digest() == fields["check"]
        )
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not sound or manifest.step != step_of(path):
        raise CheckpointError(f"{path} is damaged: its fields do not fit together")
    return manifest


def _is_plain_name(name: str) -> bool:
    """Return whether it is a file in the same folder: never a path out of it."""
    return re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII) is not None and PurePath(name).name == name != ".."
