"""Run directory: the files of one training run. Only this package knows their names and formats.

Its functions raise StorageError for a file that cannot be read or written or is damaged. A file that cannot be replaced
keeps its old content. Importing the package must not import torch. Checkpoints hold tensors and are therefore imported
from their own module, `mptrain.runlog.checkpoints`.
"""

from mptrain.runlog.atomic_files import readable_bytes, storage_errors, write_atomically
from mptrain.runlog.directory import LockHolder, RunDirectory, create_run, existing_run, find_run, last_run, open_run
from mptrain.runlog.record_writer import Fanout, RecordWriter, Sink, truncate_records
from mptrain.runlog.run_paths import RunPaths, check_run_name
from mptrain.runlog.run_reader import Run, read_run
from mptrain.runlog.run_state import Attempt, RunState, read_summary, write_summary

__all__ = [
    "Attempt",
    "Fanout",
    "LockHolder",
    "RecordWriter",
    "Run",
    "RunDirectory",
    "RunPaths",
    "RunState",
    "Sink",
    "check_run_name",
    "create_run",
    "existing_run",
    "find_run",
    "last_run",
    "open_run",
    "read_run",
    "read_summary",
    "readable_bytes",
    "storage_errors",
    "truncate_records",
    "write_atomically",
    "write_summary",
]
