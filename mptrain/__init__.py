"""Mixed precision training from the command line, with a record of every step's loss scale and overflow.

`mptrain.watch` records the same of a training loop that somebody else wrote; `mptrain.open_run` reads a run directory.
"""

# Nothing is imported here: `python -m mptrain` runs this before `__main__` leaves the current folder out of the search.

__version__ = "0.2.0"

#: Functions for Python programs, and their modules, which are imported when they are used.
_FUNCTIONS = {"open_run": ("mptrain.runlog.run_reader", "read_run"), "watch": ("mptrain.integrations.watch", "watch")}


def __getattr__(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Return a function for Python programs."""
    if name in _FUNCTIONS:
        import importlib

        module, function = _FUNCTIONS[name]
        return getattr(importlib.import_module(module), function)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
