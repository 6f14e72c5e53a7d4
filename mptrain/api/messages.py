"""Errors of Python functions in the words of Python: ``margin=`` instead of ``--margin``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from mptrain.numerics.words import plain
from mptrain.system.errors import ConfigError, MptrainError
from mptrain.system.masking import masked

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
