"""Optimizers: update rules on torch's fused kernels, and a model's weights with their FP32 master copies."""

from mptrain.optimizer.rules import SGD, Adagrad, Adam, AdamW, Rule
from mptrain.optimizer.torch_state import torch_optim_state
from mptrain.optimizer.weights import Weights

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Rule", "Weights", "torch_optim_state"]
