"""Networks: plain modules that know nothing about precision, loss scales or data."""

from mptrain.model.bn_inception import bn_inception
from mptrain.model.convnet import cnn
from mptrain.model.dcgan import DCGAN, dcgan
from mptrain.model.deepspeech2 import DeepSpeech2, deepspeech2
from mptrain.model.detectors import fasterrcnn_resnet50, ssd300_vgg16, ssd_small
from mptrain.model.dncnn import DnCNN, dncnn
from mptrain.model.edsr import EDSR, edsr
from mptrain.model.lstm_language import LSTMLanguageModel, lstm_language_model
from mptrain.model.perceptron import mlp
from mptrain.model.plain import plain16
from mptrain.model.published import torchvision_classifier
from mptrain.model.seq2seq_lstm import LSTMTranslator, lstm_translator
from mptrain.model.small_networks import small_alexnet, small_resnext, small_vgg
from mptrain.model.transformer_language import TransformerLanguageModel, transformer_language_model
from mptrain.model.transformer_translation import TransformerTranslator, transformer_translator
from mptrain.model.wavenet import WaveNet, wavenet

__all__ = [
    "DCGAN",
    "EDSR",
    "DeepSpeech2",
    "DnCNN",
    "LSTMLanguageModel",
    "LSTMTranslator",
    "TransformerLanguageModel",
    "TransformerTranslator",
    "WaveNet",
    "bn_inception",
    "cnn",
    "dcgan",
    "deepspeech2",
    "dncnn",
    "edsr",
    "fasterrcnn_resnet50",
    "lstm_language_model",
    "lstm_translator",
    "mlp",
    "plain16",
    "small_alexnet",
    "small_resnext",
    "small_vgg",
    "ssd300_vgg16",
    "ssd_small",
    "torchvision_classifier",
    "transformer_language_model",
    "transformer_translator",
    "wavenet",
]
