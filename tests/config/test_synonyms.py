"""Names of 0.1 are answered with the present ones."""

import pytest
from loops import each

from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.config.synonyms import RENAMED_KEYS, RENAMED_VALUES, new_target
from mptrain.config.targets import PACKAGES, resolve

OLD_TARGETS = {
    "model": ("mptrain.model.cnn", "mptrain.model.convnet.cnn", "mptrain.model.dcgan"),
    "dataset": ("mptrain.dataset.load_digits", "mptrain.dataset.made_up_sounds.make_sounds"),
    "task": ("mptrain.task.Classify", "mptrain.task.raw_audio.RawAudio"),
    "diagnostics": ("mptrain.diagnostics.probe.NoProbe", "mptrain.diagnostics.histograms.Histograms"),
}


@each("old", sorted(RENAMED_KEYS))
def test_an_old_key_is_answered_with_the_new_one(capsys, old):
    assert main(["precision=amp_dynamic", f"{old}=growth" if old.endswith("refill") else f"{old}=1"]) == 2
    said = capsys.readouterr().err
    assert f"error: unknown key '{old}': renamed to {RENAMED_KEYS[old]} in 0.2" in said
    assert f"hint: write {RENAMED_KEYS[old]}=" in said


@each("old", sorted(RENAMED_KEYS))
def test_the_new_key_is_one(old):
    value = {"scaler.hysteresis_reset": "clean", "checkpoint.async_save": "true"}.get(RENAMED_KEYS[old], "1")
    assert compose(["precision=amp_dynamic", f"{RENAMED_KEYS[old]}={value}"])


def test_an_old_key_of_one_learner_is_answered_too(capsys):
    assert main(["model=dcgan", "scaler=dynamic", "learners.generator.scaler.refill=clean"]) == 2
    assert "write learners.generator.scaler.hysteresis_reset=clean" in capsys.readouterr().err


@each("key", sorted(RENAMED_VALUES))
def test_an_old_value_is_answered_with_the_new_one(capsys, key):
    ((old, new),) = RENAMED_VALUES[key].items()
    assert main([f"{key}={old}"]) == 2
    assert f"{key}={new}" in capsys.readouterr().err


@pytest.mark.parametrize("group", OLD_TARGETS)
def test_an_old_target_is_answered_with_the_new_one_which_is_there(capsys, group):
    for old in OLD_TARGETS[group]:
        assert main([f"{group}._target_={old}"]) == 2
        said = capsys.readouterr().err
        assert f"_target_ '{old}': moved to {new_target(old)} in 0.2" in said, old
        assert resolve(new_target(old), PACKAGES[group])
