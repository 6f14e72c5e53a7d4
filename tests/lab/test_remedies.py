"""A remedy makes values right, not only finite; all that is wrong is said; modules of one kind are followed to the last."""

from __future__ import annotations

import re

import pytest

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_config
from mptrain.lab.doctor.check import check_scaling
from tests.faulty_networks import FAULTS, SOUND, with_fault
from tests.several_faults import SEVERAL
from tests.small_runs import loop_of, steps_of

SMALL = ("dataset.train_samples=64", "train.batch_size=16")

#: Faults of the table that one step cannot show: without harm on this batch, as FP32 has them, or outside of what is compared.
UNSEEN = {
    "none": "there is none",
    "close": "values are close to the end of the range and within it",
    "epsilon": "no variance of this batch is near zero",
    "mask_where": "-inf and -1e9 give the same softmax",
    "mask_buffer": "-inf and -1e9 give the same softmax",
    "softmax": "its error is within what rounding explains",
    "casts": "the same inf in FP32: it is named as worth knowing",
    "three_bits": "5 % off, which trains: it is named as worth knowing",
    "shrink": "FP32 has it too",
    "detaches": "FP32 has it too: the parameters are named as worth knowing",
}

LOSS_IN_FP32 = "compute the loss in FP32, from logits.float()"

QUICK = ("rms_norm", "sum_by_hand", "clip_in_half", "small_between", "sqrt_at_zero")


def found_in(*words):
    return diagnose_config(compose(words)).examination


def helping(found):
    return next((one for one in found.remedies if one.helped), None)


def test_a_dead_network_is_not_called_fine_because_a_lower_scale_is_finite():
    found = found_in(*SMALL, *with_fault("rms_norm"), "precision=fp16_dynamic")
    assert (found.cause, found.module, found.operator) == ("forward", "odd.norm", "mul")
    assert "the output of odd.norm (RootMeanSquareNorm) is off by 100 % against FP32" in found.verdict
    assert found.also == ()  # gradients that overflow in the same module follow from that
    [remedy] = found.remedies
    assert remedy.words == ("precision.keep_fp32=[norms,LocalResponseNorm,odd.norm]",)
    assert remedy.outcome.startswith("finite on this batch; outputs are within 0.")


def test_a_dead_module_does_not_hide_gradients_that_overflow_elsewhere_nor_the_reverse():
    found = found_in(*SEVERAL, "+model.kind=dead_and_loud", "precision=fp16_static", "scaler.scale=65536")
    assert (found.cause, found.module) == ("forward", "body.norm")
    assert [(one.cause, one.module) for one in found.also] == [("backward", "body.loud")]
    remedy = helping(found)
    assert remedy.words[0] == "precision.keep_fp32=[norms,LocalResponseNorm,body.norm]"
    assert remedy.words[1] == "scaler=dynamic"


def test_two_modules_that_break_are_both_kept():
    found = found_in(*SEVERAL, "+model.kind=twice", "precision=fp16_dynamic")
    assert (found.cause, found.module) == ("forward", "body.first.wide")
    assert helping(found).words == ("precision.keep_fp32=[norms,LocalResponseNorm,body.first,body.second.norm]",)


@pytest.mark.long
def test_one_fault_in_modules_of_one_class_is_followed_to_the_last():
    found = found_in(*SEVERAL, "+model.kind=many", "precision=fp16_dynamic")
    assert (found.cause, found.module) == ("forward", "body.0.shares")
    assert [one.words for one in found.remedies] == [("precision.keep_fp32=[norms,LocalResponseNorm,Shares]",)]
    assert found.remedies[0].helped


def test_where_fp32_is_no_number_either_no_scale_is_spoken_of():
    found = found_in(*SMALL, *with_fault("sqrt_at_zero"), "precision=fp16_dynamic")
    assert (found.cause, found.module) == ("backward", "odd")
    assert "returns NaN in float16 and in FP32 for finite inputs" in found.verdict
    assert "scale" not in found.verdict
    assert [(one.words, one.helped) for one in found.remedies] == [((), None)]


