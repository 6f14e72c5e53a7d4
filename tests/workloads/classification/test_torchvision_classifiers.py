"""Every family of torchvision's classifiers takes three steps; the documentation names the one that a mode cannot train."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptrain.workloads.classification.models.published import classifier_names

pytestmark = pytest.mark.workload

#: The smallest classifier of each family, with the side of the images. BatchNorm over two values, which two images leave in the last
#: layers of some networks at smaller sides, gives gradients of 1e8.
FAMILIES = """
alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet mnasnet0_5 mobilenet_v2 mobilenet_v3_small
regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 swin_t
swin_v2_t vgg11 vgg11_bn vit_b_16 vit_b_32 wide_resnet50_2
"""
SMALLEST = {**dict.fromkeys(FAMILIES.split(), 64), "inception_v3": 160, "maxvit_t": 224}
#: Networks that are trained in every run of the tests, since they take a second.
QUICK = ("resnet18", "squeezenet1_1")
#: Networks that a mode cannot train as they are, and the words that docs/workloads/classification.md gives for them.
NEEDS = {("swin_v2_t", "fp16_dynamic"): ("precision.keep_fp32=[norms,ShiftedWindowAttentionV2]",)}


def words_of(image_size):
    data = ("dataset=synthetic", f"dataset.image_size={image_size}", "dataset.samples=8", "dataset.val_samples=2")
    return (*data, "dataset.test_samples=2", "train.batch_size=2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SMALLEST])
def test_a_classifier_of_each_family_takes_three_steps(takes_three_steps, name, usual_mode):
    more = NEEDS.get((name, usual_mode), ())
    takes_three_steps(usual_mode, "model=torchvision", f"model.name={name}", *words_of(SMALLEST[name]), *more)


def test_an_index_buffer_between_counting_norms_is_no_trouble(takes_three_steps, usual_mode):
    own = (
        "extensions.allow=[tests.indexed_attention]",
        "model._target_=tests.indexed_attention.IndexedAttention",
        "~model.widths",
    )
    takes_three_steps(usual_mode, *words_of(8), *own)


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
