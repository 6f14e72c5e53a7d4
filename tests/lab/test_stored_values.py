"""Constants that half precision rounds or clamps when it stores them are faults too: FP32 starts from its own values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.case import with_fp32_values
from mptrain.lab.diagnosis.diagnose import diagnose_config, diagnose_run
from mptrain.lab.doctor.check import check_scaling
from tests.faulty_networks import WIDTH
from tests.small_runs import parts_of, run_in_process

SMALL = ("dataset.train_samples=64", "precision=fp16_dynamic")


class Decays(nn.Module):
    """Weighs numbers by their age in seconds, which a buffer holds."""

    def __init__(self, seconds=3600.0, *, persistent=True):
        super().__init__()
        self.register_buffer("age", torch.arange(float(WIDTH)) * seconds, persistent=persistent)
        self.seconds, self.out = seconds, nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        return self.out(given * torch.exp(-self.age / self.seconds / 24))


class Tiny(nn.Module):
    """Takes phases from lengths in metres, of which FP16 has one or two digits."""

    def __init__(self):
        super().__init__()
        self.register_buffer("length", torch.linspace(4e-7, 7e-7, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        return self.out(given * torch.sin(self.length * 1e4 * 1e3))


FAULTS = {
    "clamped": (lambda: Decays(seconds=7200.0), "odd.age"),
    "non-persistent": (lambda: Decays(seconds=7200.0, persistent=False), "odd.age"),
    "rounded": (Tiny, "odd.length"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_diagnose_compares_with_the_fp32_values_and_names_the_tensor(fault, words_of):
    make, tensor = FAULTS[fault]
    found = diagnose_config(compose(words_of(make, *SMALL))).examination
    assert (found.cause, found.module, found.operator) == ("forward", "odd", tensor)
    assert f"rounding {tensor} alone makes it" in found.verdict
    [remedy] = found.remedies
    assert remedy.words == ("precision.keep_fp32=[norms,LocalResponseNorm,odd]",)
    assert remedy.helped


@pytest.mark.parametrize("fault", ["clamped", "rounded"])
def test_a_run_that_has_trained_is_compared_with_them_too(fault, tmp_path, monkeypatch, words_of):
    make, tensor = FAULTS[fault]
    monkeypatch.setattr("mptrain.lab.diagnosis.remedies.remedies", lambda case: ())
    words = (*words_of(make, *SMALL), "train.max_steps=3", "scaler.init_scale=256", "run.name=run")
    assert run_in_process(*words, cwd=tmp_path).returncode == 0
    monkeypatch.chdir(tmp_path)
    found = diagnose_run("run", ["extensions.allow=[tests.faulty_networks]"]).examination
    assert (found.step, found.cause, found.module, found.operator) == (4, "forward", "odd", tensor)
    wide = diagnose_run("run", ["extensions.allow=[tests.faulty_networks]", "precision=fp32"]).examination
    assert abs(wide.loss - found.loss) > 1e-4


@pytest.mark.parametrize("fault", ["clamped", "rounded"])
def test_doctor_names_the_tensor_and_no_operator_that_reads_it(fault, words_of):
    make, tensor = FAULTS[fault]
    found = check_scaling(compose(words_of(make, *SMALL)), lambda _: None).findings
    [output] = [one for one in found if one.kind == "output"]
    assert f"rounding {tensor} alone makes it" in output.what


def test_a_constant_that_the_format_holds_well_enough_is_no_fault(words_of):
    found = diagnose_config(compose(words_of(lambda: Decays(seconds=60.0), *SMALL))).examination
    assert (found.cause, found.also) == ("none", ()), found.verdict


@pytest.mark.parametrize("precision", ["fp16_pure", "bf16_pure"])
def test_weights_without_master_weights_are_those_of_fp32_until_they_are_trained(precision, words_of):
    words = words_of(nn.Identity, *SMALL, f"precision={precision}")
    state = {"model": parts_of(*words)[0].model.state_dict(), "carried": {}}
    state["model"]["last.weight"] *= 2
    exact = with_fp32_values(compose(words), state)["model"]
    fp32 = parts_of(*words, "precision=fp32")[0].model.state_dict()
    assert all(torch.equal(exact[name], fp32[name]) for name in fp32 if name != "last.weight")
    assert exact["last.weight"] is state["model"]["last.weight"]
    found = diagnose_config(compose(words)).examination
    assert (found.cause, found.also) == ("none", ()), found.verdict


def test_a_tensor_that_a_step_has_changed_stays_as_it_is(words_of):
    config = compose(words_of(lambda: nn.Sequential(Decays(), Decays(persistent=False)), *SMALL))
    model = parts_of(*words_of(lambda: nn.Sequential(Decays(), Decays(persistent=False)), *SMALL))[0].model
    age, persistent = model.odd[1].age, model.state_dict()
    state = {"model": persistent, "carried": {"odd.1.age": age}}
    exact = with_fp32_values(config, state)
    assert torch.equal(exact["model"]["odd.0.age"], torch.arange(float(WIDTH)) * 3600)
    assert torch.equal(exact["carried"]["odd.1.age"], torch.arange(float(WIDTH)) * 3600)
    age[0] += 1
    persistent["odd.0.age"] += 1
    same = with_fp32_values(config, state)
    assert same["model"]["odd.0.age"] is persistent["odd.0.age"]
    assert same["carried"]["odd.1.age"] is age