@pytest.mark.parametrize("precision", ["fp16_dynamic", "fp32"])
def test_a_mask_that_is_infinite_from_the_beginning_is_no_weight_that_was_lost(precision):
    found = found_in(*SEVERAL, "+model.kind=masked", f"precision={precision}")
    assert (found.cause, found.remedies) == ("none", ()), found.verdict
    assert found_in(*SMALL, *with_fault("mask_buffer"), "precision=fp16_dynamic").cause == "none"


@pytest.mark.parametrize(("network", "told"), [("none", True), ("divides", False)])
def test_a_loss_in_half_precision_is_to_be_computed_in_fp32_unless_fp32_fails_too(network, told):
    words = (*SMALL, *with_fault(network), "task._target_=tests.faulty_networks.OffsetLoss", "precision=amp_dynamic")
    found = found_in(*words)
    assert (LOSS_IN_FP32 in [one.text for one in found.remedies if one.helped is None]) is told
    if told:
        assert (found.cause, found.remedies[0].text) == ("loss", LOSS_IN_FP32)
        assert {one.hint for one in check_scaling(compose(words), lambda _: None).findings} == {LOSS_IN_FP32}


#: Faults that a lower scale mends although keeping a module in FP32 would too.
BY_SCALE = {"large_between": ("scaler.init_scale=0.0625", "scaler.min_scale=0.0625")}


def checked(name, tmp_path=None):
    """Look at a planted fault; where it harms, train under what is said to help."""
    fault, words = FAULTS[name], (*SMALL, *with_fault(name))
    found = found_in(*words, "precision=fp16_dynamic")
    if name in UNSEEN:
        return
    named = {found.module, *(one.module for one in found.also)}
    assert fault.where in named, found
    remedy = helping(found)
    if fault.in_fp32:
        assert remedy is None
        return
    assert remedy is not None
    if name in BY_SCALE:
        assert remedy.words == BY_SCALE[name]
    elif fault.kept:
        assert remedy.words[0] == f"precision.keep_fp32=[norms,LocalResponseNorm,{','.join(fault.kept)}]"
    else:
        assert f"precision={fault.precision}" in remedy.words
    if tmp_path is not None:
        more = ("train.max_steps=150", "checkpoint.every_epochs=null", "optimizer=sgd", "optimizer.lr=0.05")
        right = trained(tmp_path / "fp32", *words, *more, "precision=fp32")
        mended = trained(tmp_path / "mended", *words, *more, "precision=fp16_dynamic", *remedy.words)
        assert mended == pytest.approx(right, rel=0.1, abs=0.05)


def trained(root, *words):
    """The mean loss of the last steps."""
    loop = loop_of(root, *words)
    loop.run()
    last = [step["loss"] for step in steps_of(loop)][-8:]
    return sum(last) / len(last)


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_is_named_with_its_module_and_what_fixes_it(name):
    checked(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_under_what_is_said_to_fix_a_planted_fault_it_trains_as_fp32_does(name, tmp_path):
    checked(name, tmp_path)


def sound(name, precision):
    """Look at the first step; where the first scale is too high for its gradients, at the one that is said to be right, too."""
    words = ("dataset.train_samples=32", "train.batch_size=16", *SOUND[name], f"precision={precision}")
    found = found_in(*words)
    if found.cause == "backward" and found.loss_scale == 2.0**16:
        assert all(one.cause == "backward" for one in found.also)
        [remedy] = found.remedies
        assert remedy.helped
        scale = re.search(r"^finite on this batch at (?:2\^)?([\d.]+)", remedy.outcome)[1]
        scale = 2 ** int(scale) if f"2^{scale}" in remedy.outcome else int(scale)
        assert remedy.words in ((), (f"scaler.init_scale={scale}",))
        found = found_in(*words, f"scaler.init_scale={scale}")
    assert (found.cause, found.also) == ("none", ()), found.verdict


@pytest.mark.parametrize("name", ["mlp", "word_lstm"])
def test_a_sound_network_gives_no_alarm(name):
    sound(name, "fp16_dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16_dynamic", "amp_dynamic", "bf16"])
@pytest.mark.parametrize("name", SOUND)
def test_no_sound_network_gives_an_alarm(name, precision):
    sound(name, precision)
