import pytest

from mptrain.config.compose import Composer
from mptrain.study.sweep.points import MOST_POINTS, expand, validate
from mptrain.system.errors import ConfigError
from tests.loops import each


@pytest.fixture(scope="module")
def composer():
    return Composer()


def labels(words, composer):
    return [point.label for point in expand(words, composer.catalogue)]


def test_all_combinations_appear_and_the_last_word_varies_fastest(composer):
    assert labels(["a=1,2", "b=3", "c=x,y"], composer) == ["a=1 c=x", "a=1 c=y", "a=2 c=x", "a=2 c=y"]
    points = expand(["a=1,2", "b=3"], composer.catalogue)
    assert points[1].overrides == ("a=2", "b=3")
    assert points[1].number == 1


def test_ranges_and_globs_over_options_are_expanded(composer):
    assert labels(["seed=range(1,4)"], composer) == ["seed=1", "seed=2", "seed=3"]
    assert labels(["precision=glob(fp16_*, exclude=*pure)"], composer) == [
        "precision=fp16_dynamic",
        "precision=fp16_noscale",
        "precision=fp16_static",
    ]
    assert labels(["seed=choice(3,1)"], composer) == ["seed=3", "seed=1"]


def test_one_point_without_any_choice(composer):
    assert labels(["a=1"], composer) == ["(no overrides)"]


@each(
    ("word", "message"),
    [
        ("optimizer.lr=interval(0,1)", "infinitely many values"),
        ("seed=glob(*)", "glob\\(\\) only works for groups"),
        ("precision=glob(zzz*)", "has no values"),
        ("run.name=a,b", "run.name cannot be swept"),
        ("hydra/sweeper=optuna", "mptrain expands and runs sweeps itself"),
        ("hydra.launcher.n_jobs=2", "mptrain expands and runs sweeps itself"),
        ("seed=range(0,1000000000)", "more than 10,000 points"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(composer, word, message):
    with pytest.raises(ConfigError, match=message):
        expand([word], composer.catalogue)


def test_the_number_of_points_is_bounded_before_they_are_made(composer):
    many = ",".join(map(str, range(200)))
    with pytest.raises(ConfigError, match=f"more than {MOST_POINTS:,} points"):
        expand([f"a={many}", f"b={many}", f"c={many}", f"d={many}", f"e={many}"], composer.catalogue)


def test_every_point_is_checked_and_the_wrong_one_is_named(composer):
    points = expand(["precision=fp32,fp16_static", "scaler.scale=8"], composer.catalogue)
    with pytest.raises(ConfigError) as caught:
        validate(points, composer)
    [problem] = caught.value.problems
    assert problem.what.startswith("point 1/2 (precision=fp32): unknown key 'scaler.scale'")


def test_a_problem_of_all_points_names_none(composer):
    with pytest.raises(ConfigError) as caught:
        validate(expand(["seed=1,2", "train.epochs=0"], composer.catalogue), composer)
    assert [problem.what for problem in caught.value.problems] == ["train.epochs=0: must be a whole number, at least 1"]


def test_a_problem_of_some_points_names_the_first_and_counts_the_others(composer):
    with pytest.raises(ConfigError) as caught:
        validate(expand(["train.epochs=1,0", "seed=1,2"], composer.catalogue), composer)
    assert caught.value.problems[0].what.startswith("point 3/4 (train.epochs=0 seed=1) and 1 more: train.epochs=0")


def test_warnings_are_kept_with_their_points(composer):
    points = validate(expand(["scaler=static", "scaler.scale=8,9"], composer.catalogue), composer)
    assert [len(point.warnings) for point in points] == [0, 1]
