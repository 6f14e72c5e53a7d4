from mptrain import optimizer as optimizer
from mptrain.api.run import open_run as open_run
from mptrain.api.run import runs as runs
from mptrain.api.train import train as train
from mptrain.integrations.watch import watch as watch
from mptrain.lab.formats.examine import formats as formats
from mptrain.lab.other_loop import diagnose as diagnose
from mptrain.lab.other_loop import doctor as doctor
from mptrain.lab.pages.loss_scale_pages import recommend as recommend
from mptrain.lab.range_test import find_lr as find_lr
from mptrain.study.compare_function import compare as compare
from mptrain.system.errors import MptrainError as MptrainError

__version__: str
