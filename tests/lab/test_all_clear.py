"""No sentence that gives an all-clear stands beside a number of the same page that is beyond its threshold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.config.compose import compose
from mptrain.lab.commands.doctor_checks import doctor_model, scale_table
from mptrain.lab.diagnosis.causes import describe_errors
from mptrain.lab.doctor.check import ScalingReport, verdict
from mptrain.lab.doctor.findings import findings, with_words
from mptrain.lab.finding import Finding
from mptrain.lab.step.accuracy import StepAccuracy
from mptrain.lab.step.ranges import (
    LOST,
    GradientErrors,
    OutputErrors,
    ScalingEvidence,
    by_module,
    most_explained,
)
from mptrain.numerics.formats import FORMATS
from tests import faulty_networks

SHARES = st.sampled_from([0.0, 1e-4, 5e-3, 2e-2, 6e-2, 0.1, 0.2, 0.3, 0.6, 1.2])


@st.composite
def evidence_of_any(draw):
    """What a check may find of three modules: any errors of results and gradients, at any scale."""
    compute = draw(st.sampled_from(["float16", "bfloat16"]))
    parameters, outputs = [], {}
    for name in ("first", "second", "third"):
        best, expected, half = draw(SHARES), draw(SHARES), draw(SHARES)
        errors = {0: draw(st.sampled_from([best, 1.0])), 1: best, 2: best, 3: math.inf}
        shifts = {0: abs(errors[0] - best), 1: 0.0, 2: 0.0, 3: math.inf}
        parameters.append(GradientErrors(f"{name}.weight", 4, 1.0, 1e-7, expected, 0.0, errors, shifts))
        outputs[name] = OutputErrors(half, draw(st.sampled_from([half, half / 2, 1e-4])), 1e-7, half, 1.0)
    return ScalingEvidence(compute, by_module(parameters, FORMATS[compute]), outputs=outputs)


@settings(deadline=None, max_examples=300)
@given(evidence_of_any())
def test_doctor_gives_no_all_clear_beside_errors_that_it_does_not_accept(evidence):
    every = findings(evidence)
    minor = tuple(one for one in every if one.minor)
    found = [one for one in every if not one.minor]
    said = verdict(ScalingReport(evidence, found, evidence.modules, "float64", 32, (), minor))
    if said.startswith("no problems found"):
        tolerance, table = 8 * evidence.form.epsilon, str(scale_table(evidence.modules))
        assert not found
        assert all(one.best <= max(tolerance, LOST) for one in evidence.modules)
        assert all(one.best <= tolerance or one.underflows for one in evidence.modules)
        assert min(one.expected for one in evidence.modules) <= most_explained(evidence.form)
        assert list(evidence.outputs.values())[-1].half <= most_explained(evidence.form)
        assert not any(word in table for word in ("inexact", "error too large", "drifts", "not proportional"))


@settings(deadline=None, max_examples=100)
@given(evidence_of_any())
def test_diagnose_says_of_a_step_what_is_beyond_its_threshold(evidence):
    accuracy = StepAccuracy(evidence.form, evidence.outputs, evidence.modules)
    said, least = describe_errors(accuracy), min(one.expected for one in evidence.modules)
    if said.startswith("outputs are within"):
        assert least <= most_explained(evidence.form)
        assert not accuracy.inexact_gradients
    else:
        assert said == accuracy.doubt != ""


@pytest.mark.parametrize("fault", ["none", "casts", "grows", "clip_in_half"])
def test_headline_exit_code_and_json_of_a_network_agree(fault):
    chosen = fault if fault in faulty_networks.FAULTS else "none"
    words = (*faulty_networks.with_fault(chosen), "precision=fp16_dynamic", "train.batch_size=16")
    outcome = doctor_model(compose(words))
    model = outcome.data().model
    assert (outcome.code == 0) is (not model.findings)
    assert outcome.code == 0 or "no problems found" not in model.verdict


def test_a_remedy_that_saw_zero_gradients_says_so():
    one = Finding("output", ("odd",), "off", "check it", ("odd",))
    (seen,) = with_words([one], "precision=bf16", zero=["other"])
    (unseen,) = with_words([one], "precision=bf16", zero=["odd.a"])
    assert seen.hint == "check it, or set precision=bf16"
    assert unseen.hint.endswith("(not seen: the gradients of odd.a are zero on this batch)")
    assert with_words([replace(one, keep=())], "precision=bf16", zero=["odd"]) == [replace(one, keep=())]
