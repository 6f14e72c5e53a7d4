"""Arms: grouping, names, pairs and the reference."""

from __future__ import annotations

import pytest

from mptrain.study.comparison.arms import choose_reference, group_into_arms, pair_by_seed
from mptrain.study.comparison.results import Arm
from mptrain.system.errors import UsageError
from tests.study.comparison.fake_runs import arm, measures


def names_of(runs, *given, **how):
    return [one.name for one in group_into_arms(runs, *given, **how)]


def with_keys(seed=0, **keys):
    return measures(seed, keys=keys)


def threads(seed, count, **more):
    return measures(seed, keys={"threads": count}, **more)


def test_runs_that_differ_in_their_seed_only_are_an_arm():
    runs = [measures(seed, precision=mode) for seed in (2, 0, 1) for mode in ("amp_dynamic", "fp32")]
    arms = group_into_arms(runs)
    assert [one.name for one in arms] == ["amp_dynamic", "fp32"]
    assert [[run.seed for run in one.runs] for one in arms] == [[0, 1, 2], [0, 1, 2]]
    elsewhere = with_keys(1, run__root="elsewhere", run__name="x", log__ring=8, extensions__allow=["mine"])
    assert len(group_into_arms([measures(0), elsewhere])) == 1


def test_arms_are_named_by_groups_then_by_keys_that_differ():
    scales = [measures(0, precision="fp16_static", keys={"scaler__init_scale": scale}) for scale in (1.0, 8.0)]
    assert names_of(scales) == ["scaler.init_scale=1", "scaler.init_scale=8"]
    both = ["fp32", "fp16_static scaler.init_scale=1", "fp16_static scaler.init_scale=8"]
    assert names_of([measures(0), *scales]) == both
    keys = {"chosen__model": "plain16", "model__widths": [1], "optimizer__lr": 0.1}
    other = measures(0, keys=keys, chosen={"precision": "fp32", "model": "plain16", "dataset": "digits"})
    assert names_of([measures(0), other]) == ["model=cnn", "model=plain16"]
    weights = [measures(0), with_keys(weights="old.pt"), with_keys(weights="new.pt")]
    assert names_of(weights) == ["fp32", "weights=old.pt", "weights=new.pt"]
    apart = [threads(0, 1, precision="fp32"), measures(0, keys={"threads": 2, "optimizer__lr": 0.1})]
    assert names_of(apart) == ["optimizer.lr=0.05", "optimizer.lr=0.1"]  # the machine is not named beside it


def test_arms_are_called_as_given_or_after_their_places():
    arms = group_into_arms([measures(0), measures(1), with_keys(optimizer__lr=1.0)], ["a", "a", "b"])
    assert [(one.name, len(one.runs)) for one in arms] == [("a", 2), ("b", 1)]
    assert names_of([threads(0, 1), threads(0, None)], paths=["outputs/p16", "tty80/"]) == ["p16", "tty80"]
    assert names_of([threads(0, 1), threads(0, None, precision="amp_dynamic")]) == ["fp32", "amp_dynamic"]
    runs = [measures(seed, precision=mode) for mode in ("fp32", "amp_dynamic") for seed in (0, 1)]
    for places in (["f0", "f1", "a0", "a1"], ["sweep"] * 4):  # an arm in several, several arms in one
        assert names_of(runs, paths=places) == ["fp32", "amp_dynamic"]
    assert names_of(runs, paths=["full", "full", "half", "half"]) == ["full", "half"]


@pytest.mark.parametrize("names", [None, ["x", "x"]])
def test_a_seed_counts_once_in_an_arm(names):
    with pytest.raises(UsageError, match=r"have seed 4: runs/one and runs/two"):
        group_into_arms([measures(4, path="runs/one"), measures(4, path="runs/two")], names)


def test_runs_are_paired_by_their_seeds():
    one, other = Arm("a", (measures(0), measures(2), measures(3))), Arm("b", (measures(2), measures(3), measures(5)))
    assert [(run.seed, reference.seed) for run, reference in pair_by_seed(one, other)] == [(2, 2), (3, 3)]


def test_the_reference_is_the_one_named_or_the_only_fp32_or_first():
    amp, full = arm("amp_dynamic", [0.9]), arm("fp32", [0.9])
    assert choose_reference([amp, full]) is full
    assert choose_reference([amp, full], "amp_dynamic") is amp
    assert choose_reference([amp, arm("a", [0.9], "fp32"), arm("b", [0.9], "fp32")]) is amp
    for wrong, hint in (("amp_dynamc", "did you mean amp_dynamic?"), ("zzz", "the arms are amp_dynamic, fp32")):
        with pytest.raises(UsageError) as caught:
            choose_reference([amp, full], wrong)
        assert caught.value.hint == hint


def test_typed_names_are_as_long_as_it_takes_to_tell_them_apart():
    runs = [measures(0), measures(0, precision="amp_dynamic")]
    assert names_of(runs, paths=["a/run", "b/run"]) == ["a/run", "b/run"]
    assert names_of(runs, paths=["x/a/run", "x/a/other"]) == ["run", "other"]


def test_runs_of_other_machines_are_more_seeds_of_an_arm():
    (only,) = group_into_arms([threads(0, 1), threads(1, None)])
    assert [run.seed for run in only.runs] == [0, 1]
    assert names_of([threads(0, 1), threads(0, 2)]) == ["threads=1", "threads=2"]
