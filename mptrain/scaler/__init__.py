"""Loss scaling rules. A scaler holds the constants of a rule and computes the next state from the present one."""

from mptrain.scaler.als import ALSScaler
from mptrain.scaler.base import Scaler, ScalerState
from mptrain.scaler.delayed import DelayedScaler
from mptrain.scaler.dynamic import DynamicScaler
from mptrain.scaler.fairseq import FairseqScaler
from mptrain.scaler.logmax import LogMaxScaler
from mptrain.scaler.smooth import SmoothScaler
from mptrain.scaler.static import NoScaler, StaticScaler

__all__ = [
    "ALSScaler",
    "DelayedScaler",
    "DynamicScaler",
    "FairseqScaler",
    "LogMaxScaler",
    "NoScaler",
    "Scaler",
    "ScalerState",
    "SmoothScaler",
    "StaticScaler",
]
