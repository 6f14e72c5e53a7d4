"""Code that all workloads share, independent of the kind of data."""

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import Dataset, Split
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.random_streams import sample_order
from mptrain.workloads.base.task import Exhibit, Objective, Pictures, Sounds, Task, Texts

__all__ = [
    "Batch",
    "Dataset",
    "Exhibit",
    "Faults",
    "Loader",
    "Objective",
    "Pictures",
    "Sounds",
    "Split",
    "Task",
    "Texts",
    "sample_order",
]
