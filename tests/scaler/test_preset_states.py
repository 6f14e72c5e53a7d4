"""The states of presets through checkpoints and under the tracer, and presets as something to choose."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import compose
from mptrain.engine.observer import OverflowHistory
from mptrain.numerics.overflow_check import judge
from mptrain.system.errors import ConfigError
from tests.loops import each
from tests.scaler.walking import ALL, ALL_STARTS, CPU, VERDICTS, preset, steps, walk, with_window

COURSE = steps("..x...xx.x....xxx...x..........xx..")


def saved_and_loaded(state):
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_published_rule_has_its_first_scale_in_walking():
    files = {path.stem for path in (configs_folder() / "scaler").glob("*.yaml")} - {"none", "static", "dynamic"}
    missing, gone = sorted(files - set(ALL)), sorted(set(ALL) - files)
    rows = "STARTS (and scales worked out by hand to tests/scaler/test_presets.py) or OTHER_STARTS"
    assert not missing, f"add the first scale of {missing} to {rows} in tests/scaler/walking.py"
    assert not gone, f"configs/scaler has no {gone}: take its row out of tests/scaler/walking.py"


@each("name", ALL)
def test_trap_37_a_saved_state_goes_on_bit_for_bit(name):
    constants = {"tolerance": 0.3} if name == "fairseq" else {}
    scaler = with_window(name, 4, **constants)
    states = [scaler.initial(CPU)]
    for overflow in COURSE:
        states.append(scaler.after(states[-1], VERDICTS[overflow]))
    for cut in range(0, len(COURSE), 3):
        state, notes = scaler.resume(saved_and_loaded(states[cut]), CPU)
        assert notes == []
        for overflow, expected in zip(COURSE[cut:], states[cut + 1 :], strict=True):
            state = scaler.after(state, VERDICTS[overflow])
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], expected[key]) for key in state)


@each("name", ALL)
def test_the_rule_leaves_the_state_it_was_given(name):
    scaler = with_window(name, 2)
    state = scaler.initial(CPU)
    assert state["scale"].dtype == torch.float32
    for overflow in COURSE:
        before = {key: value.clone() for key, value in state.items()}
        after = scaler.after(state, VERDICTS[overflow])
        assert all(torch.equal(state[key], before[key]) for key in before)
        assert {key: (value.dtype, value.shape) for key, value in after.items()} == {
            key: (value.dtype, torch.Size([1])) for key, value in before.items()
        }
        state = after


@each("name", ALL)
def test_the_rule_asks_the_host_for_nothing(name):
    with FakeTensorMode(allow_non_fake_inputs=True):  # has no values, and objects to whoever asks for one
        scaler = with_window(name, 2)
        state = scaler.initial(CPU)
        norms = torch.ones(3, dtype=torch.float64)
        for _ in range(3):
            state = scaler.after(state, judge(norms, state["scale"], skip_on_overflow=True, measured=norms[:1]))
        assert all(isinstance(value, torch._subclasses.FakeTensor) for value in state.values())


@each(("one", "other"), list(itertools.permutations(["torch", "megatron", "deepspeed", "paddle"], 2)))
def test_trap_38_another_preset_of_the_dynamic_rule_takes_a_state_over(one, other):
    before, after = preset(one, growth_interval=9), preset(other, growth_interval=9)
    state = before.initial(CPU)
    for overflow in steps("..xx"):
        state = before.after(state, VERDICTS[overflow])
    resumed, notes = after.resume(saved_and_loaded(state), CPU)
    changed = [key for key in state if not torch.equal(resumed[key], state[key])]
    assert len(notes) == len(changed)
    assert all(f"the scaler's {key} continues at" in note for key, note in zip(changed, notes, strict=True))
    assert "scale" not in changed


@each(
    ("one", "other"),
    [
        ("torch", "fairseq"),
        ("fairseq", "torch"),
        ("mxnet", "torch"),
        ("als", "smooth"),
        ("smooth", "logmax"),
        ("torch", "als"),
        ("als", "torch"),
    ],
)
def test_trap_39_another_rules_state_is_not_taken_for_its_own(one, other):
    resumed, (note,) = preset(other).resume(preset(one).initial(CPU), CPU)
    assert resumed["scale"].item() == ALL_STARTS[other]
    assert f"starts again at {ALL_STARTS[other]:g}" in note


@each(
    ("name", "constants", "saved", "expected"),
    [
        (
            "mxnet",
            {"max_scale": 2.0**20},
            {"scale": 2.0**23, "decided": 2.0**24},
            {"scale": 2.0**20, "decided": 2.0**20},
        ),
        ("fairseq", {"growth_interval": 5}, {"growth_tracker": 100}, {"growth_tracker": 4}),
        ("deepspeed", {"growth_delay": 0}, {"growth_tracker": -1}, {"growth_tracker": 0}),
        ("paddle", {}, {"hysteresis_tracker": 0}, {"hysteresis_tracker": 1}),
        ("smooth", {}, {"scale": 2.0**17, "exact": 2.0**17}, {"scale": 65504.0, "exact": 65504.0}),
        ("als", {"max_scale": 8.0}, {"scale": 16.0, "waited": 3}, {"scale": 8.0, "waited": 0}),
        ("logmax", {"max_scale": 8.0}, {"scale": 16.0}, {"scale": 8.0}),
        ("dynamic", {}, {"scale": 2.0**30}, {"scale": 2.0**24}),
        ("dynamic", {}, {"scale": 0.25}, {"scale": 1.0}),
        ("dynamic", {"hysteresis": 2}, {"hysteresis_tracker": 4}, {"hysteresis_tracker": 2}),
    ],
)
def test_trap_38_saved_values_are_brought_within_the_constants(name, constants, saved, expected):
    scaler = preset(name, **constants)
    state = dict(scaler.initial(CPU))
    state |= {key: torch.tensor([value], dtype=state[key].dtype) for key, value in saved.items()}
    resumed, notes = scaler.resume(state, CPU)
    assert {key: resumed[key].item() for key in expected} == expected
    assert len(notes) == len(saved)


@pytest.mark.parametrize(
    "mode", ["amp_dynamic", "amp_static", "fp16_dynamic", "fp16_static", "fp16_noscale", "fp16_pure"]
)
def test_a_preset_can_be_chosen_with_every_fp16_mode(mode):
    config = compose([f"precision={mode}", "scaler=megatron"])
    assert config.scaler.build() == preset("megatron")
    assert config.chosen["scaler"] == "megatron"


def test_what_a_framework_chose_is_not_warned_about_and_what_a_user_writes_is():
    assert {compose([f"scaler={name}"]).warnings for name in ALL} == {()}
    (sentence,) = compose(["scaler=torch", "scaler.backoff_factor=0.8"]).warnings
    assert "backoff_factor=0.8 is not a power of two" in sentence
    assert "nearest: 0.5" in sentence
    (sentence,) = compose(["scaler=torch", "scaler.init_scale=1000"]).warnings
    assert "nearest: 1024" in sentence


def test_each_preset_names_its_source_and_comments_every_key():
    options = Catalogue([configs_folder()]).groups["scaler"]
    for name in ALL:
        option = options[name]
        assert 30 <= len(option.summary) <= 105
        assert any(line.startswith("# Source: ") for line in option.lines)
        assert all(entry.comment for entry in option.entries if not entry.key.endswith("_target_"))


@each(
    ("name", "part"),
    [
        ("torch", "from 2^16, x2 every 2000 clean steps, x0.5 on overflow, without floor or ceiling"),
        ("apex", "without floor, at most 2^24"),
        ("deepspeed", "every 1000 clean steps (the first after 1 more)"),
        ("megatron", "x0.5 on overflow after 2 overflows, at least 1"),
        ("fairseq", "/2 where 0.05 of the steps overflow"),
        ("mxnet", "each change one step late"),
        ("als", "every step x0.5 where more than 1e-07 of the gradients are above 8188, else x2"),
        ("logmax", "2^(16 - mean - 3.09 deviations"),
        ("smooth", "from 1, x2 every step until the first overflow"),
        ("paddle", "x0.8 on overflow after every 2 overflows in a row"),
    ],
)
def test_the_rule_in_words_says_what_is_particular(name, part):
    assert part in preset(name, **({"tolerance": 0.05} if name == "fairseq" else {})).describe()


@each("name", ALL)
def test_an_overflow_is_unexpected_from_the_floor_down_and_calibrating_above(name):
    """The floor that the history is told is the one at which the rule stops falling."""
    scaler = preset(name)
    scales = [ALL_STARTS[name], *walk(scaler, [True] * 200)]
    history = OverflowHistory(floor=scaler.floor)
    phases = [
        history.observe(overflow=True, loss=1.0, scale=scale, next_scale=following)
        for scale, following in itertools.pairwise(scales)
    ]
    lowest = scales.index(scales[-1])
    assert phases[:lowest] == ["calibrating"] * lowest
    assert set(phases[lowest:]) == {"unexpected"}


@each(
    ("words", "problem"),
    [
        (["scaler=torch", "scaler.init_scale=1.0e+39"], "outside the smallest normal FP32 number to the largest FP32"),
        (["scaler=mxnet", "scaler.init_scale=33554432"], "outside the smallest normal FP32 number to scaler.max_scale"),
        (["scaler=megatron", "scaler.init_scale=0.5"], "outside scaler.min_scale=1 to the largest FP32 number"),
        (["scaler=fairseq", "scaler.init_scale=0.0001"], "is not above scaler.min_loss_scale=0.0001"),
        (["scaler=fairseq", "scaler.tolerance=1.5"], "scaler.tolerance=1.5"),
        (["scaler=logmax", "scaler.init_scale=32768"], "outside scaler.min_scale=1 to scaler.max_scale=16384"),
        (["scaler=smooth", "scaler.min_scale=2"], "scaler.init_scale=1 is outside scaler.min_scale=2"),
        (["scaler=als", "scaler.max_scale=0.5"], "scaler.init_scale=1 is outside"),
        (["scaler=logmax", "scaler.beta1=1"], "scaler.beta1=1: must be"),
        (["scaler=als", "scaler.bin_edge=2"], "scaler.bin_edge=2: must be"),
        (["scaler=torch", "scaler.min_scale=0"], "scaler.min_scale=0: must be a number above 0, or null"),
        (
            ["scaler=paddle", "scaler.hysteresis_reset=always"],
            "scaler.hysteresis_reset=always: must be growth, clean or backoff",
        ),
    ],
)
def test_trap_40_constants_of_presets_are_validated(words, problem):
    with pytest.raises(ConfigError) as refusal:
        compose(words)
    assert problem in str(refusal.value)
