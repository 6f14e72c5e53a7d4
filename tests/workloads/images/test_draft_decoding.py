"""JPEGs that are decoded at a part of their size, where the crop still has as many pixels as the network sees."""

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin

from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.images.datasets.image_folder import decode, load_image_folder


@pytest.fixture
def drafts(monkeypatch):
    """The sizes that decoders were asked for."""
    asked, draft = [], JpegImagePlugin.JpegImageFile.draft

    def noted(self, mode, size):
        found = draft(self, mode, size)
        asked.append(self.size)
        return found

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", noted)
    return asked


def picture(width, height, seed=0):
    """Smooth colours, as photographs have."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(path, width, height, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(width, height, seed).save(path)
    return str(path)


def both(path, size, draws=None, channels=3):
    return (decode(path, size, channels, draws, Faults("stop"), way).float() for way in ("full", "draft"))


@pytest.mark.parametrize(
    ("width", "height", "size", "decoded"),
    [(1024, 768, 64, (128, 96)), (1023, 767, 64, (128, 96)), (1024, 768, 112, (256, 192)), (300, 300, 64, (75, 75))],
)
def test_a_large_jpeg_is_decoded_no_larger_than_the_crop_needs(tmp_path, drafts, width, height, size, decoded):
    full, draft = both(saved(tmp_path / "a.jpg", width, height), size)
    assert drafts == [decoded]
    assert 0.875 * min(decoded) >= size  # the crop at the centre
    difference = (full - draft).abs()
    assert 0 < difference.max() <= 8
    assert difference.mean() < 1


@pytest.mark.parametrize("channels", [1, 3])
def test_random_crops_show_the_same_part(tmp_path, drafts, channels):
    path = saved(tmp_path / "a.jpg", 1021, 763)
    for seed in range(20):
        draws = torch.rand(41, generator=torch.Generator().manual_seed(seed)).tolist()
        full, draft = both(path, 64, draws, channels)
        assert (full - draft).abs().mean() < 1.5
    assert len(set(drafts)) > 1  # a small part of the picture needs more of its pixels


def test_small_jpegs_and_other_formats_are_decoded_as_they_are(tmp_path, drafts):
    for name, side in (("small.jpg", 140), ("large.png", 1024), ("large.bmp", 512)):
        full, draft = both(saved(tmp_path / name, side, side), 64)
        assert torch.equal(full, draft), name
    assert not drafts


def test_a_data_set_decodes_in_full_unless_asked(tmp_path, drafts):
    for number in range(4):
        saved(tmp_path / "train" / "ab"[number % 2] / f"{number}.jpg", 512, 400, number)

    def images(**choices):
        data = load_image_folder(root=tmp_path, image_size=32, val_samples=0, workers=0, **choices)
        return data.train.fetch(range(4), 0, 3).inputs

    assert torch.equal(images(), images(decode="full"))
    assert not drafts
    assert not torch.equal(images(), images(decode="draft"))
    assert drafts
