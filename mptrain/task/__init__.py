"""What a workload says about itself: its losses and its metrics. Blind to precision."""

from mptrain.task.base import Objective, Task
from mptrain.task.classify import Classify

__all__ = ["Classify", "Objective", "Task"]
