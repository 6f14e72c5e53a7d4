from __future__ import annotations

from dataclasses import replace

import pytest

from mptrain.config.compose import Composer
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.sweeps import Sweep, SweepJob
from mptrain.study.sweep.comparisons import (
    ComparisonOptions,
    claimed_by,
    judge_runs,
    judge_sweep,
    name_arms,
    reference_of,
)
from mptrain.study.sweep.points import Point, expand, validate
from mptrain.system.errors import ConfigError, StorageError, UsageError
from mptrain.system.records import EvalRecord, EventRecord
from tests.study.comparison.fake_runs import epoch, some_summary, write_run, yaml_of


@pytest.fixture(scope="module")
def composer():
    return Composer()


def arms_of(composer, *words):
    return [point.arm for point in name_arms(expand(words, composer.catalogue))]


def test_seeds_repeat_arms_and_form_none(composer):
    assert arms_of(composer, "precision=fp32,amp_dynamic", "seed=0,1", "model=mlp") == [
        "fp32",
        "fp32",
        "amp_dynamic",
        "amp_dynamic",
    ]
    with pytest.raises(ConfigError, match="only one arm"):
        arms_of(composer, "precision=fp32", "seed=0,1")


def test_an_arm_is_called_by_its_options_and_by_keys_that_are_no_groups(composer):
    words = ("precision=fp16_static", "scaler.scale=8,128", "model=mlp,cnn", "seed=range(2)")
    assert list(dict.fromkeys(arms_of(composer, *words))) == [
        "scaler.scale=8 mlp",
        "scaler.scale=8 cnn",
        "scaler.scale=128 mlp",
        "scaler.scale=128 cnn",
    ]


def claimed(composer, *words):
    return claimed_by(validate(name_arms(expand(words, composer.catalogue)), composer))


def test_words_about_precision_claim_nothing_else(composer):
    assert claimed(composer, "precision=fp32,fp16_static", "seed=0,1") == ()
    assert claimed(composer, "precision=fp16_static", "scaler.scale=1,8", "seed=0,1") == ()


def test_a_word_claims_every_key_that_follows_from_it(composer):
    keys = claimed(composer, "model=mlp,word_lstm", "seed=0,1")
    assert {"model._target_", "optimizer._target_", "dataset._target_", "train.batch_size"} <= set(keys)
    assert "seed" not in keys
    assert claimed(composer, "train.batch_size=16,32", "seed=0") == ("train.batch_size",)


def test_a_word_of_one_group_excuses_nothing_within_it(composer):
    def point(number, arm, words):
        return Point(number, ("model=mlp", *words), words, arm=arm)

    arms = [
        point(0, "sgd/fp32", ("optimizer=sgd", "precision=fp32")),
        point(1, "sgd/amp", ("optimizer=sgd", "precision=amp_dynamic")),
        point(2, "adam/fp32", ("optimizer=adam", "precision=fp32")),
        point(3, "adam/amp", ("optimizer=adam", "precision=amp_dynamic")),
    ]
    assert claimed_by(validate(arms, composer)) == ()
    arms[3] = point(3, "adam/amp", ("optimizer=adam", "precision=amp_dynamic", "optimizer.lr=0.5"))
    assert claimed_by(validate(arms, composer)) == ("optimizer.lr",)


def test_the_reference_is_chosen_before_anything_is_run(composer):
    points = validate(name_arms(expand(("precision=amp_dynamic,fp32", "seed=0,1"), composer.catalogue)), composer)
    assert reference_of(points) == "fp32"
    points = validate(name_arms(expand(("precision=bf16,amp_dynamic", "seed=0,1"), composer.catalogue)), composer)
    assert reference_of(points) == "bf16"


def sweep_of(folder, *arms):
    jobs = [
        SweepJob(number, f"{number:03d}", (), (), arm, "failed", 3, "out of memory") for number, arm in enumerate(arms)
    ]
    return Sweep(folder, "comparison", (), (), "train", 1, tuple(jobs), plan={"reference": "fp32"})


