"""Handling of unusable samples (stop with an error, or skip and count) and remarks about converted files."""

from __future__ import annotations

import contextlib
import errno
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from mptrain.errors import DataError

OnError = Literal["stop", "skip"]

#: Part of the message of an OSError for a missing file. A line of a file is a sample too, but has no such error.
_NOT_THERE = f"[Errno {errno.ENOENT}]"


def none_usable(what: str, first: str) -> DataError:
    """Return the error for a batch that has no sample left after skipping.

    Args:
        what: Word for a sample, such as ``picture``.
        first: Name of the first sample of the batch, such as its file.
    """
    return DataError(
        f"no {what} of the batch is usable; the first is {first}",
        "fix or remove the files, or use a larger train.batch_size",
    )


@dataclass
class Check:
    """All unusable samples of a data set: file or index of each, with the reason.

    Attributes:
        stopping: Samples that stop training.
        skipped: Samples that training skips.
    """

    stopping: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


_check: Check | None = None


@contextlib.contextmanager
def checking() -> Iterator[Check]:
    """Collect unusable samples in all threads of this process instead of stopping at the first."""
    global _check
    _check = Check()
    try:
        yield _check
    finally:
        _check = None


@dataclass
class Faults:
    """Unusable samples and converted files of one split.

    Attributes:
        on_error: ``stop`` raises an error at the first unusable sample; ``skip`` leaves the sample out.
        found: Samples left out so far: file or index of each, with the reason. Each sample appears once.
        remarks: Files that were converted so far, with the kind of conversion. Each file appears once.
    """

    on_error: OnError = "stop"
    found: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def counts(self) -> tuple[int, int]:
        """Return the number of entries in ``found`` and in ``remarks`` so far; see `since`."""
        return len(self.found), len(self.remarks)

    def since(self, counts: tuple[int, int]) -> Faults:
        """Return the entries added after an earlier call of `counts`."""
        new = (
            islice(known.items(), count, None) for known, count in zip((self.found, self.remarks), counts, strict=True)
        )
        return Faults(self.on_error, *map(dict, new))

    def add(self, other: Faults) -> None:
        """Add the entries that another process found."""
        self.found.update(other.found)
        self.remarks.update(other.remarks)

    def report(self, problems: dict[str, str], hint: str = "fix or remove it", *, skippable: bool = True) -> None:
        """Record unusable samples, or raise an error.

        Args:
            problems: File or index of each sample, with the reason; may be empty.
            hint: Advice for the user other than skipping the samples.
            skippable: Whether the samples can be left out.

        Raises:
            DataError: ``problems`` is not empty and ``on_error`` is ``stop`` or the samples cannot be left out.
                Never raised inside `checking`.
        """
        if not problems:
            return
        stops = self.on_error == "stop" or not skippable
        if _check is not None:
            (_check.stopping if stops else _check.skipped).update(problems)
        elif stops:
            name, reason = next(iter(problems.items()))
            missing = [folder for folder in Path(name).parents if not folder.exists()] if _NOT_THERE in reason else []
            if missing:
                raise DataError(
                    f"{name}: the folder {missing[-1]} no longer exists",
                    "restore the folder, then resume the run from its last checkpoint",
                )
            more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
            otherwise = ", or set dataset.on_error=skip to skip and count such samples" if skippable else ""
            raise DataError(f"{name}: {reason}{more}", f"{hint}{otherwise}")
        self.found.update(problems)


def by_remark(remarks: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files of each kind of remark, the most frequent kind first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, remark in remarks.items():
        kinds[remark].append(name)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def describe(remarks: Mapping[str, str], names: int = 1) -> str:
    """Return a text with the number of files of each kind of remark and the first ``names`` of them."""
    parts = []
    for remark, files in by_remark(remarks).items():
        such = f"{len(files):,} files, such as " if len(files) > names else ""
        parts.append(f"{remark}: {such}{', '.join(files[:names])}")
    return "; ".join(parts)
