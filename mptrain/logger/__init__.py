"""Experiment trackers: each is a value (its options) that opens a sink in a process of its own.

Nothing here imports a tracker's package, or torch, before a run uses it.
"""

from mptrain.logger.base import Logger, NoLogger, TrackedRun, Tracker
from mptrain.logger.mlflow import MLflow
from mptrain.logger.tensorboard import TensorBoard
from mptrain.logger.tracker_process import TrackerProcess
from mptrain.logger.wandb import WandB

__all__ = ["Logger", "MLflow", "NoLogger", "TensorBoard", "TrackedRun", "Tracker", "TrackerProcess", "WandB"]
