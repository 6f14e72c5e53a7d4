"""A point whose parts do not go together is named before any point starts."""

import pytest
from PIL import Image

from mptrain.config.compose import Composer, compose
from mptrain.run.build import workload as build_workload
from mptrain.study.sweep.points import check, disagreements, expand
from mptrain.system.errors import CheckpointError, ConfigError, DataError
from tests import jobs_that_end as jobs

SMALL = ("dataset.image_size=8", "dataset.train_samples=64")


@pytest.fixture(scope="module")
def composer():
    return Composer()


def checked(composer, *words):
    return check(expand(words, composer.catalogue), composer, jobs.program())


def test_points_that_go_together_come_back_with_their_configurations(composer):
    points = checked(composer, *SMALL, "model=mlp,cnn", "seed=0,1")
    assert [point.config.seed for point in points] == [0, 1, 0, 1]
    assert {point.count for point in points} == {4}


def test_a_model_that_needs_what_the_data_do_not_say_is_refused_by_its_point(composer):
    with pytest.raises(ConfigError) as caught:
        checked(composer, "dataset=digits", "model=mlp,word_lstm", "seed=0,1")
    [problem] = caught.value.problems
    assert problem.what.startswith(
        "point 3/4 (model=word_lstm seed=0) and 1 more: model=word_lstm needs vocabulary_size"
    )


def test_a_learner_that_the_task_does_not_have_is_refused(composer):
    with pytest.raises(ConfigError) as caught:
        checked(composer, *SMALL, "seed=0,1", "+learners.critic.clip_norm=1")
    assert [problem.what for problem in caught.value.problems] == ["learners.critic: the task has no such learner"]
    assert caught.value.problems[0].hint == "its learners are main"


def test_weights_that_are_not_there_are_refused_by_their_point(composer, tmp_path):
    with pytest.raises(CheckpointError, match=r"^point 2/2 \(model.weights=.*\): model.weights=.* no such file or run"):
        checked(composer, *SMALL, f"model.weights=null,{tmp_path}/gone.pt")


def made(folder):
    folder.mkdir(parents=True)
    return folder


def test_missing_data_are_refused_by_their_point(composer, tmp_path):
    Image.new("L", (8, 8)).save(made(tmp_path / "there" / "train" / "a") / "1.png")
    roots = f"dataset.root={tmp_path}/there,{tmp_path}/gone"
    with pytest.raises(DataError, match=r"^point 2/2 \(dataset.root=.*/gone\): "):
        checked(composer, "dataset=image_folder", "model=mlp", roots, "dataset.image_size=8", "dataset.workers=0")


def test_a_data_set_is_loaded_once_for_all_points_that_share_it(monkeypatch):
    loaded = []
    real = build_workload.build_dataset
    monkeypatch.setattr(build_workload, "build_dataset", lambda config: loaded.append(config.seed) or real(config))
    words = [(*SMALL, f"model={model}", f"seed={seed}") for seed in (0, 1) for model in ("mlp", "cnn")]
    assert disagreements([compose(one) for one in words]) == []
    assert len(loaded) == 1
    other = compose((*SMALL, "model=mlp", "dataset.val_samples=10"))
    assert disagreements([compose(words[0]), other, compose(words[1])]) == []
    assert len(loaded) == 3


def test_whatever_the_users_data_set_does_is_a_refusal(monkeypatch):
    def leave(config):
        raise SystemExit(3)

    monkeypatch.setattr(build_workload, "build_dataset", leave)
    [(number, error)] = disagreements([compose(SMALL)])
    assert number == 0
    assert "cannot be created: sys.exit(3)" in str(error)
