"""Why an arm is not faster or smaller: only what the records show."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mptrain.study.comparison.fairness import max_concurrent_runs, remarks
from mptrain.study.comparison.results import Arm, Interval
from tests.loops import each
from tests.study.comparison.fake_runs import arm, failed, measures

CUDA = "cuda:0 (NVIDIA H100)"
FULL = arm("fp32", [0.95, 0.95])


def ratio(low, high):
    return Interval(math.sqrt(low * high), low, high, 0.1, 2)


def said(speed=None, memory=None, together=1, mode="amp_dynamic", keys=None, reference=FULL, **changes):
    return "\n".join(remarks(arm(mode, [0.95, 0.95], keys=keys, **changes), reference, speed, memory, together))


def facts(**changes):
    return {"parameters": 1000, "unaligned": 0.0, "convolutions": True, "upcast": False, "support": "fine", **changes}


#: The means alone would say faster and smaller of the first and the third.
SLOW, FAST, BIG, SMALL = ratio(1.0, 2.0), ratio(1.5, 1.7), ratio(0.5, 1.05), ratio(0.4, 0.6)


CONTIGUOUS = {"train__channels_last": False}
PATH = {"first": 65536.0, "min": 1.0, "max": 65536.0, "last": 1.0}


@each(
    ("evidence", "words"),
    [
        ({"speed": SLOW, "facts": facts(upcast=True, support="no arithmetic")}, "not faster: no arithmetic"),
        ({"speed": SLOW, "data_wait": 0.3}, "waited for data for 30 % of the training time (the reference for 1 %)"),
        ({"speed": SLOW, "device": CUDA, "train_seconds": 0.3}, "a step takes 1.0 ms (1,000 parameters)"),
        ({"speed": SLOW, "device": CUDA, "facts": facts(unaligned=0.4)}, "40 % of the weights"),
        ({"speed": SLOW, "device": CUDA, "keys": CONTIGUOUS}, "channels_last=false"),
        ({"speed": SLOW, "together": 3}, "up to 3 runs ran on the machine at the same time"),
        ({"speed": SLOW}, "not faster: the records show no cause; support of the device: fine"),
        ({"speed": SLOW, "facts": {}, "data_wait": math.nan}, "not faster: the records show no cause"),
        ({"memory": BIG, "mode": "fp16_static", "facts": facts(parameters=10**8)}, "FP32 master weights (400.0 MB for 100,000,000"),
        ({"memory": BIG, "facts": facts(parameters=10**8)}, "under autocast, weights, gradients and optimizer state stay FP32 (400.0 MB"),
        ({"memory": BIG, "facts": facts(upcast=True, support="no FP16 here")}, "not smaller: no FP16 here: the FP32 copies of their operands"),
        ({"memory": BIG, "memory_before": 0}, "not smaller: the records show no cause"),
        ({"mode": "fp32", "keys": {"precision__emulate": "mxfp8"}}, "operands in mxfp8 are emulated: its speed and memory"),
        ({"scale": PATH}, "the loss scale ended at its minimum of 1 in 2 of 2 runs"),
        ({"skipped": 3, "skip_rate": 0.01, "overflows": {"calibrating": 3}}, "1 % of the updates were skipped, all of them during calibration"),
        ({"skipped": 3, "skip_rate": 0.01, "overflows": {"calibrating": 1, "unexpected": 2}}, "1 % of the updates were skipped (2 calibrating, 4 unexpected)"),
    ],
)  # fmt: skip
def test_what_the_records_show_is_named(evidence, words):
    assert words in said(**evidence)


@each(
    ("evidence", "words"),
    [
        ({"speed": SLOW, "data_wait": 0.2}, "waited"),
        ({"speed": SLOW, "data_wait": math.nan}, "waited"),
        ({"speed": SLOW, "device": CUDA, "train_seconds": 30.0}, "a step takes"),
        ({"speed": SLOW, "train_seconds": 0.3}, "a step takes"),
        ({"speed": SLOW, "device": CUDA, "train_seconds": 0.01, "steps": 10}, "a step takes"),
        ({"speed": SLOW, "facts": facts(unaligned=0.4)}, "of the weights"),
        ({"speed": SLOW, "device": CUDA}, "channels_last"),
        ({"speed": SLOW, "device": CUDA, "keys": CONTIGUOUS, "facts": facts(convolutions=False)}, "channels_last"),
        ({"speed": FAST, "memory": SMALL, "facts": facts(upcast=True), "data_wait": 0.9}, ""),
        ({"facts": facts(upcast=True), "data_wait": 0.9}, ""),  # its speed is unknown
        ({"memory": BIG, "mode": "fp16_static"}, "master weights"),  # of 1,000 parameters are not the gigabyte
        ({"memory": BIG, "facts": facts(parameters=10**8)}, "FP32 copies"),
        ({"speed": SLOW, "memory": BIG, "mode": "fp32", "data_wait": 0.9}, ""),  # nobody expects these to be faster
        ({"speed": SLOW, "memory": BIG, "data_wait": 0.9, "reference": arm("fp16_static", [0.9])}, ""),
        ({"scale": {**PATH, "last": 2.0}}, ""),
        ({"scale": {**PATH, "first": 1.0}}, ""),
    ],
)  # fmt: skip
def test_what_they_do_not_show_is_not(evidence, words):
    """No words at all where they are empty."""
    found = said(**evidence)
    assert words not in found if words else found == ""


def test_what_was_in_use_before_is_no_part_of_the_precision():
    assert "40 % of the peak, which is the process's resident set, was in use" in said(None, BIG)
    assert "40 % of the peak was in use" in said(None, BIG, device=CUDA)
    assert "in use before" not in said(None, BIG, memory_before=0)
    assert "in use before" not in said(None, BIG, memory_before=1000)


def test_one_pair_has_no_interval_and_is_judged_by_itself():
    alone = Interval(1.05, math.nan, math.nan, math.nan, 1)
    assert "not faster" in said(alone)
    assert "not faster" not in said(replace(alone, mean=1.5))
    assert "not smaller" in said(None, alone)
    assert "not smaller" not in said(None, replace(alone, mean=0.5))


def test_gradients_flushed_to_zero_are_named_where_both_were_seen():
    def arms(half, full):
        runs = [tuple(measures(seed, zero_gradients=share) for seed in (0, 1)) for share in (half, full)]
        return remarks(Arm("fp16_noscale", runs[0]), Arm("fp32", runs[1]), None, None)

    (sentence,) = arms(0.9, 0.33)
    assert sentence.startswith("90 % of the activation gradients were zero, against 33 % in the reference: ")
    assert arms(0.34, 0.33) == arms(0.9, None) == arms(None, 0.33) == ()


def test_updates_that_changed_no_weight_are_named():
    def arm(*shares):
        return Arm("bf16_pure", tuple(measures(seed, lost_updates=share) for seed, share in enumerate(shares)))

    (sentence,) = remarks(arm(0.5, 0.7), FULL, None, None)
    assert sentence.startswith("60 % of the updates in the steps with histograms changed no weight: ")
    assert remarks(arm(0.0, None), FULL, None, None) == remarks(arm(None, None), FULL, None, None) == ()


def test_runs_that_did_not_end_in_order_are_named_with_their_reason():
    broken = Arm("amp_dynamic", (failed(measures(0)), failed(measures(1)), measures(2, status="running")))
    assert remarks(broken, FULL, None, None) == (
        "seeds 0, 1 did not finish: every step overflowed",
        "seed 2 did not finish: it is running, or was killed",
    )


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([("a", "1", "3"), ("a", "2", "5"), ("a", "4", "6")], 2),
        ([("a", "1", "2"), ("a", "2", "3")], 1),
        ([("a", "1", "9"), ("b", "1", "9")], 1),
        ([], 1),
    ],
)
def test_runs_at_the_same_time_are_counted_by_host(spans, most):
    assert max_concurrent_runs([measures(seed, attempts=(span,)) for seed, span in enumerate(spans)]) == most
