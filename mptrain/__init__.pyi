from mptrain.api.run import open_run as open_run
from mptrain.api.run import runs as runs
from mptrain.api.train import train as train
from mptrain.integrations.watch import watch as watch
from mptrain.lab.loop_checks import diagnose as diagnose
from mptrain.lab.loop_checks import doctor as doctor
from mptrain.lab.pages.forecast_page import recommend as recommend
from mptrain.study.compare_function import compare as compare
from mptrain.system.errors import MptrainError as MptrainError

__version__: str
