"""A loss scale that is said to help does: it can be written, a run begins at it, or the scaler gets there by itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mptrain.cli.main import main
from mptrain.config.compose import compose, reload
from mptrain.lab.diagnosis.diagnose import diagnose_config, diagnose_run
from mptrain.lab.diagnosis.scale_remedies import _highest_finite, higher_scale
from mptrain.run.build.parts import build
from mptrain.system.errors import ConfigError
from tests.histograms_by_hand import counted
from tests.small_runs import TINY

HIGH = (*TINY, "precision=fp16_dynamic", "scaler.init_scale=16777216")


def first_remedy(*words):
    config = compose(words)
    return config, diagnose_config(config).examination.remedies[0]


def begins_at(config, words, learner="main"):
    parts, _ = build(reload(config.yaml, words))
    return next(float(one.scale) for one in parts.learners if one.name == learner)


def test_a_scaler_that_comes_down_before_patience_ends_the_run_needs_nothing():
    found = diagnose_config(compose(HIGH)).examination
    [remedy] = found.remedies
    assert (remedy.words, remedy.helped) == ((), True)
    assert remedy.text == "no change is needed: steps are skipped until the loss scale has fallen to 2^19, as usual"
    assert found.verdict.startswith(f"{remedy.text}; until then only gradients overflow: ")
    assert found.also == ()


@pytest.mark.parametrize(
    ("more", "tail"),
    [
        (("train.max_consecutive_overflows=3",), ()),
        (("scaler.on_overflow=apply",), ("scaler.on_overflow=skip",)),
        (("scaler.min_scale=16777216",), ("scaler.min_scale=131072",)),
    ],
)
def test_one_that_does_not_is_given_words(more, tail):
    config, remedy = first_remedy(*HIGH, *more)
    assert (remedy.words, remedy.helped) == (("scaler.init_scale=131072", *tail), True)
    assert begins_at(config, remedy.words) == 2**17


def test_a_scaler_that_falls_to_its_floor_is_judged_there():
    _, remedy = first_remedy(*HIGH, "scaler=logmax", "scaler.max_scale=16777216")
    assert remedy.text == "no change is needed: steps are skipped until the loss scale has fallen to 1, as usual"
    assert "finite on this batch at 1;" in remedy.outcome


@pytest.mark.parametrize(("patience", "ends"), [(5, 4), (8, 0)])
def test_what_needs_nothing_is_a_run_that_goes_on(tmp_path, monkeypatch, patience, ends):
    monkeypatch.chdir(tmp_path)
    words = (*HIGH, f"train.max_consecutive_overflows={patience}")
    assert main([*words, "run.name=run"]) == ends
    _, remedy = first_remedy(*words)
    assert (remedy.words == ()) is (ends == 0)


def test_a_run_that_ended_by_its_patience_did_not_come_down_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*HIGH, "train.max_consecutive_overflows=2", "run.name=run"]) == 4
    remedy = diagnose_run("run").examination.remedies[0]
    assert (remedy.words, remedy.helped) == (("scaler.init_scale=131072",), True)


FAINT = ("model=plain16", "dataset.train_samples=64", "train.batch_size=8", "precision=fp16_dynamic")


@pytest.mark.long
def test_one_step_does_not_advise_a_scale_above_the_ceiling_of_the_scaler():
    _, remedy = first_remedy(*FAINT, "scaler.init_scale=1", "scaler.max_scale=4")
    assert (remedy.words, remedy.helped) == ((), None)
    assert remedy.outcome.startswith("not advised: scaler.max_scale=4 is lower; mptrain recommend")


@pytest.mark.long
def test_one_quiet_step_does_not_advise_a_scale_that_overflowed_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*FAINT, "scaler.init_scale=1", "train.max_steps=2")
    assert main([*words, "run.name=run"]) == 0
    quiet = diagnose_run("run", step=2).examination.remedies[0]
    assert quiet.helped
    assert quiet.outcome.endswith("mptrain recommend evaluates more steps than this one")
    event = {"event": "overflow", "learner": "main", "step": 1, "loss_scale": 1024.0, "loss": "finite", "tensors": []}
    with Path("outputs/run/events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    remedy = diagnose_run("run", step=2).examination.remedies[0]
    assert (remedy.words, remedy.helped) == ((), None)
    assert remedy.outcome.startswith("not advised: the run overflowed at 2^10; mptrain recommend")


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("precision=fp16_noscale",),
        ("precision=fp16_static", "scaler.scale=8"),
        ("precision=amp_static", "scaler.scale=1"),
    ],
)
def test_in_place_of_a_constant_scale_comes_one_that_follows_the_gradients(words):
    """What one step of a network that has not learned shows is no scale for one that does."""
    config, remedy = first_remedy(*FAINT, *words)
    assert (remedy.words, remedy.helped) == (("scaler=dynamic",), True)
    assert remedy.outcome.startswith("correct on this batch at 2^16")
    assert begins_at(config, remedy.words) == 2**16


def test_small_gradients_that_are_exact_are_a_note_and_nothing_to_fix(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (*TINY, "threads=1", "precision=fp16_static", "scaler.scale=0.015625", "run.name=run")
    assert main([*words]) == 0
    capsys.readouterr()
    assert main(["diagnose", "run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Step 19 is finite, forward and backward")
    assert "of the nonzero FP16 gradients are below 2^-14 at loss scale 0.015625" in said
    assert "scaler=" not in said
    assert "Fixes tested" not in said
    assert "the fix" not in said


def a_case(gradient, scaler="dynamic"):
    """A case whose FP16 gradients at each scale are those of ``gradient``, which has zeros alone below some scale."""
    from mptrain.scaler import DynamicScaler, NoScaler, StaticScaler

    kinds = {"static": StaticScaler(scale=1.0), "none": NoScaler(), "dynamic": DynamicScaler(init_scale=1.0)}

    def at_scale(scale):
        values = (torch.tensor(gradient, dtype=torch.float64) * scale).half()
        operation = SimpleNamespace(outputs=(counted(values.tolist(), "float16"),))
        finite = bool(values.isfinite().all())
        seen = SimpleNamespace(
            loss_scale=scale, finite=finite, of=lambda _: [operation], learner="main", calls={}, operations=[]
        )
        config = SimpleNamespace(learners={"main": {}}, train=SimpleNamespace(max_consecutive_overflows=20))
        parts = SimpleNamespace(learners=[1], device="cpu")
        return SimpleNamespace(
            seen=seen, is_sound=finite, learner=SimpleNamespace(scaler=kinds[scaler]), at_scale=at_scale, config=config,
            parts=parts, ceiling=math.inf, cause=SimpleNamespace(what="wrong"),
            with_overrides=lambda *_: (_ for _ in ()).throw(ConfigError("no dynamic scaler")),
        )  # fmt: skip

    return at_scale(1.0)


def test_a_scale_at_which_all_gradients_are_zero_is_no_remedy():
    remedy = higher_scale(a_case([2.0**-80] * 4), 1.0, 2.0**20, counted([2.0**-80]))
    assert (remedy.helped, remedy.outcome) == (False, "all gradients are zero")


@pytest.mark.parametrize("scaler", ["static", "none"])
def test_a_constant_scale_from_one_step_is_not_said_to_help(scaler):
    remedy = higher_scale(a_case([2.0**-20] * 4, scaler), 1.0, 2.0**20, counted([2.0**-20]))
    assert remedy.helped is None
    assert remedy.outcome.startswith("not shown to train: finite on this batch")


@pytest.mark.parametrize("scaler", ["static", "dynamic", "none", "fairseq", "smooth"])
def test_words_for_one_of_several_learners_move_its_scale_alone(scaler):
    from mptrain.lab.diagnosis.case import DiagnosisCase
    from mptrain.lab.diagnosis.scale_remedies import scale_words
    from mptrain.lab.step.repetition import observe_step, saved_step_at

    gan = ("model=dcgan", "dataset.train_samples=16", "train.batch_size=8", "precision=amp_static")
    config = compose((*gan, f"scaler={scaler}"))
    parts, options = build(config)
    saved_step = saved_step_at(parts, options, None, 1)
    seen = observe_step(parts, saved_step)[1]
    words = scale_words(DiagnosisCase(config, parts, saved_step, seen), 2.0**-20)
    assert begins_at(config, words, "generator") == 2.0**-20
    assert begins_at(config, words, "discriminator") == float(parts.learners[0].scale)


def test_an_injected_fault_is_not_to_be_mended():
    fault = ("inject.step=1", "inject.value=nan", "inject.tensor=activation:3")
    config = compose((*TINY, "precision=fp16_dynamic", *fault))
    [remedy] = diagnose_config(config).examination.remedies
    assert (remedy.words, remedy.helped) == (("inject.step=null", "inject.tensor=null"), True)
    assert remedy.outcome == "the step is finite without it"


@pytest.mark.parametrize("tensor", ["input", "activation:3"])
def test_an_injected_fault_is_the_cause_that_is_named(tensor):
    fault = ("inject.step=1", "inject.value=inf", f"inject.tensor={tensor}")
    found = diagnose_config(compose((*TINY, "precision=fp16_static", *fault))).examination
    assert found.verdict.startswith(f"the injected fault is the cause: inf into {tensor}; ")
    assert "in FP32" not in found.verdict
    assert f"this step has an injected fault: inf into {tensor}" in found.remarks


def test_what_goes_wrong_without_the_injected_fault_too_is_mended_without_it():
    fault = ("inject.step=1", "inject.value=1e6", "inject.tensor=activation:3")
    found = diagnose_config(compose((*HIGH, "train.max_consecutive_overflows=2", *fault))).examination
    assert found.verdict.startswith("even without the injected fault, only gradients overflow")
    assert found.remedies[0].helped
    assert found.remedies[0].words == ("scaler.init_scale=131072",)


@pytest.mark.long
def test_in_a_step_that_a_fault_leaves_finite_nothing_is_tried():
    words = (*FAINT, "precision=fp16_noscale")
    assert diagnose_config(compose(words)).examination.remedies
    fault = ("inject.step=1", "inject.value=3", "inject.tensor=activation:0")
    found = diagnose_config(compose((*words, *fault))).examination
    assert (found.cause, found.remedies) == ("none", ())
    assert "this step has an injected fault: 3.0 into activation:0" in found.remarks


@pytest.mark.parametrize(("highest", "largest", "looks"), [(14, 3e9, 5), (9, 100.0, 1), (15, 1.0, 0), (-3, 3e9, 1)])
def test_the_highest_finite_scale_is_looked_for_where_gradients_in_fp32_say_a_lower_one(highest, largest, looks):
    tried = []

    def at_scale(scale):
        tried.append(scale)
        return SimpleNamespace(seen=SimpleNamespace(finite=scale <= 2.0**highest))

    case = SimpleNamespace(seen=SimpleNamespace(loss_scale=2.0**16), at_scale=at_scale)
    found = _highest_finite(case, SimpleNamespace(largest=largest))
    assert found == (highest if highest >= 0 else -16)
    assert len(tried) == looks
