"""Mixed precision training from the command line: every step's loss scale and overflow on record."""

__version__ = "0.2.0"
