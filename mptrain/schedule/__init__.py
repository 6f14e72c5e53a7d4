"""Learning rate schedules, as functions of the number of optimizer updates that were applied."""

from mptrain.schedule.rate_table import rate_table
from mptrain.schedule.shapes import Constant, Cosine, InverseSqrt, Linear, Schedule, Step

__all__ = ["Constant", "Cosine", "InverseSqrt", "Linear", "Schedule", "Step", "rate_table"]
