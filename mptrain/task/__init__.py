"""What a workload says about itself: its losses and its metrics. Blind to precision."""

from mptrain.task.base import Objective, Task
from mptrain.task.classify import Classify
from mptrain.task.detect import Detect
from mptrain.task.enhance import Enhance
from mptrain.task.exhibits import Exhibit, Pictures, Sounds, Texts
from mptrain.task.gan import Gan
from mptrain.task.language import Language
from mptrain.task.raw_audio import RawAudio
from mptrain.task.transcribe import Transcribe
from mptrain.task.translate import Translate

__all__ = [
    "Classify",
    "Detect",
    "Enhance",
    "Exhibit",
    "Gan",
    "Language",
    "Objective",
    "Pictures",
    "RawAudio",
    "Sounds",
    "Task",
    "Texts",
    "Transcribe",
    "Translate",
]
