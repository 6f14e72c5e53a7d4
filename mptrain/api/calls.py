"""Calls from Python: errors in its words (``margin=``, not ``--margin``), and a caller who finds nothing changed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from mptrain.numerics.words import plain
from mptrain.system.device import begun
from mptrain.system.errors import ConfigError, MptrainError
from mptrain.system.masking import masked
from mptrain.system.random_state import random_state, set_random_state

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")

#: Options of commands that have another name in Python, where patterns of `mptrain.runs` have none.
_OTHERWISE = {
    "--config-dir ": "config_dirs=", "--filter ": "", ": add -m to sweep": ": call train once for each",
    "--anyway": "anyway=True", "--pair": "pair=True", "--not-inferior": "not_inferior=True", "--sort ": "sort=",
}  # fmt: skip


def in_python(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Let the errors of a function name its arguments where those of a command would name options."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        try:
            return function(*args, **kwargs)
        except MptrainError as error:
            error.args, error.hint = (_in_python(str(error)),), _in_python(error.hint)
            if isinstance(error, ConfigError):
                error.problems = tuple(
                    replace(problem, what=_in_python(problem.what), hint=_in_python(problem.hint))
                    for problem in error.problems
                )
            raise

    return call


def _in_python(text: str) -> str:
    """Return a message with arguments for options, but for commands that it names (``mptrain ... --html``).

    It has neither control characters nor secrets, as on the command line: a traceback shows it in a terminal or a log.
    """
    text = plain(masked(text), lines=True)
    for option, argument in _OTHERWISE.items():
        text = text.replace(option, argument)
    before, command, after = re.split(r"((?<!\S)mptrain )", text, maxsplit=1) if "mptrain " in text else (text, "", "")
    return (
        re.sub(r"--([a-z]+(?:-[a-z]+)*)(?:=| (?=\d))?", lambda option: option[1].replace("-", "_") + "=", before)
        + command
        + after
    )


#: Variables of the environment that a run with ``train.deterministic`` or ``train.compile`` sets.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")


@contextlib.contextmanager
def caller_restored() -> Iterator[None]:
    """Restore generators of random numbers, filters of warnings, variables and the current folder afterwards."""
    device = begun() or torch.device("cpu")
    states, folder = random_state(device), Path.cwd()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(folder)
        set_random_state(states, device)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
