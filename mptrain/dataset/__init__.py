"""Data sets, and loaders with a saved position. Knows neither models nor precision."""

from mptrain.dataset.asterisk_audio import load_asterisk_audio
from mptrain.dataset.asterisk_speech import load_asterisk
from mptrain.dataset.batch import Batch
from mptrain.dataset.cifar import load_cifar10, load_cifar100
from mptrain.dataset.class_folders import load_image_folder, load_imagenet
from mptrain.dataset.coco import load_coco
from mptrain.dataset.digit_scenes import load_digit_scenes
from mptrain.dataset.digits import load_digits
from mptrain.dataset.draws import sample_order
from mptrain.dataset.fashion import load_fashion_mnist
from mptrain.dataset.faults import Faults
from mptrain.dataset.gettext_pairs import load_gettext
from mptrain.dataset.loader import Loader
from mptrain.dataset.made_up_sounds import make_sounds
from mptrain.dataset.number_words import load_number_words
from mptrain.dataset.pairs import load_pairs
from mptrain.dataset.photos import load_photo_folder, load_photos
from mptrain.dataset.python_docs import load_python_docs
from mptrain.dataset.recordings import load_recordings
from mptrain.dataset.source import Dataset, Split
from mptrain.dataset.speech import load_speech
from mptrain.dataset.synthetic import make_synthetic
from mptrain.dataset.text import load_text
from mptrain.dataset.tone_words import make_tone_words
from mptrain.dataset.trans_de_en import load_trans_de_en
from mptrain.dataset.voc import load_voc

__all__ = [
    "Batch",
    "Dataset",
    "Faults",
    "Loader",
    "Split",
    "load_asterisk",
    "load_asterisk_audio",
    "load_cifar10",
    "load_cifar100",
    "load_coco",
    "load_digit_scenes",
    "load_digits",
    "load_fashion_mnist",
    "load_gettext",
    "load_image_folder",
    "load_imagenet",
    "load_number_words",
    "load_pairs",
    "load_photo_folder",
    "load_photos",
    "load_python_docs",
    "load_recordings",
    "load_speech",
    "load_text",
    "load_trans_de_en",
    "load_voc",
    "make_sounds",
    "make_synthetic",
    "make_tone_words",
    "sample_order",
]
