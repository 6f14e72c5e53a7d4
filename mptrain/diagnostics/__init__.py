"""Looks at a run and never touches it."""

from mptrain.diagnostics.overflow import OverflowHistory

__all__ = ["OverflowHistory"]
