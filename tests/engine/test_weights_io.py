"""Weights come out of runs as plain state dicts and go into models as far as they fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.engine.weights_io import in_dtype, load_matching, plain_weights, read_weights, weights_file
from mptrain.system.errors import CheckpointError

STATE = {
    "model": {"weight": torch.ones(2), "running_var": torch.full((2,), 3.0), "extra": "no tensor"},
    "tied": {},
    "learners": {"main": {"average": {"weight": torch.zeros(2)}}, "other": {"average": {}}},
}


def test_averages_stand_in_for_the_weights_they_follow_and_for_nothing_else():
    assert plain_weights(STATE, average=False)["weight"].tolist() == [1, 1]
    averaged = plain_weights(STATE, average=True)
    assert averaged["weight"].tolist() == [0, 0]
    assert averaged["running_var"].tolist() == [3, 3]
    assert averaged.keys() == {"weight", "running_var"}


def test_trap_32_what_fp16_cannot_hold_saturates_and_integers_stay():
    weights = {"w": torch.tensor([1e6, -1e6, 1e-9, 0.1]), "n": torch.tensor(70000)}
    half = in_dtype(weights, torch.float16)
    assert half["w"].dtype == torch.float16
    assert half["w"].tolist() == [65504.0, -65504.0, 0.0, torch.tensor(0.1).half().item()]
    assert half["n"].item() == 70000
    assert in_dtype(half, torch.float32)["w"].dtype == torch.float32


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_is_of_the_format_that_its_name_says(tmp_path, suffix):
    tied = torch.arange(6.0).view(2, 3)
    weights = {"embedding": tied, "head": tied, "count": torch.tensor(3)}
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(weights_file(weights, path))
    found = read_weights(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert (path.read_bytes()[:2] == b"PK") == (suffix == ".pt")


def test_every_exported_tensor_has_memory_of_its_own():
    whole = torch.arange(12.0).view(3, 4)
    out = in_dtype({"column": whole[:, 1], "row": whole[1]}, torch.float32)
    assert all(value.is_contiguous() for value in out.values())
    assert out["column"].untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {"model_state_dict": {f"_orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()},
        lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()},
    ],
)
def test_the_usual_wrappings_are_undone(tmp_path, wrap):
    state = nn.Linear(2, 3).state_dict()
    torch.save(wrap(state), tmp_path / "x.pt")
    found = read_weights(tmp_path / "x.pt")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"no pickle at all", "cannot be read as a file of plain tensors"),
        ([1, 2], "has no state dict"),
        ({"epoch": 3}, "has no state dict"),
        (torch.ones(3), "has no state dict"),
        (nn.Linear(1, 1), "cannot be read"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "x.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_weights(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_a_head_of_another_shape_stays_as_it_was_drawn_and_is_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 7))
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 5)).half()
    drawn = model[2].weight.clone()
    fit = load_matching(model, {**other.state_dict(), "more": torch.ones(1)}, "there")
    assert torch.equal(model[0].weight, other[0].weight.float())
    assert torch.equal(model[2].weight, drawn)
    assert fit.unused == ("more",)
    assert dict(fit.fresh) == {"2.weight": "(5, 3), not (7, 3)", "2.bias": "(5,), not (7,)"}
    assert fit.describe("there") == (
        "7 of 9 tensors loaded from there; not loaded: 2.weight ((5, 3), not (7, 3)), 2.bias ((5,), not (7,)); "
        "not in the model: more"
    )


def test_weights_of_which_none_fits_are_refused_though_a_counter_does():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weights = {"1.num_batches_tracked": torch.tensor(3), "backbone.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"no weight in there fits the model: 0.weight \(missing\)"):
        load_matching(model, weights, "there")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinities_and_nan_are_exported_as_they_are_and_finite_values_stay_finite(dtype):
    largest, inf = torch.finfo(torch.float32).max, float("inf")
    half = in_dtype({"mask": torch.tensor([inf, -inf, float("nan"), largest, -largest])}, dtype)["mask"]
    assert half[:2].tolist() == [inf, -inf]
    assert half[2].isnan()
    assert half[3:].tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max]
