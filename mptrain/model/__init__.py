"""Networks: plain modules that know nothing about precision, loss scales or data."""

from mptrain.model.convnet import cnn
from mptrain.model.dcgan import DCGAN, dcgan
from mptrain.model.lstm_language import LSTMLanguageModel, lstm_language_model
from mptrain.model.perceptron import mlp
from mptrain.model.plain import plain16
from mptrain.model.published import torchvision_classifier
from mptrain.model.transformer_language import TransformerLanguageModel, transformer_language_model

__all__ = [
    "DCGAN",
    "LSTMLanguageModel",
    "TransformerLanguageModel",
    "cnn",
    "dcgan",
    "lstm_language_model",
    "mlp",
    "plain16",
    "torchvision_classifier",
    "transformer_language_model",
]
