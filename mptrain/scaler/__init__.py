"""Loss scaling rules for FP16 training: how the factor of the loss changes after each training step."""

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
