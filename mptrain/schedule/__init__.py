"""Learning rates as functions of the number of applied updates."""

from mptrain.schedule.shapes import Constant, Cosine, InverseSqrt, Linear, Schedule, Step
from mptrain.schedule.table import rate_table

__all__ = ["Constant", "Cosine", "InverseSqrt", "Linear", "Schedule", "Step", "rate_table"]
