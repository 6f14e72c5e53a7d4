"""Check of all files of a data set before training, for ``mptrain doctor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mptrain.config.build_workload import build_dataset
from mptrain.config.schema import Config
from mptrain.machine import usable_cores
from mptrain.workloads.base.faulty_samples import checking

#: The maximum number of files read per split; from a larger split, evenly spaced files are read.
FILES = 20_000


@dataclass(frozen=True)
class DataReport:
    """Result of reading the samples of a data set before training.

    Attributes:
        stopping: Problem of each file or sample that would stop training, by file name or sample index.
        skipped: Problem of each file or sample that training would skip, by file name or sample index.
        remarks: Modification of each file that training would use in modified form, by file name.
        read: Number of files read.
        files: Number of files in the data set.
    """

    stopping: Mapping[str, str]
    skipped: Mapping[str, str]
    remarks: Mapping[str, str]
    read: int
    files: int


def check_data(config: Config, tell: Callable[[str], None]) -> DataReport:
    """Load the data set of a configuration and read the files that training would read, without training.

    Unusable samples are collected instead of raised. From a split with more than `FILES` files, evenly spaced ones are
    read.

    Args:
        config: A checked configuration.
        tell: Function that is called with progress messages.

    Raises:
        DataError: The data is missing.
        ConfigError: The data options are inconsistent.
    """
    remarks: dict[str, str] = {}
    read = files = 0
    with checking() as check, ThreadPoolExecutor(usable_cores()) as threads:
        dataset = build_dataset(config)
        for part in ("train", "val", "test"):
            split = getattr(dataset, part)
            count = getattr(split, "files", 0)
            chosen = range(count) if count <= FILES else [place * count // FILES for place in range(FILES)]
            files += count
            for done, _ in enumerate(threads.map(split.read, chosen) if chosen else ()):
                if done % 100 == 0:
                    tell(f"reading the files of {part}: {done:,} of {len(chosen):,}")
            read += len(chosen)
            if split is not None:
                remarks.update(split.faults.remarks)
    # Threads finish in any order.
    stopping, skipped, remarks = (dict(sorted(names.items())) for names in (check.stopping, check.skipped, remarks))
    return DataReport(stopping, skipped, remarks, read, files)
