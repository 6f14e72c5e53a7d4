from mptrain.config.compose import compose
from mptrain.config.config_diff import config_differences, config_digest, describe_change, diff


def test_where_and_how_often_to_write_is_no_difference():
    old = compose([]).yaml
    new = compose(["run.name=x", "log.ring=7", "checkpoint.keep=5", "run.root=elsewhere"]).yaml
    assert diff(old, new) == []
    assert config_digest(old) == config_digest(new)


def test_a_difference_names_its_key_with_both_values():
    old, new = compose([]).yaml, compose(["optimizer.lr=0.2", "train.epochs=3"]).yaml
    assert diff(old, new) == [("optimizer.lr", 0.05, 0.2), ("train.epochs", 10, 3)]
    assert config_digest(old) != config_digest(new)
    changes = {key: values for key, *values in diff(compose([]).yaml, compose(["scaler=static"]).yaml)}
    assert changes["scaler.scale"] == ["(absent)", 1024.0]
    assert changes["scaler.init_scale"] == [65536.0, "(absent)"]


def test_layout_and_number_form_change_no_digest():
    assert config_digest("a: 1\nb: {c: 2.0}\n") == config_digest("b:\n  c: 2\na: 1.0\n")
    assert config_digest("a: true\n") != config_digest("a: 1\n")


def test_a_change_is_said_as_yaml_writes_values():
    assert describe_change("train.clip_norm", None, 1.0) == "train.clip_norm was null, now 1"
    assert describe_change("train.channels_last", True, False) == "train.channels_last was true, now false"


def test_a_section_that_was_null_is_shown_by_its_keys():
    null, chosen = "train: {stop: null, epochs: 3}", "train: {stop: {patience: 2, mode: null}, epochs: 3}"
    assert diff(null, chosen) == [("train.stop.patience", None, 2)]
    assert diff(chosen, null) == [("train.stop.patience", 2, None)]
    assert diff("a: 1", "b: 2") == [("a", 1, "(absent)"), ("b", "(absent)", 2)]


def test_a_key_that_is_new_and_changes_nothing_is_no_difference():
    old = "precision: {name: bf16_pure}\ndataset: {name: docs}\n"
    new = "precision: {name: bf16_pure, rounding: nearest}\ndataset: {name: docs, half: null}\n"
    assert diff(old, new) == diff(new, old) == []
    assert config_differences(old, new) == config_differences(new, old) == {}
    other = new.replace("nearest", "stochastic").replace("null", "first")
    assert [key for key, *_ in diff(old, other)] == ["precision.rounding", "dataset.half"]
