"""Why an arm is not faster or smaller: only what the records show."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from comparison.fake_runs import arm, failed, measures

from mptrain.comparison.explanations import max_concurrent_runs, remarks
from mptrain.comparison.results import Arm, Interval

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


def test_an_arm_that_is_faster_and_smaller_needs_no_reasons():
    assert said(FAST, SMALL, facts=facts(upcast=True), data_wait=0.9) == ""


def test_an_arm_whose_speed_is_unknown_is_not_explained():
    assert said(None, None, facts=facts(upcast=True), data_wait=0.9) == ""


def test_widened_products_are_named_with_the_devices_words():
    assert "not faster: no arithmetic" in said(SLOW, facts=facts(upcast=True, support="no arithmetic"))


def test_waiting_for_data_is_named_from_a_fifth_of_the_time_on():
    assert "waited for data for 30 % of the training time (the reference for 1 %)" in said(SLOW, data_wait=0.3)
    assert "waited" not in said(SLOW, data_wait=0.2)
    assert "waited" not in said(SLOW, data_wait=math.nan)


def test_short_steps_count_on_cuda_only():
    assert "a step takes 1.0 ms (1,000 parameters)" in said(SLOW, device=CUDA, train_seconds=0.3)
    assert "a step takes" not in said(SLOW, device=CUDA, train_seconds=30.0)
    assert "a step takes" not in said(SLOW, train_seconds=0.3)
    assert "a step takes" not in said(SLOW, device=CUDA, train_seconds=0.01, steps=10)


def test_odd_dimensions_and_layout_count_on_cuda_only():
    assert "40 % of the weights" in said(SLOW, device=CUDA, facts=facts(unaligned=0.4))
    assert "of the weights" not in said(SLOW, facts=facts(unaligned=0.4))
    assert "channels_last=false" in said(SLOW, device=CUDA, keys={"train__channels_last": False})
    assert "channels_last" not in said(SLOW, device=CUDA)
    without = facts(convolutions=False)
    assert "channels_last" not in said(SLOW, device=CUDA, keys={"train__channels_last": False}, facts=without)


def test_a_busy_machine_is_named():
    assert "up to 3 runs ran on the machine at the same time" in said(SLOW, together=3)


def test_where_nothing_is_on_record_no_cause_is_named():
    assert said(SLOW) == "not faster: the records show no cause; support of the device: fine"
    assert said(SLOW, facts={}, data_wait=math.nan) == "not faster: the records show no cause"


def test_full_precision_and_halves_against_halves_are_not_expected_to_be_faster():
    assert said(SLOW, BIG, mode="fp32", data_wait=0.9) == ""
    assert said(SLOW, BIG, data_wait=0.9, reference=arm("fp16_static", [0.9])) == ""


def test_what_was_in_use_before_is_no_part_of_the_precision():
    on_cpu = said(None, BIG)
    assert "40 % of the peak, which is the process's resident set, was in use before the model was built" in on_cpu
    assert "40 % of the peak was in use" in said(None, BIG, device=CUDA)
    assert "in use before" not in said(None, BIG, memory_before=0)
    assert "in use before" not in said(None, BIG, memory_before=1000)


def test_copies_in_fp32_are_named():
    assert "FP32 master weights (4.0 kB for 1,000 parameters)" in said(None, BIG, mode="fp16_static")
    assert "under autocast, weights, gradients and optimizer state stay FP32 (4.0 kB" in said(None, BIG)


def test_one_pair_has_no_interval_and_is_judged_by_itself():
    alone = Interval(1.05, math.nan, math.nan, math.nan, 1)
    assert "not faster" in said(alone)
    assert "not faster" not in said(replace(alone, mean=1.5))
    assert "not smaller" in said(None, alone)
    assert "not smaller" not in said(None, replace(alone, mean=0.5))


def test_skipped_updates_are_counted_by_their_kind():
    calibrating = said(skipped=3, skip_rate=0.01, overflows={"calibrating": 3})
    assert calibrating == "1 % of the updates were skipped, all of them during calibration of the initial loss scale"
    mixed = said(skipped=3, skip_rate=0.01, overflows={"calibrating": 1, "unexpected": 2})
    assert mixed == "1 % of the updates were skipped (2 calibrating, 4 unexpected)"


def test_gradients_that_the_format_flushed_to_zero_are_named_where_both_were_looked_at():
    def arms(half, full):
        runs = [tuple(measures(seed, zero_gradients=share) for seed in (0, 1)) for share in (half, full)]
        return remarks(Arm("fp16_noscale", runs[0]), Arm("fp32", runs[1]), None, None)

    (sentence,) = arms(0.9, 0.33)
    assert sentence.startswith("90 % of the activation gradients were zero, against 33 % in the reference: ")
    assert arms(0.34, 0.33) == ()
    assert arms(0.9, None) == ()
    assert arms(None, 0.33) == ()


def test_a_scale_at_its_floor_is_named():
    path = {"first": 65536.0, "min": 1.0, "max": 65536.0, "last": 1.0}
    assert said(scale=path) == "the loss scale ended at its minimum of 1 in 2 of 2 runs"
    assert said(scale={**path, "last": 2.0}) == ""
    assert said(scale={**path, "first": 1.0}) == ""


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
