"""Detectors: parameter counts of the literature, losses and detections of torchvision, and FP32 where boxes are."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder, SSDMatcher
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_iou

from mptrain.precision.apply import cast_model
from mptrain.precision.policy import Policy
from mptrain.precision.upcast import Upcast
from mptrain.system.errors import ConfigError
from mptrain.workloads.detection.models.detectors import fasterrcnn_resnet50, ssd300_vgg16, ssd_small
from mptrain.workloads.detection.models.single_shot import decode, detections, encode, hardest, match, multibox_losses

HALF = Policy("half", "float16", "float16", autocast=False, master_weights=True, keep_fp32=("norms",))


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def scenes(samples=3, places=4, side=64, classes=10, seed=0):
    """Random boxes and labels; the last image has none, the others one place empty."""
    source = torch.Generator().manual_seed(seed)
    low = torch.rand(samples, places, 2, generator=source) * side * 0.6
    boxes = torch.cat([low, low + 4 + torch.rand(samples, places, 2, generator=source) * side * 0.35], dim=2)
    labels = torch.randint(classes, (samples, places), generator=source)
    labels[:, -1] = -1
    labels[-1] = -1
    return boxes.masked_fill((labels < 0).unsqueeze(2), 0.0), labels


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    return ssd_small(num_classes=10, in_channels=1, image_size=64, width=4)


def outputs(small, samples=3, seed=1):
    source = torch.Generator().manual_seed(seed)
    count = len(small.anchors)
    return (
        torch.randn(samples, count, 11, generator=source) * 2,
        torch.randn(samples, count, 4, generator=source),
    )


@pytest.fixture(scope="module")
def regions():
    torch.manual_seed(0)
    return fasterrcnn_resnet50(num_classes=90, in_channels=3)


def test_published_detectors_have_torchvisions_weights(regions):
    """torchvision's documentation counts 35,641,826 of SSD300 and 41,755,286 of Faster R-CNN, whose norms are frozen.

    ResNet-50's BatchNorms have 26,560 channels with a gain and a bias each. 8,732 boxes: Liu et al. 2016, section 3.
    """
    from torchvision.models.detection import fasterrcnn_resnet50_fpn
    from torchvision.models.detection import ssd300_vgg16 as published

    with torch.device("meta"):
        theirs = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91).state_dict()
        their_ssd = published(weights=None, weights_backbone=None, num_classes=91)
        ssd = ssd300_vgg16(num_classes=90, in_channels=3, image_size=300)
        frozen = fasterrcnn_resnet50(num_classes=90, in_channels=3, frozen_norms=True, trained_stages=3)
    assert [name for name in regions.state_dict() if regions.state_dict()[name].shape != theirs[name].shape] == []
    assert regions.state_dict().keys() == theirs.keys()
    assert ssd.state_dict().keys() == their_ssd.state_dict().keys()
    assert set(frozen.state_dict()) == {name for name in theirs if not name.endswith("batches_tracked")}
    assert (parameters(ssd), ssd.anchors.shape) == (35_641_826, (8732, 4))
    assert parameters(regions) == parameters(frozen) + 2 * 26_560 == 41_755_286 + 2 * 26_560
    still = {name.split(".")[2] for name, parameter in frozen.named_parameters() if not parameter.requires_grad}
    assert still == {"conv1", "layer1"}


def test_offsets_are_torchvisions_and_lead_back(small):
    boxes, labels = scenes()
    anchors = small.anchors[:4]
    coder = BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
    true = boxes[0][labels[0] >= 0][:3]
    offsets = encode(true, anchors[:3])
    torch.testing.assert_close(offsets, coder.encode_single(true, anchors[:3]))
    torch.testing.assert_close(decode(offsets, anchors[:3]), true)
    wild = torch.randn(4, 4) * 30
    torch.testing.assert_close(decode(wild, anchors), coder.decode_single(wild, anchors))
    between = torch.tensor([[512.5, 512.5, 528.5, 528.5]])  # FP16 would say 513 or 512
    torch.testing.assert_close(decode(torch.zeros(1, 1, 4), between)[0], between, rtol=0, atol=0)


def test_default_boxes_are_matched_as_torchvision_does(small):
    boxes, labels = scenes(samples=8, places=6)
    found = match(boxes, labels >= 0, small.anchors)
    for image in range(7):
        present = labels[image] >= 0
        expected = SSDMatcher(0.5)(box_iou(boxes[image][present], small.anchors))
        assert torch.equal(found[image], torch.where(expected >= 0, expected, -1))
    assert (found[7] == -1).all()
    odd = torch.tensor([[[0.0, 0.0, 64.0, 3.0], [61.0, 61.0, 62.0, 62.0]]])
    assert set(match(odd, torch.ones(1, 2, dtype=torch.bool), small.anchors).unique().tolist()) == {-1, 0, 1}


def test_the_loss_is_torchvisions(small):
    boxes, labels = scenes()
    logits, offsets = outputs(small)
    losses = multibox_losses(logits, offsets, small.anchors, boxes, labels)
    theirs = SimpleNamespace(box_coder=BoxCoder(weights=(10.0, 10.0, 5.0, 5.0)), neg_to_pos_ratio=3.0)
    expected = SSD.compute_loss(
        theirs,
        [{"boxes": b[c >= 0], "labels": c[c >= 0] + 1} for b, c in zip(boxes, labels, strict=True)],
        {"bbox_regression": offsets, "cls_logits": logits},
        [small.anchors] * 3,
        list(match(boxes, labels >= 0, small.anchors)),
    )
    torch.testing.assert_close(losses["class_loss"].mean(), expected["classification"])
    torch.testing.assert_close(losses["box_loss"].mean(), expected["bbox_regression"])


def test_no_object_is_mined_as_background():
    surprise, objects = torch.tensor([[9.0, 1.0, 2.0, 3.0]]), torch.tensor([[True, True, False, False]])
    assert hardest(surprise, objects).tolist() == [[False, False, True, True]]


def test_detections_are_torchvisions(small):
    logits, offsets = outputs(small)
    theirs = SimpleNamespace(
        box_coder=BoxCoder(weights=(10.0, 10.0, 5.0, 5.0)),
        score_thresh=0.01,
        topk_candidates=400,
        nms_thresh=0.45,
        detections_per_img=200,
    )
    expected = SSD.postprocess_detections(
        theirs, {"bbox_regression": offsets, "cls_logits": logits}, [small.anchors] * 3, [(64, 64)] * 3
    )
    for ours, other in zip(detections(logits, offsets, small.anchors, 64), expected, strict=True):
        assert torch.equal(ours["labels"] + 1, other["labels"])
        torch.testing.assert_close(ours["scores"], other["scores"])
        torch.testing.assert_close(ours["boxes"], other["boxes"])
    assert not any(len(one["scores"]) for one in detections(logits * math.nan, offsets, small.anchors, 64))
    logits[..., 0] = 100.0  # background
    assert [one["boxes"].shape for one in detections(logits, offsets, small.anchors, 64)] == [(0, 4)] * 3


def test_first_losses_of_faster_rcnn_are_those_of_equal_classes(regions):
    boxes, labels = scenes(samples=2, side=128, classes=90)
    losses = regions(torch.randn(2, 3, 128, 128), boxes, labels)
    assert losses["loss_objectness"].tolist() == pytest.approx([math.log(2)] * 2, rel=0.05)
    assert losses["loss_classifier"].tolist() == pytest.approx([math.log(91)] * 2, rel=0.08)


@pytest.mark.long
def test_faster_rcnn_learns_background_from_an_empty_image(regions):
    regions.zero_grad()
    losses = regions(torch.randn(2, 3, 64, 64), torch.zeros(2, 1, 4), torch.full((2, 1), -1))
    assert losses["loss_box_reg"].tolist() == losses["loss_rpn_box_reg"].tolist() == [0.0, 0.0]
    assert (losses["loss_classifier"] > 1).all()
    sum(values.mean() for values in losses.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in regions.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("model", ["small", "regions"])
def test_the_truth_decides_what_is_said_and_the_mode_does_not(model, request):
    model = request.getfixturevalue(model)
    channels = 3 if hasattr(model, "rpn") else 1
    images, (boxes, labels) = torch.randn(2, channels, 64, 64), scenes(samples=2)
    try:
        for training in (True, False):
            model.train(training)
            with torch.no_grad():
                assert all(values.shape == (2,) for values in model(images, boxes, labels).values())
                assert all({*one} == {"boxes", "labels", "scores"} for one in model(images))
            assert all(module.training is training for module in model.modules())
    finally:
        model.train()


def test_default_boxes_stay_exact_when_the_model_is_half():
    model = ssd_small(num_classes=2, in_channels=1, image_size=1040, width=1)
    exact = model.anchors.clone()
    cast_model(model, HALF)
    assert next(model.parameters()).dtype == torch.float16
    assert model.anchors.dtype == torch.float32
    assert torch.equal(model.anchors, exact)
    assert not torch.equal(exact.half().float(), exact)
    assert "anchor_bits" not in model.state_dict()


def test_losses_and_detections_of_half_networks_are_float32():
    """At first each object's box brings three of background along, and all cost ln(classes and background)."""
    torch.manual_seed(0)
    model = ssd_small(num_classes=10, in_channels=1, image_size=64)
    images, (boxes, labels) = torch.randn(8, 1, 64, 64), scenes(samples=8)
    assert model(images, boxes, labels)["class_loss"].mean().item() == pytest.approx(4 * math.log(11), rel=0.02)
    empty = sum(values.mean() for values in model(images, boxes, torch.full_like(labels, -1)).values())
    empty.backward()
    assert empty.item() == 0.0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    cast_model(model, HALF)
    model.zero_grad()
    with Upcast():
        losses = model(images.half(), boxes, labels)
        sum(values.mean() for values in losses.values()).backward()
        found = model(images.half())
    assert {values.dtype for values in losses.values()} == {torch.float32}
    assert {one[name].dtype for one in found for name in ("boxes", "scores")} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_frozen_norm_is_torchvisions_and_never_moves():
    from torchvision.ops import FrozenBatchNorm2d as Published

    from mptrain.workloads.detection.models.faster_rcnn import FrozenBatchNorm2d

    given = {name: torch.rand(3) for name in ("weight", "bias", "running_mean", "running_var")}
    ours, theirs = FrozenBatchNorm2d(3), Published(3)
    ours.load_state_dict(given)
    theirs.load_state_dict(given)
    images = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(ours.train()(images), theirs(images))
    assert all(torch.equal(value, given[name]) for name, value in ours.state_dict().items())
    assert not list(ours.parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_faster_rcnn_in_half_has_float32_boxes_and_norms(frozen, monkeypatch):
    torch.manual_seed(0)
    model = fasterrcnn_resnet50(num_classes=3, in_channels=3, frozen_norms=frozen)
    kept = cast_model(model, HALF)
    norm = model.backbone.body.bn1
    assert "backbone.body.bn1" in kept
    assert norm.running_var.dtype == norm.weight.dtype == torch.float32
    pool, seen = type(model.roi_heads.box_roi_pool), []
    original = pool.forward

    def watched(self, maps, boxes, sizes):
        said = original(self, maps, boxes, sizes)
        seen.append((boxes[0].dtype, next(iter(maps.values())).dtype, said.dtype))
        return said

    monkeypatch.setattr(pool, "forward", watched)
    boxes, labels = scenes(samples=1, places=3, side=64, classes=3)
    labels[0, 0], boxes[0, 0] = 1, torch.tensor([5.0, 5.0, 40.0, 40.0])
    with Upcast():
        losses = model(torch.randn(1, 3, 64, 64).half() * 0.1, boxes, labels)
        if not frozen:
            sum(values.mean() for values in losses.values()).backward()
            assert model.roi_heads.box_head.fc6.weight.grad.dtype == torch.float16
    assert {values.dtype for values in losses.values()} == {torch.float32}
    assert seen == [(torch.float32, torch.float16, torch.float16)]


def test_a_place_without_activation_stays_zero_in_half():
    """torchvision's normalisation divides by at least 1e-12, which is 0 in FP16: 0/0."""
    from torchvision.models import vgg16

    from mptrain.workloads.detection.models.single_shot import WideNormVGG

    with torch.device("meta"):
        trunk = WideNormVGG(vgg16(weights=None).features, highres=False)
    trunk.scale_weight = torch.nn.Parameter(torch.full((512,), 20.0))
    trunk.features, trunk.extra = torch.nn.Identity(), torch.nn.ModuleList()
    trunk.half()
    features = torch.zeros(1, 512, 2, 2, dtype=torch.float16)
    features[0, :, 0, 0] = 300.0  # squares overflow
    scaled = trunk(features)["0"]
    assert scaled.dtype == torch.float16
    assert scaled[0, 0, 0, 0].item() == pytest.approx(20 / math.sqrt(512), rel=1e-3)
    assert scaled[0, :, 1].abs().max().item() == 0.0


@pytest.mark.parametrize(
    ("build", "facts", "said"),
    [
        (ssd300_vgg16, {"in_channels": 3, "image_size": 64}, "300"),
        (ssd300_vgg16, {"in_channels": 1, "image_size": 300}, "3 channels"),
        (fasterrcnn_resnet50, {"in_channels": 1}, "3 channels"),
        (ssd_small, {"in_channels": 1, "image_size": 16}, "image_size=16"),
    ],
)
def test_images_of_another_shape_are_refused_in_one_line(build, facts, said):
    with pytest.raises(ConfigError, match=said):
        build(num_classes=2, **facts)
