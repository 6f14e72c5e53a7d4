"""Check of all files of a data set before training, for ``mptrain doctor``."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median_low

import torch

from mptrain.config.schema import Config
from mptrain.run.build.workload import build_dataset, require_facts
from mptrain.system.errors import ConfigError
from mptrain.system.machine import usable_cores
from mptrain.workloads.base.data_files import checking
from mptrain.workloads.base.dataset import Dataset, FileFacts, Split, Survey

#: The maximum number of files read per split; from a larger split, evenly spaced files are read.
FILES = 20_000

PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Copies:
    """Picture files with the same pixels: the name, split and class of each."""

    names: tuple[str, ...]
    splits: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def leak(self) -> bool:
        """True if they are in several splits, so that an evaluation counts a sample of the training."""
        return len(set(self.splits)) > 1

    @property
    def conflict(self) -> bool:
        """True if they are in several classes, so that one of them has a wrong label."""
        return len(set(self.labels)) > 1


@dataclass(frozen=True)
class DataReport:
    """Result of reading the samples of a data set before training.

    Attributes:
        stopping: Problem of each file or sample that would stop training, by file name or sample index; also if the
            data has too few classes for the task.
        skipped: Problem of each file or sample that training would skip, by file name or sample index.
        hints: Advice on those of ``stopping`` that ``dataset.on_error=skip`` cannot leave out, by the same name.
        remarks: Modification of each file that training would use in modified form, by file name.
        read: Number of files read.
        files: Number of files in the data set.
        shape: Shape of a sample in a few words (`Dataset.describe`).
        labels: Names of the classes, or else of the speakers, by index; empty without.
        samples: Number of samples of each split.
        surveys: Counts and lengths of the samples of each split.
        sizes: Number of files of each width and height in pixels, the most frequent first.
        copies: Groups of picture files with the same pixels.
        warnings: Sentences that training would tell about the data, such as the number of files of other kinds, and one
            if pictures are enlarged.
    """

    stopping: Mapping[str, str]
    skipped: Mapping[str, str]
    hints: Mapping[str, str]
    remarks: Mapping[str, str]
    read: int
    files: int
    shape: str
    labels: tuple[str, ...]
    samples: Mapping[str, int]
    surveys: Mapping[str, Survey]
    sizes: Mapping[tuple[int, int], int]
    copies: tuple[Copies, ...]
    warnings: tuple[str, ...]

    @property
    def problems(self) -> int:
        """Number of groups of copies that leak or conflict."""
        return sum(group.leak or group.conflict for group in self.copies)


def check_data(config: Config, tell: Callable[[str], None]) -> DataReport:
    """Load the data set of a configuration and read the files that training would read, without training.

    Unusable samples are collected instead of raised. From a split with more than `FILES` files, evenly spaced ones are
    read. ``tell`` is called with progress messages. Raises DataError if the data is missing, and ConfigError if its
    options are inconsistent.
    """
    remarks: dict[str, str] = {}
    facts: dict[str, list[FileFacts]] = {}
    read = files = 0
    with checking() as check, ThreadPoolExecutor(usable_cores()) as threads, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Pillow about single files
        dataset = build_dataset(config)
        splits: dict[str, Split] = {part: split for part in PARTS if (split := getattr(dataset, part)) is not None}
        for part, split in splits.items():
            count = getattr(split, "files", 0)
            chosen = range(count) if count <= FILES else [index * count // FILES for index in range(FILES)]
            files += count
            facts[part] = []
            for done, file in enumerate(threads.map(split.read, chosen) if chosen else ()):  # type: ignore[attr-defined]
                if done % 100 == 0:
                    tell(f"reading the files of {part}: {done:,} of {len(chosen):,}")
                if file is not None:
                    facts[part].append(file)
            read += len(chosen)
            remarks.update(split.faults.remarks)
    if getattr(dataset, "lacks", {}):
        try:
            require_facts(config, "task", config.task, dataset)
        except ConfigError as error:
            what, _, why = str(error).partition(": ")
            check.stopping[what], check.hints[what] = why, error.hint
    # Threads finish in any order.
    stopping, skipped, remarks = (dict(sorted(names.items())) for names in (check.stopping, check.skipped, remarks))
    labels = _label_names(dataset)
    return DataReport(
        stopping,
        skipped,
        check.hints,
        remarks,
        read,
        files,
        dataset.describe(),
        labels,
        {part: len(split) for part, split in splits.items()},
        {part: _survey(split, facts[part]) for part, split in splits.items()},
        _sizes(facts),
        _copies(facts, labels),
        (*getattr(dataset, "warnings", ()), *_enlarged(dataset, facts)),
    )


def _enlarged(dataset: Dataset, facts: Mapping[str, list[FileFacts]]) -> tuple[str, ...]:
    """Return a sentence if training enlarges the sides of half of the pictures at least twice, or nothing."""
    sides, target = [min(file.size) for files in facts.values() for file in files], dataset.facts().get("image_size", 0)
    if not sides or 2 * (side := median_low(sides)) > target:
        return ()
    return (
        f"pictures are resized to {target}x{target}, and the median of their shorter sides is {side}: "
        f"dataset.image_size={side} would keep that size",
    )


def _label_names(dataset: Dataset) -> tuple[str, ...]:
    facts = dataset.facts()
    return tuple(facts.get("class_names") or facts.get("speaker_names") or ())


def _survey(split: Split, facts: list[FileFacts]) -> Survey:
    survey = split.survey() if hasattr(split, "survey") else Survey()
    if not facts:
        return survey
    sides = torch.tensor([file.size for file in facts])
    return Survey(survey.labels, survey.totals, {**survey.lengths, "width": sides[:, 0], "height": sides[:, 1]})


def _sizes(facts: Mapping[str, list[FileFacts]]) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for files in facts.values():
        for file in files:
            counts[file.size] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _copies(facts: Mapping[str, list[FileFacts]], labels: tuple[str, ...]) -> tuple[Copies, ...]:
    groups: dict[bytes, list[tuple[str, str, str]]] = defaultdict(list)
    for part, files in facts.items():
        for file in sorted(files, key=lambda file: file.name):
            groups[file.content].append((file.name, part, labels[file.label] if labels else ""))
    return tuple(Copies(*zip(*group, strict=True)) for group in groups.values() if len(group) > 1)
