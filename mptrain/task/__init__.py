"""What a workload says about itself: its losses and its metrics. Blind to precision."""

from mptrain.task.base import Objective, Task
from mptrain.task.classify import Classify
from mptrain.task.exhibits import Exhibit, Sounds, Texts
from mptrain.task.gan import Gan
from mptrain.task.language import Language

__all__ = ["Classify", "Exhibit", "Gan", "Language", "Objective", "Sounds", "Task", "Texts"]
