"""Policies do to an image what torchvision's own transforms do, decided by numbers that they are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchvision.transforms import v2

from mptrain.config.compose import compose
from mptrain.system.errors import ConfigError
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.images.augmentation import (
    ERASING_DRAWS,
    LEVELS,
    OPERATIONS,
    POLICIES,
    Variation,
    erased_box,
    variation,
)


def image_of(channels=3, side=12):
    return torch.randint(0, 256, (channels, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))


def every_outcome(policy, image):
    """All images that one operation can make, int ``[K, C, H, W]``."""
    levels = range(LEVELS) if policy.level is None else [policy.level]
    return torch.stack(
        [
            policy.operate(image, name, level / (LEVELS - 1), sign)
            for name in OPERATIONS
            for level in levels
            for sign in (-1.0, 1.0)
        ]
    ).int()


@pytest.mark.parametrize(
    ("name", "theirs"), [("trivial_augment", v2.TrivialAugmentWide()), ("randaugment", v2.RandAugment(num_ops=1))]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_what_torchvisions_transform_makes_the_policy_can_make(name, theirs, channels):
    image = image_of(channels)
    # A pixel at a threshold of solarising falls to either side: theirs are float32 multiples of 8.5, ours float64.
    image = torch.where(image % 17 == 0, image + 1, image)
    ours = every_outcome(POLICIES[name], image)
    made = {}
    for seed in range(150):
        torch.manual_seed(seed)
        found = theirs(image)
        made[found.numpy().tobytes()] = (ours - found.int()).abs().flatten(1).max(1).values.min().item()
    assert len(made) > 10
    assert max(made.values()) <= 1  # a factor in float32 may round a pixel the other way
    assert sum(off == 0 for off in made.values()) > 0.9 * len(made)


def test_every_operation_and_level_is_drawn_alike():
    policy, seen = POLICIES["trivial_augment"], []

    class Watching(type(policy)):
        def operate(self, image, name, strength, sign):
            seen.append((name, round(strength * 30), sign))
            return image

    watching = Watching(**{key: getattr(policy, key) for key in policy.__dataclass_fields__})
    for numbers in uniforms(0, 0, range(5000), policy.draws).tolist():
        watching.apply(image_of(), numbers)
    for place, kinds in enumerate((14, 31, 2)):
        counts = [[row[place] for row in seen].count(kind) for kind in {row[place] for row in seen}]
        assert len(counts) == kinds
        assert min(counts) > 0.6 * 5000 / kinds
        assert max(counts) < 1.4 * 5000 / kinds


def test_randaugment_does_two_operations_one_after_the_other():
    policy, image = POLICIES["randaugment"], image_of()
    which = {name: (place + 0.5) / len(OPERATIONS) for place, name in enumerate(OPERATIONS)}
    found = policy.apply(image, [which["rotate"], 0.9, 0.2, which["solarize"], 0.1, 0.9])
    expected = v2.functional.solarize(v2.functional.rotate(image, angle=-9.0), threshold=255 * 0.7)
    assert torch.equal(found, expected)
    assert policy.draws == 6


def test_a_policy_leaves_the_random_numbers_of_the_process_alone():
    before = torch.get_rng_state()
    for name, policy in POLICIES.items():
        for numbers in uniforms(1, 2, range(60), policy.draws).tolist():
            found = policy.apply(image_of(), numbers)
            assert (found.dtype, found.shape) == (torch.uint8, (3, 12, 12)), name
    assert torch.equal(torch.get_rng_state(), before)


def test_an_erased_rectangle_has_the_colour_and_nothing_else():
    image, erased = image_of(side=40), 0
    for numbers in uniforms(0, 0, range(300), ERASING_DRAWS).tolist():
        found = Variation(None, 0.5, (1, 2, 3)).apply(image, numbers)
        box = erased_box(40, 40, numbers[1:])
        if numbers[0] >= 0.5 or box is None:
            assert found is image
            continue
        erased += 1
        left, upper, right, lower = box
        assert found[:, upper:lower, left:right].flatten(1).unique(dim=1).flatten().tolist() == [1, 2, 3]
        outside = torch.ones(40, 40, dtype=torch.bool)
        outside[upper:lower, left:right] = False
        assert torch.equal(found[:, outside], image[:, outside])
        share = (right - left) * (lower - upper) / 1600
        assert 0.01 < share < 0.36
    assert 110 < erased < 190


def test_policy_and_erasing_take_numbers_of_their_own():
    policy = POLICIES["randaugment"]
    both = Variation(policy, 1.0, (0, 0, 0))
    assert both.draws == policy.draws + ERASING_DRAWS
    numbers = uniforms(0, 0, [7], both.draws)[0].tolist()
    expected = Variation(None, 1.0, (0, 0, 0)).apply(policy.apply(image_of(), numbers[:6]), numbers[6:])
    assert torch.equal(both.apply(image_of(), numbers), expected)
    assert replace(both, policy=None, erasing=0.0).draws == 0


def test_the_key_takes_truth_values_and_names():
    for word, policy in (("true", None), ("trivial_augment", POLICIES["trivial_augment"])):
        given = compose(("dataset=image_folder", f"dataset.augment={word}")).dataset.arguments["augment"]
        assert variation(given, 0.1, (0,)) == Variation(policy, 0.1, (0,))
    assert variation(False, 0.0, (0,)) is None
    for words in ("dataset.augment=autoaugment", "dataset.random_erasing=2"):
        with pytest.raises(ConfigError, match=words):
            compose(("dataset=image_folder", words))