def test_a_reference_without_a_run_is_not_replaced(tmp_path):
    for number, seed in ((2, 0), (3, 1)):
        write_run(tmp_path, f"{number:03d}", config=yaml_of(seed, "amp_dynamic"), summary=some_summary())
    with pytest.raises(UsageError, match="the reference fp32 has no run to compare with: out of memory"):
        judge_sweep(sweep_of(tmp_path, "fp32", "fp32", "amp", "amp"))


def test_an_arm_without_a_run_is_named(tmp_path):
    for number, (precision, seed) in enumerate([("fp32", 0), ("fp32", 1), ("amp_dynamic", 0), ("amp_dynamic", 1)]):
        write_run(tmp_path, f"{number:03d}", config=yaml_of(seed, precision), summary=some_summary())
    found = judge_sweep(sweep_of(tmp_path, "fp32", "fp32", "amp", "amp", "huge"))[""]
    assert [result.arm.name for result in found.arms] == ["fp32", "amp"]
    assert "1 run of huge did not start: out of memory" in [objection.what for objection in found.objections]


def grouped_sweep(folder, rates, values, **plan):
    """A recipe's sweep with a group for each rate, and two seeds; ``values`` of (rate, arm) are val and test top1."""
    jobs = []
    for (rate, arm), (val, test) in values.items():
        for seed in (0, 1):
            number, precision = len(jobs), "fp32" if arm == "fp32" else "amp_dynamic"
            config = yaml_of(seed, precision, optimizer__lr=rates[rate])
            records = (
                EventRecord("start", 0, {"initial_weights": f"weights {seed}"}),
                *(epoch(1, 30, 30, top1=val + seed / 1000) for _ in "1" if val is not None),
                EvalRecord("test", 30, 1, 397, {"top1": test + seed / 1000, "loss": 0.1}, data="tested"),
            )
            summary = some_summary(test={"top1": test + seed / 1000, "loss": 0.1})
            write_run(folder, f"{number:03d}", config=config, records=records, summary=summary)
            jobs.append(SweepJob(number, f"{number:03d}", (), (), f"{rate}/{arm}", "done", 0))
    options = ComparisonOptions("fp32", 0.05, "top1").as_plan() | plan
    return Sweep(folder, "recipe", (), (), "train", 1, tuple(jobs), plan=options)


RATES = {"low": 0.01, "high": 0.1}
VALUES = {
    ("low", "fp32"): (0.80, 0.99),  # better on test, but that decides nothing
    ("low", "amp"): (0.90, 0.92),
    ("high", "fp32"): (0.95, 0.93),
    ("high", "amp"): (0.60, 0.97),
}


def test_arms_are_compared_in_the_groups_that_validation_finds_best_for_them(tmp_path):
    found = judge_sweep(grouped_sweep(tmp_path, RATES, VALUES, best=True))
    assert list(found) == ["low", "high", "best"]
    best = {result.arm.name: result for result in found["best"].arms}
    assert best["fp32"].metric.mean == pytest.approx(0.9305)
    assert best["amp"].metric.mean == pytest.approx(0.9205)
    assert best["amp"].verdict.word == "equivalent"
    assert not [objection for objection in found["best"].objections if objection.fatal]  # the rate may differ there
    assert "each arm is in the group whose mean metric in the last validation is best: fp32 high, amp low" in " ".join(
        found["best"].notes
    )
    assert list(judge_sweep(grouped_sweep(tmp_path / "without", RATES, VALUES))) == ["low", "high"]


def test_a_group_without_a_validation_or_with_a_run_that_failed_is_not_the_best(tmp_path):
    values = VALUES | {("high", "fp32"): (None, 0.93)}
    best = judge_sweep(grouped_sweep(tmp_path / "a", RATES, values, best=True))["best"]
    assert best.arms[0].metric.mean == pytest.approx(0.9905)
    sweep = grouped_sweep(tmp_path / "b", RATES, VALUES, best=True)
    path = RunPaths(tmp_path / "b" / "005").run_json  # high/fp32, which has been validated
    path.write_text(path.read_text().replace('"done"', '"failed"'))
    assert judge_sweep(sweep)["best"].arms[0].metric.mean == pytest.approx(0.9905)


