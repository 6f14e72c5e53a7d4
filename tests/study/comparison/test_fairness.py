"""Fairness: what arms may differ in, what is checked, and what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mptrain.study.comparison.fairness import check_fairness, differing_keys
from mptrain.study.comparison.results import Arm, CurvePoint
from tests.study.comparison.fake_runs import arm, measures

FULL = arm("fp32", [0.95, 0.96])
AMP = arm("amp_dynamic", [0.95, 0.96])


def of_amp(keys=None, **changes):
    return arm("amp_dynamic", [0.95, 0.96], keys=keys, **changes)


def objections(*arms, claimed=()):
    found, _ = check_fairness(arms, arms[0], claimed)
    return found


def test_arms_that_differ_in_precision_only_are_fair_and_checked():
    found, checks = check_fairness((FULL, AMP), FULL)
    assert found == ()
    text = "\n".join(checks)
    checked = ("data.json", "evaluated the same number of samples and left out the same number", "same device")
    for words in (*checked, "keys of precision, scaler", "initial weights", "orders", "first batches", "TF32 off"):
        assert words in text


def test_a_key_that_was_not_claimed_is_fatal_and_named():
    (found,) = objections(FULL, of_amp({"train__batch_size": 20, "optimizer__lr": 0.1}))
    assert found.fatal
    assert "train.batch_size is 10 in fp32, 20 in amp_dynamic" in found.what
    assert "optimizer.lr is 0.05 in fp32, 0.1 in amp_dynamic" in found.what
    (found,) = objections(FULL, of_amp({"learners__main__optimizer__lr": 8.0}))
    assert found.fatal
    (found,) = objections(FULL, of_amp({"optimizer__lr_decay": 1}), claimed=("optimizer.lr",))  # which is another word
    assert "optimizer.lr_decay is (absent) in fp32, 1 in amp_dynamic" in found.what


@pytest.mark.parametrize("claimed", [("train.batch_size", "optimizer"), ("train", "optimizer.lr")])
def test_what_was_claimed_may_differ_and_is_named_in_full(claimed):
    found, checks = check_fairness((FULL, of_amp({"train__batch_size": 20, "optimizer__lr": 0.1})), FULL, claimed)
    assert [(one.what, one.fatal) for one in found] == [
        ("arms also differ in optimizer.lr, train.batch_size, as claimed", False)
    ]
    assert checks[0] == "runs of an arm differ only in their seed"


def test_runs_of_an_arm_must_differ_in_their_seed_only():
    mixed = Arm("fp32", (measures(0), measures(1, keys={"optimizer__lr": 0.2})))
    found = objections(mixed, AMP)
    assert found[0].fatal
    assert found[0].what.startswith("runs of fp32 differ in more than their seed: optimizer.lr is 0.05")


def in_one(**change):
    """One run that differs in a single epoch or split."""
    run = measures(precision="amp_dynamic")
    return Arm(
        "amp_dynamic", (replace(run, **{name: {**getattr(run, name), **value} for name, value in change.items()}),)
    )


@pytest.mark.parametrize(
    ("other", "what", "seeds"),
    [
        (of_amp(initial_weights="other"), "initial weights of amp_dynamic and fp32", "seeds 0, 1"),
        (of_amp(data={0: ("other", "b")}), "orders of the training samples of amp_dynamic and fp32", "seeds 0, 1"),
        (
            of_amp(data={0: ("order 0 0", "other")}),
            "first batches of the epochs, including augmentation,",
            "seeds 0, 1",
        ),
        (in_one(data={2: ("other", "batch 0 2")}), "orders of the training samples", "seed 0"),
        (in_one(data={2: ("order 0 2", "other")}), "first batches of the epochs", "seed 0"),
        (in_one(evaluated={"test": "other"}), "evaluated samples", "seed 0"),
    ],
)
def test_other_weights_orders_batches_or_samples_are_fatal(other, what, seeds):
    found = [one for one in objections(Arm("fp32", FULL.runs[: len(other.runs)]), other) if what in one.what]
    assert [one.fatal for one in found] == [True]
    assert f"differ for {seeds}" in found[0].what


def test_a_module_that_may_have_been_trained_on_is_named_where_a_model_is_the_users_own():
    own = "give its class, or update_model=False"
    for code, follows in (("digest", [True]), (None, [False])):
        full = arm("fp32", [0.95, 0.96], model_code=code)
        found = objections(full, of_amp(initial_weights="other", model_code=code))
        assert [own in one.hint for one in found if "initial weights" in one.what] == follows
        found = objections(full, of_amp(data={0: ("other", "b")}, model_code=code))
        assert not any(own in one.hint for one in found)


@pytest.mark.parametrize(
    ("change", "key", "claimed"),
    [
        ({"initial_weights": "other"}, "model__widths", "model"),
        ({"data": {0: ("other", "other")}}, "dataset__augment", "dataset.augment"),
        ({"data": {0: ("other", "other")}}, "train__batch_size", "train"),
    ],
)
def test_other_weights_or_data_that_follow_from_a_claim_are_flagged(change, key, claimed):
    found = objections(FULL, of_amp({key: 7}, **change), claimed=(claimed,))
    assert len(found) > 1
    assert not any(one.fatal for one in found)
    assert all(f"because of {key.replace('__', '.')}" in one.what for one in found[1:])


@pytest.mark.parametrize(
    ("keys", "claimed", "fatal"),
    [
        ({}, ("model",), [True]),  # which holds no difference
        ({"optimizer__lr": 0.1}, ("optimizer",), [True, False]),  # from which no other weights follow
        ({"model__widths": [1]}, (), [True, True]),
    ],
)
def test_other_weights_that_follow_from_no_claim_stay_fatal(keys, claimed, fatal):
    found = objections(FULL, of_amp(keys, initial_weights="other"), claimed=claimed)
    assert [one.fatal for one in found] == fatal
    assert "initial weights" in " ".join(one.what for one in found if one.fatal)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (of_amp(device="cuda:0 (H100)"), "device: cpu (1 threads, AVX512) (fp32); cuda:0 (H100) (amp_dynamic)"),
        (of_amp(threads=2), "CPU threads: 1 (fp32); 2 (amp_dynamic)"),
        (
            of_amp(versions={"mptrain": "0.2.0", "torch": "2.11.0", "cuda": "13.2"}),
            "version of torch: 2.15.0 (fp32); 2.11",
        ),
        (of_amp(steps=200), "amp_dynamic ran for 200 steps, fp32 for 300"),
        (Arm("amp_dynamic", AMP.runs[:1]), "amp_dynamic has no run with seed 1"),
        (of_amp(changes=("threads was 1, now 2",)), "(seeds 0, 1) changed its configuration on resume"),
    ],
)
def test_another_machine_length_or_number_of_seeds_is_flagged(other, what):
    found, checks = check_fairness((FULL, other), FULL)
    assert [(what in one.what, one.fatal) for one in found] == [(True, False)]
    machine = what.startswith(("device", "CPU threads", "version"))
    assert any("same device" in check for check in checks) != machine


@pytest.mark.parametrize(
    "other",
    [
        of_amp({"learners__main__scaler__init_scale": 8.0}),  # which belongs to the precision
        Arm("amp_dynamic", tuple(replace(run, data={0: run.data[0]}) for run in AMP.runs)),  # one run stopped earlier
        of_amp(threads=0, device="", versions={}),  # nothing is known of its machine
        of_amp(samples=0, unusable={}),  # nor of its samples
        of_amp(samples=100, unusable={"test": 3}, status="preempted"),
    ],
)
def test_what_is_no_difference_is_not_objected_to(other):
    assert objections(FULL, other) == ()
    assert not any(one.fatal for one in objections(FULL, of_amp({"threads": 2, "device": "cpu"})))


def test_what_is_not_on_record_is_flagged_as_not_checked():
    found, checks = check_fairness((FULL, of_amp(initial_weights="", data={}, data_card="", evaluated={})), FULL)
    assert len(found) == 5
    assert not any(one.fatal for one in found)
    assert all("could not be checked" in one.what for one in found)
    assert not any("digest" in check for check in checks)


def test_partly_missing_digests_are_flagged_and_the_rest_is_checked():
    half = Arm("amp_dynamic", (AMP.runs[0], replace(AMP.runs[1], initial_weights="")))
    found, checks = check_fairness((FULL, half), FULL)
    assert ["could not be checked" in one.what for one in found] == [True]
    assert any("initial weights" in check and "the 1 recorded pairs" in check for check in checks)


@pytest.mark.parametrize("role", ["reference", "arm"])
def test_trap_41_fp32_with_tf32_on_is_flagged(role):
    hidden = arm("fp32", [0.95, 0.96], keys={"precision__tf32": True})
    found = objections(*((hidden, AMP) if role == "reference" else (AMP, hidden)))
    assert any("fp32 is called FP32 and has precision.tf32=true" in one.what for one in found)


def test_an_arm_that_is_called_tf32_may_have_it_unless_it_is_the_reference():
    named = arm("tf32", [0.95, 0.96], "fp32", {"precision__tf32": True, "precision__name": "tf32"})
    named = Arm("tf32", tuple(replace(run, chosen={"precision": "tf32"}) for run in named.runs))
    assert objections(FULL, named) == ()
    assert any("is the reference and has precision.tf32=true" in one.what for one in objections(named, AMP))


def test_a_reference_in_an_emulated_format_is_not_said_to_compute_in_fp32():
    named = arm("mxfp8_emulated", [0.95, 0.96], "fp32", {"precision__emulate": "mxfp8", "precision__name": "x"})
    _, checks = check_fairness((named, FULL), named)
    assert not any("computes in FP32" in check for check in checks)


def test_differences_are_of_the_arm_against_the_reference():
    found = differing_keys(of_amp({"optimizer__lr": 0.1}), FULL)
    assert found["optimizer.lr"] == (0.05, 0.1)
    assert found["scaler.init_scale"] == ("(absent)", 65536.0)
    assert not any(key.startswith(("run", "log", "chosen", "seed")) for key in found)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"data_card": "other"}, "descriptions of the data (data.json) of amp_dynamic and fp32 differ"),
        ({"samples": 100}, "amp_dynamic was evaluated on 100 samples of test, fp32 on 400, for seeds 0, 1"),
        ({"unusable": {"test": 3}}, "amp_dynamic left out 3 samples of test, fp32 0, for seeds 0, 1"),
    ],
)
def test_other_test_data_are_fatal_unless_they_follow_from_a_claim(change, what):
    (found,) = objections(FULL, of_amp(**change))
    assert found.fatal
    assert what in found.what
    claimed = objections(FULL, of_amp({"dataset__path": "b"}, **change), claimed=("dataset.path",))
    assert [one.fatal for one in claimed] == [False, False]
    assert claimed[1].what.endswith("because of dataset.path")


def test_runs_changed_on_the_way_are_fatal_and_named_with_keys():
    one, other = AMP.runs
    lr, epochs = "optimizer.lr was 0.1, now 0.2", "train.epochs was 3, now 4"
    for claimed in ((), ("optimizer",)):
        (found,) = objections(FULL, Arm("amp_dynamic", (one, replace(other, changes=(lr, epochs)))), claimed=claimed)
        assert found.fatal
        assert found.what.startswith("amp_dynamic-1 of amp_dynamic (seed 1)")
        assert found.what.endswith(f"{lr}; {epochs}")


def test_processes_that_began_with_other_memory_are_flagged():
    def flagged(before):
        arms = [arm("fp32", [0.9, 0.91]), arm("amp_dynamic", [0.9, 0.91], memory_before=before)]
        return [one for one in check_fairness(arms, arms[0])[0] if "before the model was built" in one.what]

    assert flagged(410_000_000) == []
    (found,) = flagged(700_000_000)
    assert not found.fatal
    assert "from 400.0 MB to 700.0 MB" in found.what


def test_runs_that_the_seed_changes_nothing_of_are_one_run():
    point = (CurvePoint(30, 30, 300, {"val_top1": 0.9}),)
    same = {"initial_weights": "a", "data": {0: ("order", "batch")}, "course": point}
    copies = Arm("fp32", tuple(measures(seed, 0.95, "fp32", **same) for seed in (0, 1, 2)))
    other = Arm("amp", tuple(measures(seed, 0.9 + seed / 100, "amp_dynamic", **same) for seed in (0, 1, 2)))
    fatal = [each.what for each in check_fairness((copies, other), copies)[0] if each.fatal]
    assert "seeds 0 to 2 of fp32 have equal initial weights, samples and metrics" in fatal or any(
        "of fp32 have equal initial weights, samples and metrics" in what for what in fatal
    )
    assert not any("of amp have equal" in what for what in fatal)


@pytest.mark.parametrize(
    ("codes", "claimed", "said", "fatal"),
    [
        ((None, None), (), None, None),  # a model of mptrain's
        (("a", "a"), (), "the source of the model's classes, and its structure, are the same in all runs", None),
        (("a", "b"), (), "the source of the model's classes, or its structure, is not the same in all runs", True),
        (
            ("a", "b"),
            ("model",),
            "the source of the model's classes, or its structure, is not the same in all runs",
            False,
        ),
        (("a", ""), (), "it is not known whether the code of the model is the same in all runs", False),
        (("", ""), (), "it is not known whether the code of the model is the same in all runs", False),
    ],
)
def test_the_code_of_a_model_of_ones_own_is_compared_as_far_as_it_is_known(codes, claimed, said, fatal):
    one = Arm("fp32", tuple(replace(run, model_code=codes[0]) for run in FULL.runs))
    other = of_amp(model_code=codes[1])
    found, checks = check_fairness((one, other), one, claimed)
    objected = {each.what.partition(":")[0]: each.fatal for each in found if "of the model" in each.what}
    held = [check for check in checks if "of the model" in check]
    assert held == ([said] if said and fatal is None else [])
    assert objected == ({} if fatal is None else {said: fatal})
