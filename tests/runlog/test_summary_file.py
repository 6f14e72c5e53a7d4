"""summary.json: strict, versioned, and the same numbers back."""

from __future__ import annotations

import json
import math

import pytest

from mptrain.runlog import read_summary, write_summary
from mptrain.system.errors import StorageError


def test_numbers_come_back_also_the_nonfinite_ones(tmp_path):
    path = tmp_path / "summary.json"
    numbers = {"loss": math.inf, "skip_rate": 0.01, "test": {"top1": 0.5}, "numbers": {"a.b": [0.0, -math.inf]}}
    write_summary(path, numbers)
    assert read_summary(path) == numbers
    text = path.read_text()
    assert "Infinity" not in text
    assert next(iter(json.loads(text))) == "schema"


def test_a_missing_summary_is_empty(tmp_path):
    assert read_summary(tmp_path / "summary.json") == {}


@pytest.mark.parametrize("name", ["schema", "nonfinite"])
def test_reserved_names_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        write_summary(tmp_path / "s", {name: 1})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(("{", "damaged"), ("[]", "damaged"), ("{}", "no schema"), ('{"schema": 9}', "schema 9")),
        ('{"schema": 2, "nonfinite": {"loss": "inf"}}', "non-finite"),
        ('{"schema": 2, "loss": NaN}', "NaN is not JSON"),
    ],
)
def test_a_summary_that_cannot_be_understood_is_refused(tmp_path, text, words):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(StorageError, match=words):
        read_summary(tmp_path / "summary.json")
