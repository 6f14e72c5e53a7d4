"""Losses and layers that multiply matrices train in every mode, whatever dtype they compute in."""

from __future__ import annotations

import math

import pytest

from mptrain.system.errors import EnvironmentRefused
from tests.loops import each
from tests.multiplying_tasks import LOSSES, MIDDLES
from tests.precision.modes import mode
from tests.small_runs import loop_of, steps_of

#: Modes that differ in the dtypes of weights and products.
NAMES = ("fp32", "amp_dynamic", "amp_bf16", "fp16_dynamic", "fp16_pure", "bf16", "bf16_pure")
OWN = (
    "extensions.allow=[tests.multiplying_tasks]",
    "model._target_=tests.multiplying_tasks.network",
    "~model.widths",
    "dataset.image_size=8",
    "dataset.train_samples=32",
    "train.batch_size=16",
    "train.max_steps=2",
    "checkpoint.every_epochs=null",
    "precision.force=true",
)
TASK = "task._target_=tests.multiplying_tasks.Multiplies"


def trained(root, *words):
    loop = loop_of(root, *OWN, *words)
    del loop.parts.loaders["val"], loop.parts.loaders["test"]
    loop.run()
    return [step["loss"] for step in steps_of(loop)]


@pytest.mark.long
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_multiplies_in_fp32_trains_in_every_mode(kind, tmp_path):
    for name in NAMES:
        for wide in ("true", "false")[: 1 + mode(name).autocast]:
            words = (f"precision={name}", TASK, f"+task.kind={kind}", f"+task.wide={wide}")
            losses = trained(tmp_path / f"{name}_{wide}", *words)
            assert len(losses) == 2, name
            assert all(map(math.isfinite, losses)), (name, losses)


@pytest.mark.parametrize("middle", [name for name in MIDDLES if name != "whiten"])
def test_a_layer_without_parameters_that_multiplies_trains_in_every_mode(middle, tmp_path):
    for name in NAMES:
        losses = trained(tmp_path / name, f"precision={name}", f"+model.middle={middle}")
        assert all(map(math.isfinite, losses)), (name, losses)


@each("name", [name for name in NAMES if not mode(name).autocast and mode(name).half])
def test_a_kept_layer_without_parameters_multiplies_in_fp32(name, tmp_path):
    words = (f"precision={name}", "+model.middle=whiten")
    with pytest.raises(EnvironmentRefused, match="torch cannot compute a part of the model") as refused:
        trained(tmp_path / f"{name}_half", *words)
    assert refused.value.hint.startswith("add 3 to precision.keep_fp32")
    kept = f"precision.keep_fp32=[{','.join((*mode(name).keep_fp32, 'Whiten'))}]"
    assert all(map(math.isfinite, trained(tmp_path / name, *words, kept)))
