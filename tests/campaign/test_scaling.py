"""The doctor finds every planted fault by its module, and nothing in models that are sound."""

from __future__ import annotations

import pytest

from mptrain.campaign.scaling import check_scaling
from mptrain.config.compose import compose
from mptrain.diagnostics.scaling import scales_of
from mptrain.diagnostics.trail import LOSS
from mptrain.errors import ConfigError

SMALL = ("dataset.train_samples=64", "train.batch_size=8")
HEALTHY = {
    "mlp": ("model=mlp", "dataset.image_size=8", *SMALL),
    "cnn": ("model=cnn", *SMALL),
    "plain16": ("model=plain16", "model.width=8", *SMALL),
    "resnet18": ("model=resnet18", "dataset.image_size=16", *SMALL),
    "transformer": ("model=transformer", "train.batch_size=2", "model.dropout=0.1"),
    "word_lstm": ("model=word_lstm", "train.batch_size=4", "dataset.sequence_length=16", "model.embedding_size=16"),
}


def check(*words):
    return check_scaling(compose(words), lambda _: None)


def planted(fault, *words):
    own = ("model._target_=faulty_networks.network", "extensions.allow=[faulty_networks]", "~model.widths")
    return check(*own, f"+model.fault={fault}", "dataset.image_size=8", *SMALL, *words)


def found(report):
    return {(finding.kind, finding.where) for finding in report.findings}


@pytest.mark.parametrize("precision", ["amp_static", "fp16_static"])
@pytest.mark.parametrize("model", HEALTHY)
def test_in_a_sound_model_nothing_is_found(model, precision):
    report = check(*HEALTHY[model], f"precision={precision}")
    assert not report.findings
    assert report.reference == "float64"
    assert all(module.best < 2**-8 for module in report.modules)  # half of what is allowed
    assert 10 in scales_of(report.modules).good


FAULTS = {
    "clip": ("proportion", ("odd",)),
    "constant": ("proportion", ("odd",)),
    "clip_in_half": ("drift", ("odd",)),
    "three_bits": ("error", ("first",)),
    "shrink": ("range", ("first", "last")),
    "epsilon": ("constant", ("odd",)),
    "mask_fill": ("constant", ("odd",)),
    "mask_where": ("constant", ("odd",)),
    "mask_buffer": ("value", ("odd.mask",)),
    "softmax": ("narrow", ("odd",)),
    "cancels": ("output", ("odd",)),
    "cancels_in_fp32": ("fp32", ("odd",)),
    "grows": ("output", ("odd",)),
    "detaches": ("no_gradient", ("first.weight", "first.bias")),
}


@pytest.mark.parametrize(
    ("precision", "fault"),
    [("fp16_static", fault) for fault in FAULTS]
    + [("amp_static", fault) for fault in FAULTS if fault != "mask_buffer"],  # which stays FP32: the test below
)
def test_a_planted_fault_is_found_by_name_and_nothing_else_is(precision, fault):
    assert found(planted(fault, f"precision={precision}")) == {FAULTS[fault]}


@pytest.mark.parametrize("fault", ["none", "mask_buffer"])
def test_what_is_no_fault_under_autocast_is_not_called_one(fault):
    assert not planted(fault, "precision=amp_static").findings


@pytest.mark.parametrize("precision", ["amp_static", "fp16_static"])
def test_a_loss_in_fp16_is_found(precision):
    report = planted("none", f"precision={precision}", "task._target_=faulty_networks.LossInLogitsDtype")
    assert found(report) == {("narrow", (LOSS,))}
    [finding] = report.findings
    assert "log_softmax, nll_loss computed in FP16" in finding.what
    assert "logits.float()" in finding.hint


def test_norms_that_would_be_half_are_found():
    report = check("model=cnn", *SMALL, "precision=fp16_static", "precision.keep_fp32=[]")
    assert found(report) == {("norm", ("1", "4", "8", "12"))}
    assert "precision.keep_fp32=[norms]" in report.findings[0].hint


def test_a_mask_that_torch_refuses_is_a_finding_and_no_error():
    report = planted("mask_fill", "precision=fp16_static")
    assert not report.modules
    assert "-1e+09 is beyond 65504" in report.findings[0].what
    assert "torch refuses" in report.findings[0].what


def test_a_constant_scale_below_the_good_ones_is_found_with_what_is_lost():
    report = check("model=plain16", *SMALL, "precision=fp16_noscale")
    assert found(report) == {("scale", ("scaler",))}
    assert "scale 1 is outside of 2^6 to 2^17: gradients underflow, first in 0, by 1" in report.findings[0].what
    assert "scaler=static scaler.scale=" in report.findings[0].hint


def test_a_constant_scale_above_the_good_ones_is_found():
    report = check(*HEALTHY["mlp"], "precision=amp_static", "scaler.scale=16777216")
    assert found(report) == {("scale", ("scaler",))}
    assert "too high for" in report.findings[0].what


def test_a_dynamic_scale_that_begins_too_high_is_none():
    report = check(*HEALTHY["mlp"], "precision=amp_dynamic", "scaler.init_scale=16777216")
    assert not report.findings
    assert report.evidence.scales == {"main": (16777216.0, False)}


def test_dropout_is_off_and_said_to_be():
    report = check(*HEALTHY["mlp"], "model.dropout=0.5", "precision=fp16_static")
    assert not report.findings
    assert report.notes == ("dropout is off (3 modules): what it draws may depend on the dtype",)


def test_two_learners_are_both_looked_at():
    report = check("model=dcgan", "train.batch_size=4", "dataset.train_samples=16", "precision=amp_dynamic")
    assert not report.findings
    assert {module.name.split(".")[0] for module in report.modules} == {"discriminator", "generator"}


def test_bf16_needs_no_scale():
    report = check(*HEALTHY["mlp"], "precision=bf16")
    assert not report.findings
    assert scales_of(report.modules).good == tuple(range(25))
    assert scales_of(report.modules).overflows is None


def test_a_precision_without_half_is_refused():
    with pytest.raises(ConfigError, match="precision=fp32 computes nothing in half precision"):
        check(*HEALTHY["mlp"], "precision=fp32")
