"""Learners may differ in optimizer, schedule, scaler and clipping, and only in these."""

from __future__ import annotations

import pytest

from mptrain.config.compose import compose, reload
from mptrain.system.errors import ConfigError
from tests.loops import each


def problems(*words):
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return {problem.what: problem.hint for problem in caught.value.problems}


def test_what_a_learner_does_not_say_is_what_all_share():
    config = compose(["optimizer=adam", "learners.critic.optimizer.lr=0.5", "train.clip_norm=3"])
    own, other = config.for_learner("critic"), config.for_learner("other")
    assert own.optimizer.arguments == {**config.optimizer.arguments, "lr": 0.5}
    assert (own.scaler, own.schedule, own.clip_norm) == (config.scaler, config.schedule, 3.0)
    assert (other.optimizer, other.scaler, other.clip_norm) == (config.optimizer, config.scaler, 3.0)


def test_each_part_can_differ_and_null_turns_clipping_off():
    words = ["learners.a.scaler.init_scale=8", "learners.a.schedule.warmup=5", "learners.a.clip_norm=null"]
    own = compose(["train.clip_norm=3", *words]).for_learner("a")
    assert own.scaler.build().init_scale == 8.0
    assert own.schedule.arguments["warmup"] == 5
    assert own.clip_norm is None


def test_a_target_of_its_own_takes_none_of_the_shared_arguments():
    config = compose(["optimizer=adam", "+learners.a.optimizer={_target_: mptrain.optimizer.SGD, lr: 0.1}"])
    assert config.for_learner("a").optimizer.path == "mptrain.optimizer.SGD"
    assert config.for_learner("a").optimizer.arguments == {"lr": 0.1}


def test_the_saved_text_keeps_what_differs():
    config = compose(["learners.critic.optimizer.lr=0.5"])
    again = reload(config.yaml)
    assert again.for_learner("critic") == config.for_learner("critic")
    changed = reload(config.yaml, ["learners.critic.optimizer.lr=0.25"]).for_learner("critic")
    assert changed.optimizer.arguments["lr"] == 0.25


def test_choosing_another_option_of_a_group_drops_what_a_learner_had_changed_in_the_old_one():
    config = compose(["learners.critic.scaler.init_scale=8", "learners.critic.optimizer.lr=0.5"])
    again = reload(config.yaml, ["scaler=static"])
    assert again.for_learner("critic").scaler == again.scaler
    assert again.for_learner("critic").optimizer.arguments["lr"] == 0.5
    assert reload(config.yaml, ["precision=fp32"]).for_learner("critic").scaler.path.endswith("NoScaler")


@each(
    ("words", "message", "hint"),
    [
        (["learners.a.optimizer.lr=-1"], "learners.a.optimizer.lr=-1", ""),
        (["learners.a.optimizer.lrr=1"], "unknown key 'learners.a.optimizer.lrr'", "did you mean learners.a.optimizer.lr=1?"),
        (["learners.a.optimzer.lr=1"], "unknown key 'learners.a.optimzer.lr'", "did you mean learners.a.optimizer.lr=1?"),
        (["learners.a.clip_norm=0"], "learners.a.clip_norm=0", ""),
        (["learners.a.epochs=3"], "unknown key 'learners.a.epochs'", ""),
        (["learners=3"], "learners=3: must be a mapping", "learners.discriminator.optimizer.lr=4e-4"),
        (["learners.a.scaler=static"], "learners.a.scaler=static: must be a mapping", "learners.discriminator"),
        (["precision=fp16_pure", "optimizer=sgd", "precision.optimizer_state=parameters", "optimizer=adam",
          "optimizer.eps=0.001", "learners.a.optimizer.eps=1e-9"], "optimizer.eps=1e-09", ""),
    ],
)  # fmt: skip
def test_a_wrong_word_about_a_learner_is_named(words, message, hint):
    found = problems(*words)
    assert any(message in text for text in found), found
    assert any(hint in text for text in found.values()), found


def test_a_learner_that_the_task_has_not_is_refused_before_anything_is_built():
    from mptrain.run.build.parts import build

    with pytest.raises(ConfigError, match=r"learners.critic: the task has no such learner") as caught:
        build(compose(["model=mlp", "learners.critic.optimizer.lr=0.5"]))
    assert caught.value.problems[0].hint == "its learners are main"
