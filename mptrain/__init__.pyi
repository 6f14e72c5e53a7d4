from mptrain.api.compare import compare as compare
from mptrain.api.run import open_run as open_run
from mptrain.api.run import runs as runs
from mptrain.api.train import train as train
from mptrain.inspection.loop_checks import diagnose as diagnose
from mptrain.inspection.loop_checks import doctor as doctor
from mptrain.integrations.watch import watch as watch
from mptrain.report.forecast_page import recommend as recommend
from mptrain.system.errors import MptrainError as MptrainError

__version__: str
