"""Mixed precision training from the command line, with a record of every step's loss scale and overflow.

`mptrain.train` starts a run from Python; `mptrain.open_run` and `mptrain.runs` read runs, and give their networks and
predictions; `mptrain.compare` judges runs, or those of any program by their logs. `mptrain.watch` records a training
loop that somebody else wrote, `mptrain.doctor`, `mptrain.diagnose` and `mptrain.formats` examine a step of it, and
`mptrain.recommend` finds a loss scale for it. `mptrain.find_lr` finds a learning rate for a run. `mptrain.optimizer`
has wrappers for the optimizer of such a loop.
"""

# Nothing is imported here: `python -m mptrain` runs this before `__main__` leaves the current folder out of the search.

__version__ = "0.2.0"


def __dir__() -> list[str]:
    """Return the names for Python programs, for completion; ``__init__.pyi`` has their types."""
    from mptrain.shelves import FUNCTIONS, MODULES

    return [*FUNCTIONS, *MODULES, "__doc__", "__file__", "__name__", "__path__", "__version__"]


def __getattr__(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Return a function or package for Python programs, which is imported when it is used."""
    from mptrain.shelves import FUNCTIONS, MODULES, SHELVES, missing

    if name not in FUNCTIONS and name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        if name in MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        return getattr(importlib.import_module(FUNCTIONS[name]), name)
    except ModuleNotFoundError as error:
        for shelf, (package, _) in SHELVES.items():
            if error.name == package:
                raise missing(shelf, f"mptrain.{name}") from None
        hint = "install mptrain with its dependencies (pip install -e . in its folder)"
        raise ImportError(f"mptrain.{name} needs {error.name}, which is not installed: {hint}") from error
