"""Handling of unusable samples of a data set (stop with an error, or skip and count) and remarks on converted files."""

from __future__ import annotations

import contextlib
import errno
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from mptrain.errors import DataError, UnusableSample

OnError = Literal["stop", "skip"]

#: Part of the message of an OSError for a missing file. A line of a file is a sample too, but has no such error.
_NOT_THERE = f"[Errno {errno.ENOENT}]"


def none_usable(what: str, first: str) -> DataError:
    """Return the error for a training or evaluation batch that has no sample left after skipping unusable ones.

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
    """Result of a check of all files of a data set before training: the unusable samples, each with the reason.

    Attributes:
        stopping: Samples that would stop training, by file or index, with the reason.
        skipped: Samples that training would skip, by file or index, with the reason.
        hints: Advice on those of ``stopping`` that ``dataset.on_error=skip`` cannot leave out, by file or index.
    """

    stopping: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)


_check: Check | None = None


@contextlib.contextmanager
def checking() -> Iterator[Check]:
    """Collect unusable samples in a context, in all threads of this process, instead of raising an error at the first.

    Yields:
        The `Check` to which `Faults.report` adds the samples.
    """
    global _check
    _check = Check()
    try:
        yield _check
    finally:
        _check = None


@dataclass
class Faults:
    """Unusable samples and converted files found so far in one split of a data set.

    Attributes:
        on_error: Reaction to an unusable sample: ``stop`` raises an error at the first one; ``skip`` leaves it out.
        found: Reasons for the samples left out so far, by file or index. Each sample appears once.
        remarks: Kinds of conversion of the files converted so far (such as ``palette``), by file. Each file appears
            once.
    """

    on_error: OnError = "stop"
    found: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of unusable samples in ``found`` and files in ``remarks`` so far, to pass to `since`."""
        return len(self.found), len(self.remarks)

    def since(self, counts: tuple[int, int]) -> Faults:
        """Return only the unusable samples and remarks that were added after an earlier call of `counts`.

        A worker process sends these to the training process after each batch.

        Args:
            counts: Result of the earlier call.
        """
        new = (
            islice(known.items(), count, None) for known, count in zip((self.found, self.remarks), counts, strict=True)
        )
        return Faults(self.on_error, *map(dict, new))

    def add(self, other: Faults) -> None:
        """Add the unusable samples and remarks that another process (a worker of the loader) found."""
        self.found.update(other.found)
        self.remarks.update(other.remarks)

    def report(self, problems: dict[str, str], hint: str = "fix or remove it", *, skippable: bool = True) -> None:
        """Record unusable samples, or raise an error for the first of them.

        Args:
            problems: Reason by file or index of each unusable sample; may be empty.
            hint: Advice for the user other than skipping the samples.
            skippable: Whether training can leave the samples out.

        Raises:
            UnusableSample: ``problems`` is not empty and ``on_error`` is ``stop`` or the samples cannot be left out.
                Never raised inside `checking`.
            DataError: A folder was removed while training.
        """
        if not problems:
            return
        stops = self.on_error == "stop" or not skippable
        if _check is not None:
            (_check.stopping if stops else _check.skipped).update(problems)
            _check.hints.update({} if skippable else dict.fromkeys(problems, hint))
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
            raise UnusableSample(f"{name}: {reason}{more}", f"{hint}{otherwise}")
        self.found.update(problems)


def by_remark(remarks: Mapping[str, str]) -> dict[str, list[str]]:
    """Group files by the kind of conversion that they needed when read, the most frequent kind first.

    Args:
        remarks: Kind of conversion by file, from `Faults.remarks`.

    Returns:
        The files of each kind, by kind, such as ``{"palette": ["a.png", "b.png"]}``.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, remark in remarks.items():
        kinds[remark].append(name)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def describe(remarks: Mapping[str, str], names: int = 1) -> str:
    """Return a text that lists the kinds of converted files, each with its number of files and the first names.

    Args:
        remarks: Kind of conversion by file, from `Faults.remarks`.
        names: Number of files to name for each kind.

    Example:
        ``palette: 12 files, such as a.png; CMYK: b.jpg``
    """
    parts = []
    for remark, files in by_remark(remarks).items():
        such = f"{len(files):,} files, such as " if len(files) > names else ""
        parts.append(f"{remark}: {such}{', '.join(files[:names])}")
    return "; ".join(parts)
