"""Mixed precision training from the command line, with a record of every step's loss scale and overflow.

`mptrain.train` starts a run from Python; `mptrain.open_run` and `mptrain.runs` read runs, and give their networks and
predictions; `mptrain.compare` judges runs, or those of any program by their logs. `mptrain.watch` records a training
loop that somebody else wrote, `mptrain.doctor` and `mptrain.diagnose` examine a step of it, and `mptrain.recommend`
finds a loss scale for it.
"""

# Nothing is imported here: `python -m mptrain` runs this before `__main__` leaves the current folder out of the search.

__version__ = "0.2.0"

#: Names for Python programs, and their modules, which are imported when they are used.
_FUNCTIONS = {
    "MptrainError": ("mptrain.system.errors", "MptrainError"),
    "compare": ("mptrain.api.compare", "compare"),
    "diagnose": ("mptrain.inspection.loop_checks", "diagnose"),
    "doctor": ("mptrain.inspection.loop_checks", "doctor"),
    "open_run": ("mptrain.api.run", "open_run"),
    "recommend": ("mptrain.report.forecast_page", "recommend"),
    "runs": ("mptrain.api.run", "runs"),
    "train": ("mptrain.api.train", "train"),
    "watch": ("mptrain.integrations.watch", "watch"),
}


def __dir__() -> list[str]:
    """Return the names for Python programs, for completion."""
    return [*globals(), *_FUNCTIONS]


def __getattr__(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Return a function for Python programs."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, function = _FUNCTIONS[name]
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        hint = "install mptrain with its dependencies (pip install -e . in its folder)"
        raise ImportError(f"mptrain.{name} needs {error.name}, which is not installed: {hint}") from error
