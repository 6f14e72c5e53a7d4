"""Handling of unusable samples of a data set (stop with an error, or skip and count) and remarks on converted files."""

from __future__ import annotations

import contextlib
import errno
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from mptrain.system.errors import DataError, UnusableSample

OnError = Literal["stop", "skip"]

Sample = TypeVar("Sample")

#: Part of the message of an OSError for a missing file. A line of a file is a sample too, but has no such error.
_NOT_THERE = f"[Errno {errno.ENOENT}]"


@dataclass
class Check:
    """Unusable samples that a check of all files before training found, with the reasons by file or index.

    Those in ``stopping`` would stop training, those in ``skipped`` would be left out. ``hints`` has advice on those of
    ``stopping`` that ``dataset.on_error=skip`` cannot leave out.
    """

    stopping: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)


_check: Check | None = None


@contextlib.contextmanager
def checking() -> Iterator[Check]:
    """Collect unusable samples in a context, in all threads of this process, instead of raising an error at one."""
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
        found: Reason for each sample left out so far, by file or index.
        remarks: Kind of conversion, such as ``palette``, of each file converted so far.
    """

    on_error: OnError = "stop"
    found: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of samples in ``found`` and of files in ``remarks`` so far, to pass to `since`."""
        return len(self.found), len(self.remarks)

    def since(self, counts: tuple[int, int]) -> Faults:
        """Return what was added after an earlier call of `counts`; a worker process sends it with each batch."""
        new = (
            islice(known.items(), count, None) for known, count in zip((self.found, self.remarks), counts, strict=True)
        )
        return Faults(self.on_error, *map(dict, new))

    def add(self, other: Faults) -> None:
        """Add what another process (a worker of the loader) found."""
        self.found.update(other.found)
        self.remarks.update(other.remarks)

    def report(self, problems: dict[str, str], hint: str = "fix or remove it", *, skippable: bool = True) -> None:
        """Record unusable samples with their reasons by file or index, or raise an error for the first of them.

        Raises:
            UnusableSample: ``problems`` is not empty, and ``on_error`` is ``stop`` or training cannot leave the samples
                out (``skippable``). Never raised inside `checking`.
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

    def first(self) -> str:
        """Return the first unusable sample with its reason, to end a sentence that nothing is left; empty if none."""
        found = self.found or ({} if _check is None else {**_check.stopping, **_check.skipped})
        return next((f": {name}: {reason}" for name, reason in found.items()), "")

    def usable(
        self,
        kind: str,
        names: Sequence[str],
        read: Callable[[int], Sample],
        errors: tuple[type[Exception], ...],
        reason: Callable[[Any], str],
    ) -> list[Sample]:
        """Return what a function reads for a batch, for each position in ``names``, without the unusable samples.

        These raise one of ``errors``, of which ``reason`` makes the message. ``kind`` says what a sample is, such as a
        ``picture``.

        Raises:
            DataError: A sample is unusable and ``on_error`` is ``stop``, or none of them is usable.
        """
        found = []
        for place, name in enumerate(names):
            try:
                found.append(read(place))
            except errors as error:
                self.report({name: reason(error)})
        if not found:
            raise DataError(
                f"no {kind} of the batch is usable; the first is {names[0]}",
                "fix or remove the files, or use a larger train.batch_size",
            )
        return found


def by_remark(remarks: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files by the kind of conversion that they needed when read, the most frequent kind first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, remark in remarks.items():
        kinds[remark].append(name)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def describe(remarks: Mapping[str, str], names: int = 1) -> str:
    """Return the files by kind of conversion as text, such as ``palette: 12 files, such as a.png; CMYK: b.jpg``."""
    parts = []
    for remark, files in by_remark(remarks).items():
        such = f"{len(files):,} files, such as " if len(files) > names else ""
        parts.append(f"{remark}: {such}{', '.join(files[:names])}")
    return "; ".join(parts)
