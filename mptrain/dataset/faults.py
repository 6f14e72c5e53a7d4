"""What happens to samples that cannot be used: stop and name them, or leave them out and count."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
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
class Faults:
    """The unusable samples of one split.

    Attributes:
        on_error: ``stop`` raises at the first; ``skip`` goes on without the sample.
        found: The samples left out so far: file or index, and what was wrong with it. Each sample once.
    """

    on_error: OnError = "stop"
    found: dict[str, str] = field(default_factory=dict)

    def report(self, problems: dict[str, str], hint: str = "mend or remove it") -> None:
        """Take note of unusable samples.

        Args:
            problems: File or index of each, and what is wrong with it; may be empty.
            hint: What else to do about them than to leave them out.

        Raises:
            DataError: There are any and ``on_error`` is ``stop``.
        """
        if not problems:
            return
        if self.on_error == "stop":
            name, reason = next(iter(problems.items()))
            missing = [folder for folder in Path(name).parents if not folder.exists()] if _NOT_THERE in reason else []
            if missing:
                raise DataError(
                    f"{name}: the folder {missing[-1]} is not there any more",
                    "bring it back; a run goes on from its last checkpoint",
                )
            more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
            raise DataError(
                f"{name}: {reason}{more}", f"{hint}, or set dataset.on_error=skip to leave out and count such"
            )
        self.found.update(problems)
