"""Training of a run for a Python program: what its calls leave as it was, and a module that gets the weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mptrain.api.given import put_weights
from mptrain.cli.train import displays
from mptrain.engine.options import StopFunction
from mptrain.run.attempt import RunInfo, RunOutcome, Show
from mptrain.runlog.record_writer import Sink
from mptrain.system.errors import MptrainError, UsageError, instance
from mptrain.system.process_state import caller_restored


def trained(start: Callable[[Show], RunOutcome], callbacks: Any, module: Any, *, show: bool) -> Path:
    """Train a run, and return its directory; a ``torch.nn.Module`` gets the weights of its last checkpoint.

    Args:
        start: Function that starts or resumes the run, with sinks for its records.
        callbacks: Sinks of the program.
        module: The module; anything else is left alone.
        show: Print the run's progress.
    """
    if not isinstance(callbacks, Sequence) or not all(map(_is_sink, callbacks)):
        raise UsageError("callbacks is no list of sinks", "give a list of objects with take(record) and close()")
    roots: list[Path] = []

    def sinks(info: RunInfo) -> Sequence[Sink]:
        roots.append(info.root)
        return [*(displays(info) if show else ()), *callbacks]

    with caller_restored(), _updated(module, roots):
        roots.append(start(sinks).root)
    return roots[-1]


@contextlib.contextmanager
def _updated(module: Any, roots: Sequence[Path]) -> Iterator[None]:
    """Give a `torch.nn.Module` the weights of the last checkpoint of the run in ``roots``, also after an error."""
    from torch import nn

    if not isinstance(module, nn.Module):
        yield
        return
    try:
        yield
    except MptrainError as error:
        with contextlib.suppress(MptrainError):  # report the original failure
            step = put_weights(module, roots[-1]) if roots else None
            state = "as it was" if step is None else f"as after step {step:,}, its last checkpoint"
            error.hint = f"{error.hint}; the model is {state}" if error.hint else f"the model is {state}"
        raise
    put_weights(module, roots[-1])


def _is_sink(sink: Any) -> bool:
    return not isinstance(sink, type) and all(callable(getattr(sink, name, None)) for name in ("take", "close"))


def stop_function(stop: Any) -> StopFunction | None:
    """Return what a program gives as ``stop``; raise UsageError if it cannot be called."""
    if stop is None:
        return None
    what = "" if callable(stop) else f"stop is {instance(stop)}"
    with contextlib.suppress(ValueError):  # a function of C says nothing of its arguments
        if not what and not _takes_one(inspect.signature(stop)):
            what = "stop takes no single argument"
    if what:
        raise UsageError(what, "give a function of the dict of metrics: stop=lambda metrics: metrics['loss'] < 0.1")
    return stop  # type: ignore[no-any-return]


def _takes_one(signature: inspect.Signature) -> bool:
    try:
        signature.bind({})
    except TypeError:
        return False
    return True
