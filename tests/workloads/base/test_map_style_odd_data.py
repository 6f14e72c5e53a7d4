"""Tensors, arrays and parts that no run can train on are refused by name before training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from mptrain.system.errors import DataError
from mptrain.workloads.base.map_style import MapDataset, torch_parts

ROWS, CLASSES = np.arange(12.0).reshape(6, 2), np.arange(6) % 2


def made(*parts):
    return MapDataset("own", torch_parts(parts), 0)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ((ROWS[:, :1], CLASSES), r"the inputs of val are float64 \[1\], and those of train float64 \[2\]"),
        ((ROWS.astype(int), CLASSES), r"the inputs of val are int64 \[2\], and those of train float64 \[2\]"),
        ((ROWS, CLASSES / 2), r"the targets of val are float64 \[\], and those of train int64 \[\]"),
    ],
)
def test_a_part_of_another_shape_or_kind_of_number_is_named(part, said):
    with pytest.raises(DataError, match=said):
        made((ROWS, CLASSES), part)


def test_float_classes_in_one_part_of_labels_are_labels_too():
    labels = np.stack([CLASSES, 1 - CLASSES], 1)
    assert made((ROWS, labels), (ROWS, labels * 1.0)).facts()["label_counts"] == (3, 3)


INPUTS = torch.tensor(ROWS)


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (
            INPUTS.to_sparse(),
            CLASSES,
            r"inputs of train are torch.float64 \(torch.sparse_coo\), not dense real numbers",
        ),
        (INPUTS * 1j, CLASSES, r"inputs of train are torch.complex128 \(torch.strided\)"),
        (INPUTS, INPUTS * 1j, r"targets of train are torch.complex128"),
        (np.ma.masked_less(ROWS, 3), CLASSES, "inputs of train have masked values"),
    ],
)
def test_sparse_complex_and_masked_values_are_refused(inputs, targets, said):
    with pytest.raises(DataError, match=said):
        made((inputs, targets))
    if isinstance(inputs, torch.Tensor):
        whole = TensorDataset(inputs, torch.as_tensor(targets))
        with pytest.raises(DataError, match=said):
            MapDataset("own", {"train": whole}, 0)
        if inputs.layout == torch.strided:
            with pytest.raises(DataError, match=r"train samples are torch\.complex128"):
                MapDataset("own", {"train": [whole[at] for at in range(6)]}, 0)


def test_a_subset_of_no_samples_of_a_subset_is_named():
    whole = TensorDataset(INPUTS, torch.tensor(CLASSES))
    with pytest.raises(DataError, match="train has no samples"):
        made(Subset(Subset(whole, [0, 1]), []))


def test_samples_are_recognised_in_another_dtype():
    floats = [made((values, CLASSES)).train.digests() for values in (ROWS, ROWS.astype("f4"), INPUTS.bfloat16())]
    assert floats[0] == floats[1] == floats[2]
    whole = [made((ROWS.astype(kind), CLASSES)).train.digests() for kind in ("i4", "i8")]
    assert whole[0] == whole[1] != floats[0]


def test_classes_of_one_name_get_their_numbers():
    whole = TensorDataset(INPUTS, torch.tensor(CLASSES))
    whole.classes = ["crane", "crane", "eel"]
    assert made(whole, whole).class_names == ("crane (0)", "crane (1)", "eel")


def test_integer_inputs_have_their_largest_number_on_record():
    assert made((ROWS.astype(int), CLASSES)).train.kinds()["input_max"] == 11
    assert made((-ROWS.astype(int), CLASSES)).train.kinds()["input_max"] == 0
    assert "input_max" not in made((ROWS, CLASSES)).train.kinds()


def test_columns_of_text_beside_targets_are_given_as_a_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"city": ["Oslo", "Rome"] * 3, "x": range(6)})
    with pytest.raises(DataError, match="the inputs of train are object, not numbers") as caught:
        torch_parts((frame, pandas.Series(CLASSES)))
    assert caught.value.hint == 'give the whole frame, with target="NAME"'
