"""Reports of failed runs: as an error for the user, in ``run.json``, and as a traceback in the folder ``failure``."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import Any

from mptrain.config.build_workload import name_doctor
from mptrain.config.schema import Config
from mptrain.config.targets import is_allowed
from mptrain.config.trust import allow_argument, search_path
from mptrain.config.value_checks import first_line
from mptrain.engine.interrupt import EndRequested
from mptrain.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    ConfigError,
    EnvironmentRefused,
    FirstBatchError,
    MptrainError,
    NumericsError,
    Preempted,
    StorageError,
    kernel_refusal,
    out_of_memory,
)
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.torchrun import torchrun_command
from mptrain.runlog import RunDirectory, storage_errors, write_atomically


def explain_error(error: BaseException, config: Config, directory: RunDirectory, comm: Communicator) -> BaseException:
    """Convert an exception that ended a run to an error that tells the user the cause and the next command.

    Covered are lost ranks, signals, lack of memory, unusable files, torch.compile, and exceptions raised in a user's
    own packages, whose traceback may be written to the run directory. Any other ``error`` is returned itself.
    """
    name_doctor(error, config)
    trust = allow_argument(config.extensions.allow)
    resume = search_path(config.extensions.allow) + torchrun_command("mptrain resume")
    again = f"continue with: {resume} {directory.root}{trust}"
    if comm.is_lost(error):
        if (why := comm.why()) is not None:
            return why
        return Preempted(f"{comm.who_ended()} before training began", again, EXIT_PREEMPTED, saved=False, asked=False)
    if isinstance(error, NumericsError) and trust:
        line = f"mptrain diagnose {directory.root}"
        whole = f"{search_path(config.extensions.allow)}{line}{trust}"
        return NumericsError(str(error), error.hint.replace(line, whole))
    if isinstance(error, Preempted) and (trust or resume not in error.hint):
        hint = error.hint.replace("mptrain resume", resume)
        return Preempted(str(error), f"{hint}{trust}", error.exit_code, saved=error.saved, asked=error.asked)
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
        own = error_in_user_code(cause, config) or error
    elif isinstance(error, Exception) and not isinstance(error, MptrainError):
        own = error_in_user_code(error, config)
    if own is not None:
        failure_status(cause, directory)  # keeps the traceback
    return own or error


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


def error_in_user_code(error: BaseException, config: Config) -> ConfigError | None:
    """Return an error that blames a user's own package for an exception that was raised in it.

    It names the innermost line in a package of ``extensions.allow``; None if the traceback passes through none.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if is_allowed(module, config.extensions.allow) and not is_allowed(module, ("mptrain",)):
            place = f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
    if place is None:
        return None
    return ConfigError(
        f"{place}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}",
        "this code is allowed by extensions.allow; the full traceback is in the run's failure folder",
    )
