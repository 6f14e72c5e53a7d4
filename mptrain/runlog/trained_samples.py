"""Record of the samples that a run's weights were trained on: digests, sorted, in one file of the run directory."""

from __future__ import annotations

from pathlib import Path

from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.run_paths import RUN_JSON, RunPaths
from mptrain.system.errors import StorageError
from mptrain.system.files import read_bytes

#: Bytes of a digest (see `mptrain.workloads.base.sample_digests`).
SIZE = 8


def read_trained(weights: Path) -> frozenset[bytes]:
    """Read the digests of the samples that weights were trained on; none without a record or without digests.

    ``weights`` is a run directory, a file inside one, or an exported file, which has the record `beside` it.
    """
    weights = weights.absolute()
    run = next((folder for folder in (weights, *weights.parents[:2]) if (folder / RUN_JSON).is_file()), weights)
    path = beside(weights) if beside(weights).is_file() else RunPaths(run).trained_samples
    if not path.is_file():
        return frozenset()
    with storage_errors(path, "read"):
        content = read_bytes(path)
    if len(content) % SIZE:
        raise StorageError(
            f"{path} is damaged: its size is no multiple of {SIZE} bytes", "restore the file from a copy"
        )
    return frozenset(content[start : start + SIZE] for start in range(0, len(content), SIZE))


def beside(weights: Path) -> Path:
    """Return the path of the record of exported weights outside a run directory."""
    return weights.with_name(f"{weights.name}.trained_samples")


def write_trained(path: Path, digests: frozenset[bytes]) -> None:
    """Write the digests of the samples that weights are trained on, replacing the file atomically."""
    write_atomically(path, b"".join(sorted(digests)))
