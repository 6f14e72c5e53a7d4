"""Learning rate schedules, as functions of the number of optimizer updates that were applied."""

from mptrain.schedule.plateau import Plateau
from mptrain.schedule.rate_table import rate_table
from mptrain.schedule.shapes import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    OneCycle,
    Polynomial,
    RangeTest,
    Schedule,
    Step,
    TabulatedSchedule,
    WarmupStableDecay,
)
from mptrain.schedule.stepped import timm_scheduler, torch_scheduler

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "InverseSqrt",
    "Linear",
    "OneCycle",
    "Plateau",
    "Polynomial",
    "RangeTest",
    "Schedule",
    "Step",
    "TabulatedSchedule",
    "WarmupStableDecay",
    "rate_table",
    "timm_scheduler",
    "torch_scheduler",
]
