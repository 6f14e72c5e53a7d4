"""Experiment trackers: dataclasses of options that open a sink in a separate process.

This package must not import torch, nor a tracker's package before a run uses it.
"""

from mptrain.logger.base import Logger, NoLogger, TrackedRun, Tracker
from mptrain.logger.mlflow import MLflow
from mptrain.logger.tensorboard import TensorBoard
from mptrain.logger.tracker_process import TrackerProcess
from mptrain.logger.wandb import WandB

__all__ = ["Logger", "MLflow", "NoLogger", "TensorBoard", "TrackedRun", "Tracker", "TrackerProcess", "WandB"]
