"""Experiment trackers (TensorBoard, W&B, MLflow): dataclasses of options, and the process that a tracker runs in.

This package must not import torch, nor a tracker's package before a run uses it.
"""

from mptrain.logger.base import Logger, NoLogger, TrackedRun, Tracker
from mptrain.logger.mlflow import MLflow
from mptrain.logger.tensorboard import TensorBoard
from mptrain.logger.tracker_process import TrackerProcess
from mptrain.logger.wandb import WandB

__all__ = ["Logger", "MLflow", "NoLogger", "TensorBoard", "TrackedRun", "Tracker", "TrackerProcess", "WandB"]
