"""Errors of a run on several ranks: a rank that was lost, and the error of one rank on the others."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping

from mptrain.system.errors import EXIT_OK, EXIT_PREEMPTED, MptrainError, Preempted


class RankLost(Preempted):
    """Error raised when another rank has exited or stopped responding; the run can resume from its last checkpoint."""

    def __init__(self, message: str = "another rank has exited or does not respond") -> None:
        super().__init__(message, "run the command again", EXIT_PREEMPTED, saved=False, asked=False)


class RankFailed(MptrainError):
    """Error raised on this rank when another rank has failed with an exception that is not an `MptrainError`."""


def published_error(kind: str, message: str, hint: str, code: int) -> MptrainError:
    """Return an error that another rank has published: its class, message, hint and exit code."""
    error = RankFailed(message, hint)
    if kind != RankFailed.__name__:
        error.exit_code = code  # type: ignore[misc]
    return error


def error_for_other_ranks(error: Exception, rank: int) -> MptrainError:
    """Return a picklable form of one rank's error, with the rank in its message, to raise on other ranks.

    It has the type, exit code and hint of an `MptrainError`; preemption and any other error become a `RankFailed`.
    """
    if isinstance(error, MptrainError) and not isinstance(error, RankFailed | Preempted):
        twin = copy.copy(error)
        twin.args = (f"rank {rank}: {error}",)
        twin.__cause__ = twin.__context__ = None
        twin.__traceback__ = None
        return twin
    lines = str(error).splitlines() or ["no message"]
    return RankFailed(f"rank {rank}: {type(error).__name__}: {lines[0]}")


def describe_ended_rank(children: Mapping[int, int]) -> str:
    """Return a phrase about a forked rank that was lost, such as ``rank 1 was killed by SIGKILL``; else empty.

    A rank that exited with exit code 0 has done its work and is not lost. If several have exited, the first cause is
    reported: a rank killed by a signal before one that exited with an error, and that before one that exited because it
    had lost another rank. Exit statuses remain available to `os.waitpid`. ``children`` has the rank by process ID.
    """
    ends: list[tuple[int, str]] = []
    for pid, rank in children.items():
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if found is not None and found.si_code != os.CLD_EXITED:
            ends.append((0, f"rank {rank} was killed by {signal.Signals(found.si_status).name}"))
        elif found is not None and found.si_status != EXIT_OK:
            lost_others = found.si_status == EXIT_PREEMPTED
            ends.append((1 + lost_others, f"rank {rank} exited with exit code {found.si_status}"))
    return min(ends, default=(0, ""), key=lambda end: end[0])[1]


#: Parts of the messages of gloo, NCCL and their sockets when a peer has exited or does not respond.
_LOSSES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "gloo/transport",
    "timed out waiting",
    "nccl communicator was aborted",
    "remote process exited",
    "socket timeout",
    "failed to recv",
    "failed to send",
)


def is_rank_loss(error: BaseException) -> bool:
    """Return whether an exception means that another rank has exited or does not respond.

    True for `RankLost`, for `torch.distributed.DistError`, and for a RuntimeError whose message says so.
    """
    if isinstance(error, RankLost):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or any(words in text for words in _LOSSES)
