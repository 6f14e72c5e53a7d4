from __future__ import annotations

import pytest

from mptrain.campaign.comparison import Question, claimed_by, name_arms
from mptrain.campaign.points import expand, validate
from mptrain.config.compose import Composer
from mptrain.errors import ConfigError


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
    with pytest.raises(ConfigError, match="one arm only"):
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


def test_a_question_comes_back_from_the_plan_of_a_sweep():
    question = Question("fp32", 0.02, "loss", ("optimizer",))
    assert Question.of(question.as_plan()) == question
    assert Question.of({"recipe": "two_cliffs"}) == Question()