def test_without_a_validation_or_test_data_nothing_is_known_to_be_the_best(tmp_path):
    values = {key: (None, test) for key, (_, test) in VALUES.items()}
    fatal = [
        each.what for each in judge_sweep(grouped_sweep(tmp_path / "a", RATES, values, best=True))["best"].objections
    ]
    assert "no group of fp32 has a validation of top1 in all of its runs, so none is known to be the best" in fatal
    sweep = grouped_sweep(tmp_path / "b", RATES, VALUES, best=True)
    for number in range(len(sweep.jobs)):
        path = tmp_path / "b" / f"{number:03d}" / "summary.json"
        path.write_text(path.read_text().replace('"metric_split": "test"', '"metric_split": "val"'))
    fatal = [each.what for each in judge_sweep(sweep)["best"].objections if each.fatal]
    assert any("on which the arms are compared, as there are no test data" in what for what in fatal)


def test_the_best_is_of_the_metric_and_direction_that_any_run_knows(tmp_path):
    sweep = grouped_sweep(
        tmp_path, {"huge": 9.0, **RATES}, {("huge", "fp32"): (0.1, 0.1), ("huge", "amp"): (0.1, 0.1), **VALUES}
    )
    for number in range(4):  # failed before anything was known
        run = tmp_path / f"{number:03d}"
        (run / "summary.json").unlink()
        (run / "run.json").write_text((run / "run.json").read_text().replace('"done"', '"failed"'))
    found = judge_sweep(replace(sweep, plan={**sweep.plan, "metric": None, "best": True}))["best"]
    assert "best: fp32 high, amp low" in " ".join(found.notes)


def test_what_differs_between_arms_of_a_group_stays_unfair_in_the_best_ones(tmp_path):
    sweep = grouped_sweep(tmp_path, RATES, VALUES, best=True)
    for number in (2, 3):  # low/amp
        path = tmp_path / f"{number:03d}" / "config.yaml"
        path.write_text(path.read_text().replace("batch_size: 10", "batch_size: 20"))
    found = judge_sweep(sweep)
    for group in ("low", "best"):
        fatal = [objection.what for objection in found[group].objections if objection.fatal]
        assert any("train.batch_size is 10 in fp32, 20 in amp" in what for what in fatal), group


def test_a_question_comes_back_from_the_plan_of_a_sweep():
    question = ComparisonOptions("fp32", 0.02, "loss", ("optimizer",), best=True)
    assert ComparisonOptions.of(question.as_plan()) == question
    assert ComparisonOptions.of({"recipe": "two_cliffs"}) == ComparisonOptions()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("margin", "x"),
        ("margin", -1),
        ("margin", None),
        ("claimed", 3),
        ("claimed", "x"),
        ("metric", 3),
        ("reference", []),
    ],
)
def test_a_plan_of_wrong_types_is_a_damaged_file(name, value):
    with pytest.raises(StorageError, match=rf"here/sweep.json is damaged: plan.{name}="):
        ComparisonOptions.of({**ComparisonOptions().as_plan(), name: value}, "here/sweep.json")


def test_runs_are_called_as_they_were_typed_and_the_reference_also_by_its_precision(tmp_path):
    full, half = str(tmp_path / "p16"), str(tmp_path / "tty80")
    for name, mode in (("p16", "fp32"), ("tty80", "amp_dynamic")):
        write_run(tmp_path, name, config=yaml_of(0, mode), summary=some_summary())
    names = ["p16", "tty80"]
    found = judge_runs([half, full], ComparisonOptions(reference="precision=fp32"), anyway=True)
    assert [result.arm.name for result in found.arms] == names
    assert judge_runs([half, full], ComparisonOptions(reference=names[1]), anyway=True).reference == names[1]
    with pytest.raises(UsageError, match="no arm is called 'bf16'"):
        judge_runs([half, full], ComparisonOptions(reference="bf16"), anyway=True)
