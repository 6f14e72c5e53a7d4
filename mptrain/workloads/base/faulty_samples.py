"""Treatment of samples that cannot be used (stop and name them, or leave them out and count them), and remarks about those that can."""

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

#: In the words of an OSError whose file has gone; a sample that is none by itself, such as a line, is not told so.
_NOT_THERE = f"[Errno {errno.ENOENT}]"


def none_usable(what: str, first: str) -> DataError:
    """What to raise where skipping leaves nothing of a batch.

    Args:
        what: A sample, in one word: ``picture``.
        first: What the first of the batch is called, such as its file.
    """
    return DataError(
        f"no {what} of a batch can be used, the first of them {first}",
        "mend or remove the files, or choose a larger train.batch_size",
    )


@dataclass
class Check:
    """All unusable samples of a data set: file or index, and what is wrong with it.

    Attributes:
        stopping: Those that training stops at.
        skipped: Those that it leaves out.
    """

    stopping: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


_check: Check | None = None


@contextlib.contextmanager
def checking() -> Iterator[Check]:
    """Collect unusable samples instead of stopping at the first, in all threads of this process."""
    global _check
    _check = Check()
    try:
        yield _check
    finally:
        _check = None


@dataclass
class Faults:
    """The unusable samples of one split, and those that are used but not as they are.

    Attributes:
        on_error: ``stop`` raises at the first; ``skip`` goes on without the sample.
        found: The samples left out so far: file or index, and what was wrong with it. Each sample once.
        remarks: The files used so far that had to be converted, and how. Each file once.
    """

    on_error: OnError = "stop"
    found: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def counts(self) -> tuple[int, int]:
        """Return how many samples were found and remarked on so far; see `since`."""
        return len(self.found), len(self.remarks)

    def since(self, counts: tuple[int, int]) -> Faults:
        """Return what was added after `counts`."""
        new = (
            islice(known.items(), count, None) for known, count in zip((self.found, self.remarks), counts, strict=True)
        )
        return Faults(self.on_error, *map(dict, new))

    def add(self, other: Faults) -> None:
        """Take over what another process found."""
        self.found.update(other.found)
        self.remarks.update(other.remarks)

    def report(self, problems: dict[str, str], hint: str = "mend or remove it", *, skippable: bool = True) -> None:
        """Take note of unusable samples.

        Args:
            problems: File or index of each, and what is wrong with it; may be empty.
            hint: What else to do about them than to leave them out.
            skippable: They can be left out.

        Raises:
            DataError: There are any and ``on_error`` is ``stop``, or they cannot be left out. Never inside `checking`.
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
                    f"{name}: the folder {missing[-1]} is not there any more",
                    "bring it back; a run goes on from its last checkpoint",
                )
            more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
            otherwise = ", or set dataset.on_error=skip to leave out and count such" if skippable else ""
            raise DataError(f"{name}: {reason}{more}", f"{hint}{otherwise}")
        self.found.update(problems)


def by_remark(remarks: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files of each kind of remark, the most frequent kind first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, remark in remarks.items():
        kinds[remark].append(name)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def describe(remarks: Mapping[str, str], names: int = 1) -> str:
    """Return how many files there are of each kind of remark, with the first ``names`` of them."""
    parts = []
    for remark, files in by_remark(remarks).items():
        such = f"{len(files):,} files, such as " if len(files) > names else ""
        parts.append(f"{remark}: {such}{', '.join(files[:names])}")
    return "; ".join(parts)
