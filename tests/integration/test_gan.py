"""Two learners through one step: what an overflow of either leaves alone, in which dtypes they compute, and resuming."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from PIL import Image

from mptrain.engine.evaluate import evaluate
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.system.errors import ConfigError
from mptrain.system.records import StepRecord
from tests.small_runs import Kept, loop_of, parts_of, steps_of

pytestmark = pytest.mark.workload

NARROW = (
    "model=dcgan", "model.width=4", "model.latent=8", "dataset.image_size=16", "dataset.train_samples=96",
    "train.batch_size=32", "train.epochs=3", "checkpoint.every_epochs=null",
)  # fmt: skip
LEARNERS = ("discriminator", "generator")


def moderate(precision):
    """The words of a mode with a dynamic scale that no gradient overflows by itself."""
    return (f"precision={precision}", *(["scaler.init_scale=1024"] if "dynamic" in precision else []))


class Bench:
    """The parts of a run, and single steps of its learners."""

    def __init__(self, *overrides) -> None:
        self.parts, _ = parts_of(*NARROW, *overrides)
        self.learners = {learner.name: learner for learner in self.parts.learners}
        self.rings = {name: Ring(64, len(one.weights.names), self.parts.device) for name, one in self.learners.items()}
        loader = self.parts.loaders["train"]
        self.batch = self.parts.prepare(next(loader.batches(0)))
        self.poison = dict.fromkeys(LEARNERS, 0.0)
        for name in LEARNERS:
            first = next(getattr(self.parts.model, name).parameters())
            first.register_hook(lambda grad, name=name: grad + self.poison[name])
        self.parts.model.train()

    def step(self, name, batch=None):
        self.rings[name].record(train_step(self.learners[name], self.parts.model, batch or self.batch, self.parts.plan))
        (row,) = self.rings[name].take(wait=True)
        return row

    def state(self):
        """Weights, buffers, masters, optimizer states and counts, by name; not the scales."""
        found = {f"model.{name}": value for name, value in self.parts.model.state_dict().items()}
        found |= {f"best.{name}": value for name, value in self.parts.full_precision().items()}
        for name, learner in self.learners.items():
            saved = learner.weights.updater.state_dict()
            found |= {f"{name}.updates": learner.updates, f"{name}.step": saved["step"]}
            for parameter, state in saved["state"].items():
                found |= {f"{name}.{parameter}.{key}": value for key, value in state.items()}
        return {name: value.clone() for name, value in found.items()}

    def scales(self):
        return [self.learners[name].scale.item() for name in LEARNERS]


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("name", "way", "precision"),
    [
        *(("generator", way, mode) for way in ("inf", "nan") for mode in ("fp32", "fp16_dynamic")),
        ("generator", "inf", "amp_dynamic"),
        *(("discriminator", way, mode) for way in ("inf", "input") for mode in ("fp32", "fp16_dynamic")),
        ("discriminator", "input", "fp16_pure"),
    ],
)
def test_a_refused_step_changes_neither_network_and_the_other_goes_on(name, way, precision):
    bench, other = Bench(*moderate(precision)), LEARNERS[1 - LEARNERS.index(name)]
    for one in (*LEARNERS, "discriminator"):
        assert not bench.step(one).overflow
    before, scales, batch = bench.state(), dict(zip(LEARNERS, bench.scales(), strict=True)), bench.batch
    if way == "input":  # makes NaN of the statistics of every normalisation behind it
        batch = dataclasses.replace(batch, inputs=batch.inputs.clone())
        batch.inputs[0] = math.inf
    else:
        bench.poison[name] = float(way)
    assert bench.step(name, batch).overflow
    assert changed(before, bench.state()) == set()
    expected = {**scales, name: scales[name] / 2 if "dynamic" in precision else scales[name]}
    assert bench.scales() == list(expected.values())
    assert not bench.step(other, bench.batch if name == "generator" else batch).overflow  # noise alone makes fakes
    bench.poison[name] = 0.0
    before = bench.state()
    assert not bench.step(name).overflow
    moved = changed(before, bench.state())  # what a step that is not refused moves
    assert f"{name}.updates" in moved
    assert "model.generator.2.running_mean" in moved
    assert ("model.discriminator.0.weight" in moved) == (name == "discriminator")
    assert ("model.generator.1.weight" in moved) == (name == "generator")


@pytest.mark.parametrize("name", LEARNERS)
def test_a_scale_that_is_too_high_for_one_learner_stops_only_that_one(name):
    bench = Bench("precision=fp16_dynamic", f"learners.{name}.scaler.init_scale=16777216")
    other = LEARNERS[1 - LEARNERS.index(name)]
    before = bench.state()
    row = bench.step(name)
    assert row.overflow
    assert row.loss_scale == 2.0**24
    assert changed(before, bench.state()) == set()
    assert bench.learners[other].scale.item() == 2.0**16
    while bench.step(other).overflow:
        assert bench.learners[other].scale > 1
    assert bench.learners[name].updates.item() == 0
    assert bench.learners[other].updates.item() >= 1
    assert bench.learners[name].scale.item() == 2.0**23


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_step_moves_the_weights_of_its_own_network_and_no_others_have_a_gradient(precision, accumulate):
    bench = Bench(f"precision={precision}", f"train.accumulate={accumulate}", "scaler=static", "scaler.scale=8")
    for name, other in (LEARNERS, LEARNERS[::-1]):
        before = bench.state()
        for parameter in bench.parts.model.parameters():
            parameter.grad = None
        assert not bench.step(name).overflow
        moved = changed(before, bench.state())
        weights = {f"model.{key}" for key, _ in bench.parts.model.named_parameters()}
        assert {key for key in weights if key.startswith(f"model.{name}.")} <= moved
        assert not {key for key in moved & weights if key.startswith(f"model.{other}.")}
        assert not {key for key in moved if key.startswith((f"best.{other}.", f"{other}."))}
        assert all(p.grad is None for p in getattr(bench.parts.model, other).parameters())


def test_in_fp16_three_epochs_have_a_line_for_each_step_and_learner_and_a_scale_for_each(tmp_path):
    loop = loop_of(
        tmp_path, *NARROW, "precision=fp16_dynamic", "learners.generator.scaler.init_scale=1024",
        "learners.discriminator.optimizer.lr=4e-4",
    )  # fmt: skip
    before = {name: value.clone() for name, value in loop.parts.full_precision().items()}
    loop.run()
    steps = steps_of(loop)
    assert [(step["step"], step["learner"]) for step in steps] == [(n, name) for n in range(1, 10) for name in LEARNERS]
    assert [step["loss_scale"] for step in steps[:2]] == [65536.0, 1024.0]
    assert [step["lr"] for step in steps[:2]] == pytest.approx([4e-4, 2e-4])
    assert all(math.isfinite(step["loss"]) for step in steps)
    for name in LEARNERS:
        own = [step for step in steps if step["learner"] == name]
        assert own[-1]["updates"] == sum(not step["skipped"] for step in own) >= 3
    after = loop.parts.full_precision()
    assert all(value.isfinite().all() and not torch.equal(value, before[name]) for name, value in after.items())
    pictures = loop.storage.paths.root / "samples"
    assert {path.name for path in pictures.glob("samples-*.png")} == {f"samples-{n:06d}.png" for n in (3, 6, 9)}
    grids = [Image.open(pictures / f"samples-{n:06d}.png").convert("L") for n in (3, 9)]
    assert grids[0].size[0] >= 8 * 16
    assert grids[0].tobytes() != grids[1].tobytes()
    validated = loop.progress.last["val"]
    assert set(validated) == {"discriminator_loss", "generator_loss", "real_accuracy", "fake_accuracy"}
    before = {name: value.clone() for name, value in loop.parts.model.state_dict().items()}
    again = evaluate(loop.parts, loop.parts.loaders["val"], "val", 9, 3, stop=lambda: False)  # without pictures
    assert again.record.metrics == validated
    assert changed(before, loop.parts.model.state_dict()) == set()


def test_pictures_without_classes_are_drawn_from_and_teach_no_classifier(tmp_path):
    (folder := tmp_path / "faces").mkdir()
    for shade in range(8):
        Image.new("RGB", (20, 16), (25 * shade, 90, 9)).save(folder / f"{shade}.png")
    words = (
        "model=dcgan", "model.width=2", "model.latent=4", "dataset=image_folder", f"dataset.root={folder}",
        "dataset.image_size=8", "dataset.workers=0", "dataset.val_samples=3", "train.batch_size=4",
    )  # fmt: skip
    kept = Kept()
    loop_of(tmp_path / "runs", *words, "train.epochs=1", "precision=fp32", kept=kept).run()
    assert {record.learner for record in kept.of(StepRecord)} == {*LEARNERS}
    assert all(math.isfinite(record.loss) for record in kept.of(StepRecord))
    with pytest.raises(ConfigError, match=r"task\.classifier=train needs num_classes"):
        parts_of(*words, "task.classifier=train")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model=dcgan", "dataset.image_size=28"), "dataset.image_size=28"),
        (("model=cnn", "task=gan"), "learner discriminator trains discriminator"),
        (("model=dcgan", "task.label_smoothing=1.5"), "task.label_smoothing=1.5"),
        (("model=dcgan", "model.width=0"), "model.width=0"),
        (("model=dcgan", "learners.critic.optimizer.lr=1e-4"), "learners.critic"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_together_is_refused_before_anything_trains(words, says):
    with pytest.raises(ConfigError, match=says):
        parts_of(*words)
