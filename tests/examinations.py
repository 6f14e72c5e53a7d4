"""Reads ``diagnosis/step-NUMBER.json``, for tests: nothing in the program does."""

from __future__ import annotations

from mptrain.runlog.diagnosis_file import SCHEMA, Examination
from mptrain.runlog.strict_json import read_object, restore_nonfinite
from mptrain.system.validation import build


def read_examination(path):
    """What `write_examination` wrote."""
    fields = restore_nonfinite(read_object(path, SCHEMA))
    del fields["schema"]
    return build(Examination, fields)
