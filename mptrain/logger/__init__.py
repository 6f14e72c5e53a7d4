"""Experiment trackers: each is a value (its options) that opens a sink in a process of its own.

Nothing here imports a tracker's package, or torch, before a run uses it.
"""

from mptrain.logger.background import Background
from mptrain.logger.base import Logger, NoLogger, TrackedRun, Tracker
from mptrain.logger.mlflow import MLflow
from mptrain.logger.tensorboard import TensorBoard
from mptrain.logger.wandb import WandB

__all__ = ["Background", "Logger", "MLflow", "NoLogger", "TensorBoard", "TrackedRun", "Tracker", "WandB"]
