"""Looks at a run and never touches it."""

from mptrain.diagnostics.histograms import Histograms
from mptrain.diagnostics.overflow import OverflowHistory
from mptrain.diagnostics.probe import UNWATCHED, NoProbe, Probe, Watch

__all__ = ["UNWATCHED", "Histograms", "NoProbe", "OverflowHistory", "Probe", "Watch"]
