"""The doctor finds every planted fault by its module, and nothing in models that are sound."""

from __future__ import annotations

import math

import pytest

from mptrain.config.compose import compose
from mptrain.engine.module_trail import LOSS
from mptrain.lab.doctor.check import check_scaling
from mptrain.lab.doctor.findings import why_no_range
from mptrain.lab.step.ranges import scales_of
from mptrain.system.errors import FirstBatchError, NumericsError
from tests.faulty_networks import FAULTS, SOUND, with_fault
from tests.small_runs import loop_of, steps_of

SMALL = ("dataset.train_samples=64", "train.batch_size=8")
QUICK = ("mlp", "cnn", "plain16", "resnet18", "transformer", "word_lstm")


def sound(name):
    words = SOUND[name]
    return words if any(word.startswith("train.batch_size") for word in words) else (*words, *SMALL)


def check(*words):
    return check_scaling(compose(words), lambda _: None)


def planted(fault, *words):
    return check(*with_fault(fault), "train.batch_size=16", *words)


def found(report):
    return {(finding.kind, finding.where) for finding in report.findings}


@pytest.mark.workload
@pytest.mark.parametrize("precision", ["amp_static", "fp16_static"])
@pytest.mark.parametrize("model", QUICK)
def test_in_a_sound_model_nothing_is_found(model, precision):
    report = check(*sound(model), f"precision={precision}")
    assert not report.findings
    assert report.reference == "float64"
    assert 10 in scales_of(report.modules).good
    assert all(module.best < 2**-8 for module in report.modules)  # half of what is allowed


@pytest.mark.parametrize(
    ("layer_scale", "precision"),
    [("1e-6", "amp_dynamic"), ("1e-6", "fp16_dynamic"), ("3e-6", "amp_dynamic"), ("4e-6", "fp16_dynamic")],
)
def test_small_gradients_that_underflow_a_little_are_no_fault(layer_scale, precision):
    report = check(*sound("layer_scale"), f"+model.layer_scale={layer_scale}", f"precision={precision}")
    assert not report.findings
    good = scales_of(report.modules).good
    assert good if layer_scale == "1e-6" else 16 in good  # 1e-6 itself is rounded by 1 % in FP16


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [name for name in SOUND if name not in QUICK])
def test_in_a_sound_model_of_torchvision_nothing_is_found(model):
    report = check(*sound(model), "precision=amp_dynamic")
    assert not report.findings
    assert scales_of(report.modules).good


#: The kinds of findings about each fault.
FOUND = {
    "large_linear": ["output"],
    "beside_softmax": ["output"],
    "grows": ["output"],
    "large_logits": ["output"],
    "sum_by_hand": ["narrow"],
    "exp_by_hand": ["narrow"],
    "thrown_away": ["overflow"],
    "rms_norm": ["output"],
    "normalise": ["constant"],
    "mask_fill": ["constant"],
    "mask_where": ["constant"],
    "mask_buffer": ["value"],
    "cancels": ["output"],
    "small_between": ["error"],
    "large_between": ["overflow"],
    "clip": ["proportion"],
    "steer": ["proportion"],
    "constant": ["proportion"],
    "clip_in_half": ["drift"],
    "shrink": ["range"],
    "sqrt_at_zero": ["fp32"],
    "divides": ["fp32"],
    "cancels_in_fp32": ["fp32"],
}

#: Faults with which no loss scale makes the gradients right.
NO_RANGE = ("grows", "rms_norm", "clip", "clip_in_half", "large_between", "divides")

#: Words about faults that a user needs beside the module.
SAID = {
    "sqrt_at_zero": "div in the backward pass returns NaN in FP32 too",
    "mask_fill": "-1e+09 is beyond 65504, the largest FP16 number (masked_fill); torch raises an error",
}

#: Faults at the first step that do not keep the network from training, which are notes.
NOTED = {
    "epsilon": "odd: eps=1e-08 rounds to zero in FP16, whose smallest number is 6e-08 (add), which changes no result",
    "softmax": "odd: softmax in FP16, where torch's autocast on CUDA uses FP32",
    "three_bits": "odd: the gradients of ",
    "casts": "odd: 262144 is beyond 65504, the largest FP16 number (mul)",
    "detaches": "first.weight, first.bias: 2 parameters get no gradient",
}

#: Findings that name something else than the module at fault.
ELSEWHERE = {
    ("mask_buffer", "value"): ("odd.mask",),
    ("shrink", "range"): ("first",),
}


def as_planted(name):
    return [(kind, ELSEWHERE.get((name, kind), (FAULTS[name].where,))) for kind in FOUND[name]]


def remedy(report):
    """The words that findings end in, of which all give the same."""
    words = {finding.hint.rpartition(" ")[2] for finding in report.findings if finding.keep}
    return next(iter(words)) if len(words) == 1 else None


@pytest.mark.long
@pytest.mark.parametrize("fault", FOUND)
def test_planted_fault_is_found_by_module_and_remedy(fault):
    report = planted(fault, "precision=fp16_dynamic")
    assert [(finding.kind, finding.where) for finding in report.findings] == as_planted(fault)
    if kept := FAULTS[fault].kept:
        assert remedy(report) == f"precision.keep_fp32=[norms,LocalResponseNorm,{','.join(kept)}]"
    if fault in NO_RANGE:
        assert why_no_range(report.evidence, report.findings)
    assert SAID.get(fault, "") in report.findings[0].what


