"""Weights come out of runs as plain state dicts and go into models as far as they fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.engine.weights_io import in_dtype, load_matching, plain_weights, read_weights, weights_file
from mptrain.system.errors import CheckpointError, UsageError

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
    assert averaged.keys() == {"weight", "running_var", "extra"}


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


class Counting(nn.Module):
    """A layer whose extra state is what it is given."""

    def __init__(self, state=None):
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(2)), state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        if isinstance(state, dict) and "refused" in state:
            raise ValueError("not this one")
        self.state = state


PLAIN = [{"seen": 3, "names": ["a", None], "deep": {"x": 0.5}}, "text", 0, None, [True]]
TENSORS = [torch.arange(3.0), torch.tensor([1e6], dtype=torch.float64)]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_extra_states_of_modules_are_exported_and_loaded(tmp_path, suffix):
    for number, state in enumerate((*PLAIN, *TENSORS)):
        path = tmp_path / f"{number}{suffix}"
        model = nn.Sequential(Counting(state), Counting(0))
        path.write_bytes(weights_file(in_dtype(model.state_dict(), torch.float16), path))
        fresh = nn.Sequential(Counting(torch.zeros(7)), Counting())
        report = load_matching(fresh, read_weights(path), "w")
        assert (len(report.taken), report.fresh, report.unused) == (4, (), ())
        if isinstance(state, torch.Tensor):
            assert torch.equal(fresh[0].state, state)
            assert fresh[0].state.dtype == state.dtype
        else:
            assert fresh[0].state == state
        assert fresh[1].state == 0


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path):
    for state in ({"scale": torch.ones(1)}, (1, 2), {1: 2}, float("nan"), b"pickle"):
        with pytest.raises(UsageError, match=r"^0\._extra_state is no tensor and no JSON value"):
            weights_file(nn.Sequential(Counting(state)).state_dict(), tmp_path / "w.safetensors")


def test_extra_states_that_are_missing_foreign_or_refused_are_named():
    weights = {"0.weight": torch.zeros(2), "1.weight": torch.zeros(2), "1._extra_state": 4, "2._extra_state": 5}
    model = nn.Sequential(Counting(1), Counting(2))
    report = load_matching(model, weights, "w")
    assert report.fresh == (("0._extra_state", "missing"),)
    assert report.unused == ("2._extra_state",)
    assert [layer.state for layer in model] == [1, 4]
    with pytest.raises(CheckpointError, match=r"1\._extra_state of w cannot be set: ValueError: not this one"):
        load_matching(model, {**weights, "1._extra_state": {"refused": 1}}, "w")
