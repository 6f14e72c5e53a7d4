from __future__ import annotations

import re
import typing

import pytest

from mptrain.config.catalogue import configs_folder
from mptrain.numerics.quantization import RULES
from mptrain.precision.policy import Emulated, Policy
from mptrain.system.errors import ConfigError
from tests.loops import each
from tests.precision.modes import NAMES, mode
from tests.small_runs import TINY, run_in_process


def test_every_row_of_the_table_of_modes_is_shipped():
    table = {
        # name: parameters, compute, autocast, master weights
        "fp32": ("float32", "float32", False, False),
        "tf32": ("float32", "float32", False, False),
        "amp_static": ("float32", "float16", True, False),
        "amp_dynamic": ("float32", "float16", True, False),
        "amp_bf16": ("float32", "bfloat16", True, False),
        "fp16_static": ("float16", "float16", False, True),
        "fp16_dynamic": ("float16", "float16", False, True),
        "fp16_noscale": ("float16", "float16", False, True),
        "fp16_pure": ("float16", "float16", False, False),
        "bf16": ("bfloat16", "bfloat16", False, True),
        "bf16_pure": ("bfloat16", "bfloat16", False, False),
        "bf16_stochastic": ("bfloat16", "bfloat16", False, False),
        "bf16_kahan": ("bfloat16", "bfloat16", False, False),
        "fp8_current_emulated": ("float32", "float32", False, False),
        "mxfp8_emulated": ("float32", "float32", False, False),
        "nvfp4_emulated": ("float32", "float32", False, False),
    }
    rules = {"fp8_current_emulated": "fp8_tensor", "mxfp8_emulated": "mxfp8", "nvfp4_emulated": "nvfp4"}
    missing, gone = sorted(set(NAMES) - set(table)), sorted(set(table) - set(NAMES))
    assert not missing, f"add a row to the table in this test of tests/precision/test_policy.py for {missing}"
    assert not gone, f"configs/precision has no {gone}: take the row out of the table in this test"
    for name, facts in table.items():
        policy = mode(name)
        assert policy.name == name
        assert (policy.parameters, policy.compute, policy.autocast, policy.master_weights) == facts
        assert policy.tf32 == (name == "tf32")
        assert policy.emulate == rules.get(name)


def test_every_rule_can_be_emulated_by_its_name():
    assert list(typing.get_args(Emulated)) == list(RULES)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"parameters": "float16", "compute": "float16", "rounding": "stochastic"},
            "rounding=stochastic with precision.parameters=float16",
        ),
        (
            {"parameters": "bfloat16", "compute": "bfloat16", "rounding": "compensated", "master_weights": True},
            "rounding=compensated with master weights",
        ),
        (
            {
                "parameters": "bfloat16",
                "compute": "bfloat16",
                "rounding": "stochastic",
                "optimizer_state": "parameters",
            },
            "an optimizer whose state is BF16 rounds its updates itself",
        ),
        (
            {"parameters": "float16", "compute": "float16", "autocast": True},
            "autocast=true with precision.parameters=float16",
        ),
        ({"compute": "float16"}, "compute=float16 with precision.parameters=float32 and no autocast"),
        ({"parameters": "float16"}, "compute=float32 with precision.parameters=float16 and no autocast"),
        ({"master_weights": True}, "master_weights=true with FP32 parameters"),
        (
            {"parameters": "float16", "compute": "float16", "master_weights": True, "optimizer_state": "parameters"},
            "optimizer_state=parameters with master weights",
        ),
        (
            {"emulate": "mxfp8", "parameters": "float16", "compute": "float16"},
            "emulate=mxfp8 with precision.compute=float16",
        ),
        ({"emulate": "nvfp4", "compute": "bfloat16", "autocast": True}, "emulate=nvfp4 with precision.autocast=true"),
        ({"emulate": "fp8_row", "tf32": True}, "emulate=fp8_row with precision.tf32=true"),
    ],
)
def test_an_inconsistent_row_is_refused_with_what_to_change(facts, words):
    base = {"name": "x", "parameters": "float32", "compute": "float32", "autocast": False, "master_weights": False}
    with pytest.raises(ConfigError) as refusal:
        Policy(**{**base, **facts})
    (problem,) = refusal.value.problems
    assert words in problem.what
    assert re.search(r"precision(\.\w+)?=\w", problem.hint)  # words to type: a key, or another mode


WORDS = {
    "fp32": "parameters float32, compute float32 (TF32 off), gradients float32, master weights the parameters "
    "themselves, reductions float32, loss float32",
    "tf32": "parameters float32, compute float32 with TF32 products, gradients float32, master weights the parameters "
    "themselves, reductions float32, loss float32",
    "amp": "parameters float32, compute autocast float16, gradients float32, master weights the parameters themselves, "
    "reductions float32, loss float32",
    "amp_bf16": "parameters float32, compute autocast bfloat16, gradients float32, master weights the parameters "
    "themselves, reductions float32, loss float32",
    "fp16": "parameters float16, compute float16, gradients float16, master weights float32, reductions float32, "
    "loss float32, kept in float32: norms, LocalResponseNorm",
    "fp16_pure": "parameters float16, compute float16, gradients float16, master weights none, reductions float16, "
    "loss float32",
    "bf16": "parameters bfloat16, compute bfloat16, gradients bfloat16, master weights float32, reductions float32, "
    "loss float32, kept in float32: norms, LocalResponseNorm",
    "bf16_pure": "parameters bfloat16, compute bfloat16, gradients bfloat16, master weights none, reductions bfloat16, "
    "loss float32",
    "bf16_stochastic": "parameters bfloat16, compute bfloat16, gradients bfloat16, master weights none (stochastic "
    "rounding), reductions bfloat16, loss float32",
    "bf16_kahan": "parameters bfloat16, compute bfloat16, gradients bfloat16, master weights none (Kahan compensation, "
    "int16), reductions bfloat16, loss float32",
    **{
        name: f"parameters float32, compute float32 from operands in {rule} (emulated, slower than FP32), gradients "
        "float32, master weights the parameters themselves, reductions float32, loss float32"
        for name, rule in (
            ("fp8_current_emulated", "fp8_tensor"),
            ("mxfp8_emulated", "mxfp8"),
            ("nvfp4_emulated", "nvfp4"),
        )
    },
}


def test_all_inconsistencies_are_reported_together():
    with pytest.raises(ConfigError) as refusal:
        Policy("x", "float32", "float16", autocast=False, master_weights=True, optimizer_state="parameters")
    assert len(refusal.value.problems) == 3


@each("name", NAMES)
def test_each_mode_in_words(name):
    key = name if name in WORDS else name.split("_")[0]  # modes that differ in their scale alone share a row
    said = mode(name).describe()
    assert said == WORDS.get(key), f"add a row for {name!r} to WORDS in tests/precision/test_policy.py: {said!r}"
    assert mode("amp_dynamic", keep_fp32=[]).reductions == "float32"
    assert mode("fp16_dynamic", keep_fp32=[]).reductions == "float16"


def test_a_mode_of_ones_own_needs_its_file_and_nothing_else(tmp_path):
    shipped = (configs_folder() / "precision" / "amp_static.yaml").read_text()
    (tmp_path / "precision").mkdir()
    own = shipped.replace("name: amp_static", "name: mine").replace("compute: float16", "compute: bfloat16")
    (tmp_path / "precision" / "mine.yaml").write_text(own)
    words = ("--config-dir", str(tmp_path), *TINY, "precision=mine", "train.max_steps=2", "run.name=r")
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine: parameters float32, compute autocast bfloat16" in " ".join(done.stdout.split())
