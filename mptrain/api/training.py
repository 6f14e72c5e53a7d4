"""Training of a run for a Python program: what its calls leave as it was, and a module that gets the weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mptrain.api.given import put_weights
from mptrain.cli.train import displays
from mptrain.config.targets import Given
from mptrain.run.attempt import RunInfo, RunOutcome, Show
from mptrain.runlog.record_writer import Sink
from mptrain.system.errors import MptrainError, UsageError, instance
from mptrain.system.process_state import caller_restored


def trained(
    start: Callable[[Show], RunOutcome], given: Mapping[str, Given], callbacks: Any, *, update: bool, show: bool
) -> Path:
    """Train a run, and return its directory; the module that a program has given gets the weights at the end.

    An error has the directory as its ``run``, if there is one.

    Args:
        start: Function that starts or resumes the run, with sinks for its records.
        given: What the program gives, by group.
        callbacks: Sinks of the program.
        update: Give the module the weights of the last checkpoint, also after an error.
        show: Print the run's progress.
    """
    if not isinstance(callbacks, Sequence) or not all(map(_is_sink, callbacks)):
        raise UsageError("callbacks is no list of sinks", "give a list of objects with take(record) and close()")
    module = given["model"].module if update and "model" in given else None
    roots: list[Path] = []

    def sinks(info: RunInfo) -> Sequence[Sink]:
        roots.append(info.root)
        return [*(displays(info) if show else ()), *callbacks]

    try:
        with caller_restored():
            roots.append(start(sinks).root)
    except MptrainError as error:
        error.run = roots[-1] if roots else None
        if module is not None:
            with contextlib.suppress(MptrainError):  # report the original failure
                step = put_weights(module, roots[-1]) if roots else None
                state = "as it was" if step is None else f"as after step {step:,}, its last checkpoint"
                error.hint = f"{error.hint}; the model is {state}" if error.hint else f"the model is {state}"
        raise
    if module is not None:
        put_weights(module, roots[-1])
    return roots[-1]


def _is_sink(sink: Any) -> bool:
    return not isinstance(sink, type) and all(callable(getattr(sink, name, None)) for name in ("take", "close"))


#: What to give instead, by argument.
_FUNCTIONS = {
    "stop": "give a function of the dict of metrics: stop=lambda metrics: metrics['loss'] < 0.1",
    "on_step": "give a function of the view of a step: on_step=lambda view: print(view.step)",
}


def function_of_program(name: str, function: Any) -> Any:
    """Return what a program gives as ``stop`` or ``on_step``; raise UsageError if it takes no single argument."""
    if function is None:
        return None
    what = "" if callable(function) else f"{name} is {instance(function)}"
    with contextlib.suppress(ValueError):  # a function of C says nothing of its arguments
        if not what and not _takes_one(inspect.signature(function)):
            what = f"{name} takes no single argument"
    if what:
        raise UsageError(what, _FUNCTIONS[name])
    return function


def _takes_one(signature: inspect.Signature) -> bool:
    try:
        signature.bind({})
    except TypeError:
        return False
    return True
