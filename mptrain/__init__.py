"""Mixed precision training from the command line, with a record of every step's loss scale and overflow."""

__version__ = "0.2.0"
