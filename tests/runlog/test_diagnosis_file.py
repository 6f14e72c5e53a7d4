"""A diagnosis is read back as it was written, or refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mptrain.runlog.diagnosis_file import Examination, ModuleRow, Remedy, ValueRange, file_stem, write_examination
from tests.examinations import read_examination

ROW = ModuleRow("body.0", "Conv2d", 2, "float16", ValueRange(3.0, 0.1, 0.2, 4, 0), None, "forward")
FOUND = Examination(
    subject="outputs/run", learner="main", step=3, loss=math.nan, loss_scale=1024.0, precision="fp16_static", device="cpu",
    cause="forward", module="body.0", operator="convolution", verdict="it overflows", notes=("one",), remarks=("two",),
    modules=(ROW,), remedies=(Remedy(("precision=bf16",), "bfloat16", True, "finite"), Remedy((), "data", None, "?")),
    operators={"operators": [{"phase": "forward", "operator": "mm", "inputs": "float16", "outputs": "float16", "calls": 2}],
               "casts": []},
)  # fmt: skip


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "diagnosis.json"
    write_examination(path, FOUND)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON: no NaN
    found = read_examination(path)
    assert math.isnan(found.loss)
    assert found.modules == FOUND.modules
    assert found.remedies == FOUND.remedies
    assert (found.notes, found.operators, found.cause) == (("one",), FOUND.operators, "forward")


def test_files_are_named_by_step_learner_and_words():
    found = replace(FOUND, learner="main", step=151)
    assert file_stem(found) == "step-000151"
    assert file_stem(replace(found, learner="critic")) == "step-000151-critic"
    assert file_stem(found, ("precision=fp32", "seed=7")) == "step-000151-under-precision=fp32-seed=7"
    first, second = (file_stem(FOUND, (f"precision.keep_fp32=[{'a,' * 60}{last}]",)) for last in "xy")
    assert first != second
    assert max(len(first), len(second)) < 120
    assert "/" not in file_stem(FOUND, ("dataset.root=/a/b",))
