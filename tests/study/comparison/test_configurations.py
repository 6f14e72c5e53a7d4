"""Configurations as flat mappings."""

from __future__ import annotations

import pytest

from mptrain.config.config_diff import ABSENT, chosen_options, config_differences, flat_settings, is_below

LEFT = "seed: 0\noptimizer: {lr: 0.1, betas: [0.9, 0.99]}\nlearners: {}\nchosen: {model: mlp}\n"
RIGHT = "seed: 1\noptimizer: {lr: 0.2, betas: [0.9, 0.99]}\nscaler: {scale: 8.0}\nchosen: {model: cnn}\n"


def test_a_configuration_is_read_as_dotted_keys_and_an_empty_section_says_nothing():
    expected = {"seed": 0, "optimizer.lr": 0.1, "optimizer.betas": [0.9, 0.99], "chosen.model": "mlp"}
    assert {key: value for key, value in flat_settings(LEFT).items() if key} == expected
    with pytest.raises(TypeError):
        flat_settings(LEFT)["seed"] = 3


def test_differences_name_both_values_and_leave_the_seed_out():
    found = config_differences(LEFT, RIGHT, ("seed", "chosen"))
    assert found == {"optimizer.lr": (0.1, 0.2), "scaler.scale": (ABSENT, 8.0)}
    assert "seed" not in config_differences(LEFT, RIGHT)
    assert config_differences(LEFT, LEFT) == {}


def test_a_key_is_below_a_name_only_where_the_name_ends():
    assert is_below("optimizer.lr", ("optimizer",))
    assert is_below("optimizer", ("optimizer",))
    assert not is_below("optimizers.lr", ("optimizer",))


def test_what_was_chosen_is_on_record():
    assert chosen_options(RIGHT) == {"model": "cnn"}
