"""Reports of failed runs: as an error for the user, in ``run.json``, and as a traceback in the folder ``failure``."""

from __future__ import annotations

import contextlib
import re
import traceback
from typing import Any

from mptrain.config.allowed_targets import packages_of_users
from mptrain.config.compose import command_with
from mptrain.config.schema import Config
from mptrain.config.value_checks import first_line
from mptrain.engine.interrupt import EndRequested
from mptrain.engine.rehearsal import rounding_of_indices
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.torchrun import torchrun_command
from mptrain.run.build.workload import name_doctor
from mptrain.runlog import RunDirectory, storage_errors, write_atomically
from mptrain.system.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EnvironmentRefused,
    FirstBatchError,
    MptrainError,
    Preempted,
    StorageError,
    error_in_user_code,
    kernel_refusal,
    out_of_memory,
)


def explain_error(error: BaseException, config: Config, directory: RunDirectory, comm: Communicator) -> BaseException:
    """Convert an exception that ended a run to an error that tells the user the cause and the next command.

    Covered are lost ranks, signals, lack of memory, unusable files, torch.compile, and exceptions raised in a user's
    own packages, whose traceback may be written to the run directory. Any other ``error`` is returned itself.
    """
    name_doctor(error, config)
    if isinstance(error, MptrainError):
        error.hint = _complete(error.hint, config, directory)
    again = _complete(f"continue with: mptrain resume {directory.root}", config, directory)
    if comm.is_lost(error):
        if (why := comm.why()) is not None:
            return why
        return Preempted(f"{comm.who_ended()} before training began", again, EXIT_PREEMPTED, saved=False, asked=False)
    if isinstance(error, KeyboardInterrupt):
        by, code = "interrupted", EXIT_INTERRUPTED
        if isinstance(error, EndRequested):
            by, code = f"{error.name}, ended", EXIT_PREEMPTED
        what = f"{by} at once; resuming repeats the steps after the last checkpoint"
        return Preempted(what, again, code, saved=False)
    if refused := out_of_memory(error, "training") or kernel_refusal(error):
        return refused
    own: BaseException | None = None
    cause: BaseException = error
    if config.train.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        own = EnvironmentRefused(
            f"torch.compile failed: {first_line(error)}",
            "on a CPU it needs a C++ compiler; set train.compile=false to train without it",
        )
    elif isinstance(error, FirstBatchError) and error.__cause__ is not None:
        cause = error.__cause__
        own = _in_user_code(cause, config) or error
    elif isinstance(error, Exception) and not isinstance(error, MptrainError):
        own = _in_user_code(error, config)
    if own is not None:
        failure_status(cause, directory)  # keeps the traceback
    return own or error


def _in_user_code(error: BaseException, config: Config) -> BaseException | None:
    more = rounding_of_indices(config.precision, error)
    return error_in_user_code(error, packages_of_users(config.extensions.allow), more)


def _complete(hint: str, config: Config, directory: RunDirectory) -> str:
    """Return a hint whose commands on the run, here or where it was moved to, have what the run's own code needs."""

    def complete(line: re.Match[str]) -> str:
        command = torchrun_command(line[0]) if line[1] == "resume" else line[0]
        return command_with(command, config.extensions.allow)

    return re.sub(rf"mptrain (resume|diagnose) ({re.escape(str(directory.root))}|/\S+)", complete, hint)


def failure_status(error: BaseException, directory: RunDirectory) -> tuple[Any, str, int]:
    """Return status (``preempted`` or ``failed``), reason as one sentence, and exit code of a failed run.

    The traceback of an unexpected error is written to ``failure/`` of the run directory.
    """
    if isinstance(error, Preempted):
        return "preempted", str(error), error.exit_code
    if isinstance(error, MptrainError):
        return "failed", str(error), error.exit_code
    with contextlib.suppress(OSError, StorageError):
        with storage_errors(directory.paths.failure):
            directory.paths.failure.mkdir(exist_ok=True)
        write_atomically(directory.paths.failure / "traceback.txt", "".join(traceback.format_exception(error)))
    return "failed", f"{type(error).__name__}: {error}", EXIT_BUG
