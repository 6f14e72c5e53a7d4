"""Data sets, and loaders with a saved position. Knows neither models nor precision."""

from mptrain.dataset.batch import Batch
from mptrain.dataset.cifar import load_cifar10, load_cifar100
from mptrain.dataset.class_folders import load_image_folder, load_imagenet
from mptrain.dataset.digits import load_digits
from mptrain.dataset.draws import sample_order
from mptrain.dataset.fashion import load_fashion_mnist
from mptrain.dataset.faults import Faults
from mptrain.dataset.loader import Loader
from mptrain.dataset.python_docs import load_python_docs
from mptrain.dataset.source import Dataset, Split
from mptrain.dataset.synthetic import make_synthetic
from mptrain.dataset.text import load_text

__all__ = [
    "Batch",
    "Dataset",
    "Faults",
    "Loader",
    "Split",
    "load_cifar10",
    "load_cifar100",
    "load_digits",
    "load_fashion_mnist",
    "load_image_folder",
    "load_imagenet",
    "load_python_docs",
    "load_text",
    "make_synthetic",
    "sample_order",
]
