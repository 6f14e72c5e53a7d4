"""Schedulers of torch and timm, by ``name`` and by ``_target_``: what is refused, and with which words."""

from __future__ import annotations

import sys

import pytest

from mptrain.config.catalogue import configs_folder
from mptrain.config.compose import compose, reload
from mptrain.config.learner_checks import build_schedule
from mptrain.schedule.stepped import SteppedSchedule
from mptrain.system.errors import ConfigError, EnvironmentRefused
from tests.loops import each
from tests.small_runs import TINY, parts_of, run_in_process

TORCH = "torch.optim.lr_scheduler"


def problems(*words):
    with pytest.raises(ConfigError) as refused:
        compose(words)
    return [(problem.what, problem.hint) for problem in refused.value.problems]


@each(
    ("words", "what", "hint"),
    [
        (["Cosine"], "torch.optim.lr_scheduler has no scheduler Cosine", "schedule.name=CosineAnnealingLR or "),
        (["ReduceLROnPlateau"], "ReduceLROnPlateau needs the metric of each validation", "set schedule=plateau"),
        (["LambdaLR"], "LambdaLR needs a function, which a configuration cannot hold", "write a function(optimizer)"),
        (["SequentialLR", "milestones=[3]"], "SequentialLR needs other schedulers", "write a function(optimizer)"),
        (["OneCycleLR", "cycle_momentum=true"], "schedule.cycle_momentum=true: mptrain keeps", "leave it out"),
        (["StepLR"], "schedule.step_size is required by torch", "set schedule.step_size=VALUE"),
        (["StepLR", "step_size=2.5"], "schedule.step_size=2.5: must be a whole number", ""),
        (["StepLR", "step_size=2", "interval=step"], "schedule.interval=step: must be update or epoch", "epoch"),
        (["StepLR", "step_size=2", "gama=3"], "unknown key 'schedule.gama'", "schedule.gamma=3?"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused_with_what_can(words, what, hint):
    [(found, proposed)] = problems(
        "schedule=torch", f"schedule.name={words[0]}", *(f"schedule.{one}" for one in words[1:])
    )
    assert what in found
    assert hint in proposed


@each(
    ("words", "message"),
    [
        (["OneCycleLR", "total_steps=5"], "OneCycleLR fails in step 6 of 18: Tried to step 6 times"),
        (["CosineAnnealingWarmRestarts", "T_0=-1"], "Expected positive integer T_0"),
    ],
)
def test_what_a_scheduler_itself_refuses_is_an_error_of_the_configuration(words, message):
    with pytest.raises(ConfigError, match=message):
        parts_of(*TINY, "schedule=torch", f"schedule.name={words[0]}", *(f"schedule.{one}" for one in words[1:]))


def test_what_mptrain_sets_and_a_warm_up_without_end_are_said():
    words = ("schedule=torch", "schedule.name=OneCycleLR")
    assert [note for note in parts_of(*TINY, *words)[0].notes if note.startswith("schedule")] == [
        "schedule: total_steps is the number of updates of the run",
        "schedule: the momentum stays constant, cycle_momentum=false",
    ]
    assert parts_of(*TINY, *words, "schedule.total_steps=18", "schedule.cycle_momentum=false")[0].notes == ()
    notes = parts_of(*TINY, "schedule=cosine", "schedule.warmup=19")[0].notes
    assert notes == ("schedule.warmup=19 is longer than the 18 planned updates: the rate only rises",)
    assert parts_of(*TINY, "schedule=cosine", "schedule.warmup=18")[0].notes == ()


def test_a_saved_configuration_names_the_class_and_builds_the_same():
    config = compose(["schedule=torch", "schedule.name=StepLR", "schedule.step_size=7", "schedule.interval=epoch"])
    again = reload(config.yaml)
    assert again.schedule == config.schedule
    assert again.schedule.arguments == {"name": "StepLR", "step_size": 7, "interval": "epoch"}
    rates = [build_schedule(one.schedule).rates(0.1, 20, 2) for one in (config, again)]
    assert rates[0] == rates[1]
    assert rates[0][13:15] == [0.1, pytest.approx(0.01)]


def test_a_target_in_a_file_of_ones_own_is_the_same_scheduler(tmp_path):
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule/mine.yaml").write_text(f"_target_: {TORCH}.OneCycleLR\nmax_lr: 0.3\ninterval: epoch\n")
    words = (*TINY, "train.epochs=5", "precision=fp32", "--config-dir", str(tmp_path), "schedule=mine")
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lr=0.012" in done.stdout  # 0.3 / 25


def test_learners_may_have_different_schedulers():
    words = ("schedule=torch", "schedule.name=StepLR", "schedule.step_size=3")
    config = compose([*words, f"+learners.main.schedule={{_target_:{TORCH}.ExponentialLR,gamma:0.5}}"])
    schedule = build_schedule(config.for_learner("main").schedule)
    assert isinstance(schedule, SteppedSchedule)
    assert schedule.rates(1.0, 3, 1) == [1.0, 0.5, 0.25, 0.25]


def test_without_timm_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.scheduler", None)
    with pytest.raises(EnvironmentRefused, match="schedule=timm needs the package timm") as refused:
        compose(["schedule=timm"])
    assert refused.value.hint == "pip install 'mptrain[timm]'"


def test_every_option_of_the_group_can_be_chosen():
    for path in sorted((configs_folder() / "schedule").glob("*.yaml")):
        if path.stem == "timm":
            pytest.importorskip("timm")
        assert build_schedule(compose([f"schedule={path.stem}"]).schedule)


STOP = "train.early_stopping"


@each(
    ("word", "what", "hint"),
    [
        (f"{STOP}=5", f"{STOP}=5: must be a mapping", f"its keys are {STOP}.patience"),
        (f"{STOP}={{patence:3}}", f"unknown key '{STOP}.patence'", f"{STOP}.patience=3?"),
        (f"{STOP}.patense=3", f"unknown key '{STOP}.patense'", f"{STOP}.patience=3?"),
        (f"{STOP}.patience=0", f"{STOP}.patience=0: must be a whole number, at least 1", ""),
        (f"{STOP}.mode=up", f"{STOP}.mode=up: must be min or max, or null", ""),
    ],
)
def test_wrong_words_about_early_stopping_get_the_right_ones(word, what, hint):
    [(found, proposed)] = problems(word)
    assert what in found
    assert hint in proposed


def test_early_stopping_is_a_section_of_its_own():
    assert compose([]).train.early_stopping is None
    found = compose(["train.early_stopping={patience:3}", "train.early_stopping.min_delta=0.1"]).train.early_stopping
    assert (found.patience, found.min_delta, found.metric) == (3, 0.1, None)
    assert reload(compose(["train.early_stopping.patience=3"]).yaml).train.early_stopping.patience == 3
