"""Early end of a run after a signal, a lost rank or too many overflows, saving all that can be saved."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mptrain.engine.buffer_guard import Thawed
from mptrain.engine.failure_diagnosis import diagnose_overflows, is_finite
from mptrain.parallel.rank_errors import RankLost
from mptrain.system.errors import EXIT_PREEMPTED, NumericsError, Preempted

if TYPE_CHECKING:
    from mptrain.engine.checkpointing import Checkpointing
    from mptrain.engine.parts import Parts, Progress
    from mptrain.engine.step_log import LearnerLog
    from mptrain.engine.telemetry import Telemetry
    from mptrain.runlog.run_paths import RunPaths
    from mptrain.workloads.base.batch import Batch

#: What distributed=fsdp2 needs, and a cause of ranks that end without a word.
SAME_MODULES = (
    "distributed=fsdp2 needs all ranks to run the same modules in every pass, so draw what is left out alike on all "
    "ranks, or choose distributed=ddp"
)


class Termination:
    """Early end of a run: saves what can be saved and raises an error that says how to continue."""

    def __init__(
        self,
        parts: Parts,
        paths: RunPaths,
        progress: Progress,
        planned: int,
        telemetry: Telemetry,
        checkpointing: Checkpointing,
    ) -> None:
        self._parts, self._paths = parts, paths
        self._progress, self._planned = progress, planned
        self._telemetry, self._checkpointing = telemetry, checkpointing

    def by_signal(self, name: str, exit_code: int) -> NoReturn:
        """Save the run after a signal, then raise Preempted, which says how to resume."""
        self._telemetry.step_log.flush()
        self._telemetry.event("signal", signal=name)
        self._checkpointing.save(wait=True)
        raise Preempted(
            f"{'Ctrl-C' if name == 'SIGINT' else name}, {self._saved()}",
            f"continue with: mptrain resume {self._paths.root}",
            exit_code,
        )

    def by_lost_rank(self, error: BaseException, *, within_step: bool) -> NoReturn:
        """Save the run after another rank was lost, if this rank has the whole state; then raise an error.

        Within a step, every exchange between ranks precedes all changes, so only buffers may have changed. Raises the
        error that the lost rank reported, or else Preempted, which says how to resume.
        """
        comm, saver = self._parts.comm, self._checkpointing.saver
        why = comm.why()
        saved = comm.is_rank_zero and self._complete_here()
        if saved:
            if within_step:
                self._parts.plan.guard.restore(torch.ones(1, device=self._parts.device))
            self._checkpointing.save(wait=True)
        else:
            with contextlib.suppress(RankLost):  # a copy from the device may never complete
                saver.wait()
        if why is not None:
            raise why from error
        raise Preempted(
            f"{comm.who_ended()}; {self._saved() if saved else 'not saved; resuming starts from the last checkpoint'}",
            f"continue with: mptrain resume {self._paths.root}"
            + (f"; if it ends again: {SAME_MODULES}" if self._parts.blank is not None else ""),
            EXIT_PREEMPTED,
            saved=saved,
            asked=False,
        ) from error

    def by_thawed(self, error: Thawed) -> NoReturn:
        """Save the run as it was before the step in which a frozen parameter began to learn, then raise the error."""
        self._parts.plan.guard.restore(torch.ones(1, device=self._parts.device))
        self._checkpointing.save(wait=True)
        raise Thawed(f"{error}; {self._saved()}", error.hint) from error

    def by_overflows(self, log: LearnerLog, batch: Batch, given: Batch, random: Mapping[str, Any]) -> NoReturn:
        """Diagnose a run whose gradients overflow in every step, save its last batch, and its weights if finite.

        ``given`` is the batch with an injected fault, if there is one; ``random`` is the random state before that step.
        Raises NumericsError with the cause and a suggested fix.
        """
        failure: Path = self._paths.failure
        diagnosis = diagnose_overflows(self._parts, log, self._progress, batch, given, random, failure)
        sound = self._parts.comm.all_reduce_ints([not is_finite(self._parts)]) == [0]
        self._telemetry.event("failure", cause=diagnosis.cause)
        if sound:
            self._checkpointing.save(wait=True)
            kept = f"; weights and batch are saved in {self._paths.root}"
        else:
            kept = f"; the batch is saved in {failure}"
        closer = f"{diagnosis.advice}; mptrain diagnose {self._paths.root} tries this on the saved step"
        raise NumericsError(diagnosis.describe() + kept, closer)

    def _saved(self) -> str:
        return f"saved after step {self._progress.step} of {self._planned}"

    def _complete_here(self) -> bool:
        """Return whether this rank alone has the whole state and its current step has changed none of it."""
        parts = self._parts
        sharded = any(learner.weights.sharded for learner in parts.learners)
        return parts.device.type == "cpu" and len(parts.learners) == 1 and not sharded and not parts.carried()
