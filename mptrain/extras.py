"""Libraries that only some workloads need: imported where they are used, with one line that says how to get a missing one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from mptrain.errors import EnvironmentRefused


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """The module of a library that an extra of mptrain installs.

    Args:
        module: Dotted name of the module, such as ``pycocotools.cocoeval``.
        extra: The extra that has it, as in ``pip install 'mptrain[detection]'``.
        purpose: What it is for, as the beginning of a sentence: ``task=detect``.

    Raises:
        EnvironmentRefused: It is not installed, or cannot be imported.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"the package {package}, which is not installed"
        if error.name is None or error.name.partition(".")[0] != package:
            what = f"{package}, which needs {error.name}"
        raise EnvironmentRefused(f"{purpose} needs {what}", _command(extra)) from error
    except (ImportError, OSError) as error:  # a library of C that does not fit the machine
        what = f"{package}, which cannot be imported: {error}"
        raise EnvironmentRefused(f"{purpose} needs {what}", _command(extra)) from error


def require_extra(module: str, extra: str, purpose: str) -> None:
    """Refuse what needs a library that is not installed; it is looked for, not imported. For arguments see `load_extra`.

    Raises:
        EnvironmentRefused: It is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise EnvironmentRefused(f"{purpose} needs the package {module}, which is not installed", _command(extra))


def _command(extra: str) -> str:
    return f"pip install 'mptrain[{extra}]'"