@pytest.mark.parametrize("fault", NOTED)
def test_harmless_fault_is_a_note(fault):
    report = planted(fault, "precision=fp16_dynamic")
    assert not report.findings
    assert any(note.startswith(NOTED[fault]) for note in report.notes), report.notes


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in FOUND if name != "mask_buffer"])  # which stays FP32: the test below
def test_planted_fault_is_found_under_autocast(fault):
    report = planted(fault, "precision=amp_dynamic")
    assert [(finding.kind, finding.where) for finding in report.findings] == as_planted(fault)
    if kept := FAULTS[fault].kept:
        assert remedy(report) == f"precision.keep_fp32=[{','.join(kept)}]"


def trained(root, words, seed):
    """The mean loss of the last of 200 steps; inf where the run gave up or diverged."""
    lr = (
        "optimizer.lr=0.02" if "+model.fault=exp_by_hand" in words else "optimizer.lr=0.05"
    )  # exp overflows FP32 too at 0.05
    more = ("train.max_steps=200", "train.batch_size=32", lr, "checkpoint.every_epochs=null")
    loop = loop_of(root, *words, *more, "train.max_consecutive_overflows=40", f"seed={seed}")
    try:
        loop.run()
    except (NumericsError, FirstBatchError):
        return math.inf
    losses = [row["loss"] for row in steps_of(loop)[-20:]]
    return math.inf if None in losses else sum(losses) / 20


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16_dynamic", "amp_dynamic"])
@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if fault.kept])
def test_what_the_doctor_advises_trains_as_fp32_does(tmp_path, fault, precision):
    words = with_fault(fault)
    report = planted(fault, f"precision={precision}")
    if not report.findings:  # a buffer stays FP32 under autocast
        return
    seeds = range(3)
    exact = [trained(tmp_path, (*words, "precision=fp32"), seed) for seed in seeds]
    fixed = [trained(tmp_path, (*words, f"precision={precision}", remedy(report)), seed) for seed in seeds]
    as_it_is = [trained(tmp_path, (*words, f"precision={precision}"), seed) for seed in seeds]
    assert sum(fixed) / 3 <= 1.25 * sum(exact) / 3 + 0.02
    if FAULTS[fault].harms:
        assert sum(as_it_is) / 3 >= 2 * sum(exact) / 3


@pytest.mark.parametrize("fault", ["none", "mask_buffer"])
def test_what_is_no_fault_under_autocast_is_not_called_one(fault):
    assert not planted(fault, "precision=amp_static").findings


@pytest.mark.parametrize("precision", ["amp_static", "fp16_static"])
def test_a_loss_in_fp16_is_found(precision):
    report = planted("none", f"precision={precision}", "task._target_=tests.faulty_networks.LossInLogitsDtype")
    assert found(report) == {("narrow", (LOSS,))}
    [finding] = report.findings
    assert "log_softmax, nll_loss in FP16" in finding.what
    assert "logits.float()" in finding.hint


@pytest.mark.long
def test_norms_that_would_be_half_are_found():
    report = check("model=cnn", *SMALL, "precision=fp16_static", "precision.keep_fp32=[]")
    assert found(report) == {("norm", ("1", "4", "8", "12"))}
    assert "precision.keep_fp32=[norms]" in report.findings[0].hint


def test_constant_scale_too_low_is_found_with_what_is_lost():
    report = check("model=plain16", *SMALL, "precision=fp16_noscale")
    assert found(report) == {("scale", ("scaler",))}
    assert (
        "scale 1 is outside the usable range 2^6 to 2^17: gradients underflow, first in 0, by 1"
        in report.findings[0].what
    )
    assert "scaler=static scaler.scale=" in report.findings[0].hint


def test_fewer_samples_are_examined_of_a_large_batch(monkeypatch):
    words = ("model=mlp", "dataset.image_size=8", "dataset.train_samples=64", "precision=amp_static")
    whole = check(*words, "train.batch_size=32")
    assert (whole.samples, whole.notes) == (32, ())
    monkeypatch.setattr("mptrain.lab.doctor.check.MOST_VALUES", 1)
    part = check(*words, "train.batch_size=32", "train.accumulate=2")
    assert part.samples == 4  # two for each micro-batch, because a BatchNorm needs two
    monkeypatch.setattr("mptrain.lab.doctor.check.MOST_VALUES", 4000)
    part = check(*words, "train.batch_size=32")
    assert 2 < part.samples < 32
    (note,) = part.notes
    assert note.startswith(f"only {part.samples} of the 32 samples of a batch are examined, to save memory: ")
    assert not part.findings
    assert [one.name for one in part.modules] == [one.name for one in whole.modules]


@pytest.mark.long
def test_two_learners_are_both_looked_at():
    report = check("model=dcgan", "train.batch_size=4", "dataset.train_samples=16", "precision=amp_dynamic")
    assert not report.findings
    assert {module.name.split(".")[0] for module in report.modules} == {"discriminator", "generator"}


def test_bf16_needs_no_scale():
    report = check(*sound("mlp"), "precision=bf16")
    assert not report.findings
    assert scales_of(report.modules).good == tuple(range(25))
    assert scales_of(report.modules).overflows is None


def test_output_close_to_the_largest_number_is_a_note_and_a_finding_if_training_brings_it_there():
    close, far = (planted(fault, "precision=fp16_dynamic") for fault in ("close", "none"))
    [note] = [note for note in close.notes if "largest float16 number" in note]
    assert note.startswith("the output of odd.loud reaches ")
    assert [(one.kind, one.where) for one in close.findings] == [("headroom", ("odd.loud",))]  # 100 steps later
    assert (far.findings, far.notes) == ([], ())
