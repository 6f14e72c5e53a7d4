"""Import of optional libraries, with an error that says how to install a missing one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from mptrain.system.errors import EnvironmentRefused


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional library, and return it; raise EnvironmentRefused if that is impossible.

    ``extra`` is the extra of mptrain that installs it, as in ``pip install 'mptrain[detection]'``. ``purpose`` is the
    feature that needs it, as the beginning of a sentence: ``task=detect``.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"the package {package}, which is not installed"
        if error.name is None or error.name.partition(".")[0] != package:
            what = f"{package}, which needs {error.name}"
        raise EnvironmentRefused(f"{purpose} needs {what}", _command(extra)) from error
    except (ImportError, OSError) as error:  # e.g. an incompatible C library
        what = f"{package}, which cannot be imported: {error}"
        raise EnvironmentRefused(f"{purpose} needs {what}", _command(extra)) from error


def require_extra(module: str, extra: str, purpose: str) -> None:
    """Raise EnvironmentRefused if an optional top-level package is not installed, without importing it.

    ``extra`` and ``purpose`` are as for `load_extra`.
    """
    if importlib.util.find_spec(module) is None:
        raise EnvironmentRefused(f"{purpose} needs the package {module}, which is not installed", _command(extra))


def _command(extra: str) -> str:
    return f"pip install 'mptrain[{extra}]'"
