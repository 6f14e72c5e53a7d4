"""Networks: plain modules that know nothing about precision, loss scales or data."""

from mptrain.model.convnet import cnn
from mptrain.model.perceptron import mlp
from mptrain.model.plain import plain16
from mptrain.model.published import torchvision_classifier

__all__ = ["cnn", "mlp", "plain16", "torchvision_classifier"]
