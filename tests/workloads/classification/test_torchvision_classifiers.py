"""Every family of torchvision's classifiers takes three steps; the documentation names the one that a mode cannot train."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small_runs import Kept

from mptrain.build.parts import build
from mptrain.config.compose import compose
from mptrain.engine.loop import Loop
from mptrain.engine.run_storage import NoStorage
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.records import StepRecord
from mptrain.workloads.classification.models.published import classifier_names

pytestmark = pytest.mark.workload

#: The smallest classifier of each family, with the side of the images. BatchNorm over two values, which two images leave in the last
#: layers of some networks at smaller sides, gives gradients of 1e8.
SMALLEST = {
    "alexnet": 64,
    "convnext_tiny": 64,
    "densenet121": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "googlenet": 64,
    "inception_v3": 160,
    "maxvit_t": 224,
    "mnasnet0_5": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "resnet18": 64,
    "resnet50": 64,
    "resnext50_32x4d": 64,
    "shufflenet_v2_x0_5": 64,
    "squeezenet1_0": 64,
    "squeezenet1_1": 64,
    "swin_t": 64,
    "swin_v2_t": 64,
    "vgg11": 64,
    "vgg11_bn": 64,
    "vit_b_16": 64,
    "vit_b_32": 64,
    "wide_resnet50_2": 64,
}
#: Networks that are trained in every run of the tests, since they take a second.
QUICK = ("resnet18", "squeezenet1_1")
MODES = ("fp32", "amp_bf16", "fp16_dynamic")
#: Networks that a mode cannot train as they are, and the words that docs/workloads/classification.md gives for them.
NEEDS = {("swin_v2_t", "fp16_dynamic"): ("precision.keep_fp32=[norms,ShiftedWindowAttentionV2]",)}


def steps_of_a_run(root, words):
    parts, options = build(compose(words))
    kept = Kept()
    loop = Loop(parts, options, NoStorage(RunPaths(root)), [kept])
    loop.run()
    return kept.of(StepRecord)


def words_of(precision, image_size):
    """Three steps on two images each; half precision is computed the same on every CPU, and the scale has nothing to come down from."""
    half = ("precision.cpu_kernels=upcast", "scaler.init_scale=1") if precision.startswith("fp16") else ()
    data = ("dataset=synthetic", f"dataset.image_size={image_size}", "dataset.samples=8", "dataset.val_samples=2")
    return ("model=torchvision", *data, "dataset.test_samples=2", "train.batch_size=2", "train.max_steps=3", "device=cpu",
            f"precision={precision}", *half)  # fmt: skip


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SMALLEST])
def test_the_smallest_classifier_of_each_family_takes_three_steps(tmp_path, name, precision):
    more = NEEDS.get((name, precision), ())
    steps = steps_of_a_run(tmp_path, (*words_of(precision, SMALLEST[name]), f"model.name={name}", *more))
    assert [step.updates for step in steps] == [1, 2, 3]
    assert all(math.isfinite(step.loss) for step in steps)


@pytest.mark.parametrize("precision", MODES)
def test_a_network_that_saves_an_index_buffer_between_counting_norms_takes_three_steps(tmp_path, precision):
    own = ("extensions.allow=[indexed_attention]", "model._target_=indexed_attention.IndexedAttention", "~model.widths")
    words = [word for word in words_of(precision, 8) if word != "model=torchvision"]
    steps = steps_of_a_run(tmp_path, (*words, *own))
    assert [step.updates for step in steps] == [1, 2, 3]


def test_the_documentation_names_the_networks_that_need_words():
    page = (Path(__file__).parents[3] / "docs/workloads/classification.md").read_text()
    for (name, precision), words in NEEDS.items():
        assert name in page
        assert precision in page
        assert all(word in page for word in words)


def test_every_family_of_classifiers_is_among_those():
    from torchvision import models

    def blocks(name):
        return models.get_model_builder(name).__module__

    assert {blocks(name) for name in SMALLEST} == {blocks(name) for name in classifier_names()}
