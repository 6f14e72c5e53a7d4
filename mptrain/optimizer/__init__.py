"""Optimizers: update rules on torch's fused kernels, and a model's weights with their FP32 master copies."""

from mptrain.optimizer.rules import SGD, Adagrad, Adam, AdamW, Rule
from mptrain.optimizer.torch_rule import TorchRule, adapt, timm_optimizer, torch_optim_state, torch_optimizer
from mptrain.optimizer.weights import Weights
from mptrain.optimizer.without_masters import compensated, stochastic

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Rule",
    "TorchRule",
    "Weights",
    "adapt",
    "compensated",
    "stochastic",
    "timm_optimizer",
    "torch_optim_state",
    "torch_optimizer",
]
