from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.random_streams import keys, normals
from mptrain.workloads.enhancement.datasets.photos import load_photo_folder, load_photos
from mptrain.workloads.enhancement.photo_dataset import Degradation, PatchSplit, Photos, TileSplit

CPU, PLAIN = torch.device("cpu"), torch.contiguous_format
SMALL = {"patch_size": 16, "tile_size": 16, "workers": 0, "patches": 12}


def save(path, width=40, height=30, mode="RGB", seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = torch.randint(256, (height, width, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(numbers.numpy(), "RGBA").convert(mode).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Ten photos of different sizes, whose names tell them apart."""
    for number in range(10):
        save(tmp_path / f"photo{number}.png", 40 + number, 30 + number, seed=number)
    return tmp_path


def photos_of(*paths, channels=3, smallest=16, cache_mb=64, on_error="stop"):
    return Photos([str(path) for path in paths], channels, smallest, "tile_size", cache_mb, Faults(on_error))


def names(split):
    return {path.rsplit("/", 1)[-1] for path in split.photos.paths}


class TestNormals:
    def test_they_have_the_moments_of_the_normal_distribution(self):
        drawn = normals(keys(1, 2, range(20)), 50_000).double()
        assert drawn.mean().abs() < 5e-3
        assert drawn.std() == pytest.approx(1, abs=5e-3)
        assert (drawn**4).mean() == pytest.approx(3, abs=0.05)
        assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.03
        neighbours = torch.corrcoef(torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()]))[0, 1]
        assert neighbours.abs() < 5e-3
        assert drawn.isfinite().all()

    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_they_follow_from_seed_epoch_and_index_alone(self, count):
        some = normals(keys(3, 4, [5, 9]), count)
        assert some.shape == (2, count)
        assert torch.equal(some[1:], normals(keys(3, 4, [9]), count))
        for other in (keys(2, 4, [9]), keys(3, 5, [9]), keys(3, 4, [8])):
            assert not torch.equal(some[1:], normals(other, count))


class TestDegradation:
    @pytest.mark.parametrize("factor", [2, 3, 4])
    def test_downsampling_is_pillows_bicubic_up_to_rounding(self, tmp_path, factor):
        path = tmp_path / "a.png"
        with Image.open(load_photos().train.photos.paths[0]) as photo:
            photo.crop((300, 200, 348, 248)).save(path)
        with Image.open(path) as file:
            small = file.resize((48 // factor,) * 2, Image.Resampling.BICUBIC)
            expected = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(48 // factor, -1, 3)
        picture = photos_of(path).pixels(0)[None].float() / 255
        made = Degradation("downsample", factor, 0).apply(picture, keys(0, 0, [0]))
        difference = (made[0].permute(1, 2, 0) * 255) - expected.float()
        assert difference.abs().max() <= 1.01
        assert (difference.abs() < 0.01).float().mean() > 0.7  # Pillow rounds after each axis
        assert torch.equal(made * 255, (made * 255).round())

    def test_noise_has_its_deviation_and_belongs_to_the_sample(self):
        white = torch.ones(2, 3, 64, 64)
        noisy = Degradation("noise", 2, 25).apply(white, keys(0, 0, [3, 4]))
        assert ((noisy - white).std() * 255).item() == pytest.approx(25, rel=0.02)
        assert noisy.max() > 1.2
        assert torch.equal(noisy[1:], Degradation("noise", 2, 25).apply(white[:1], keys(0, 0, [4])))
        for unchanged in (Degradation("downsample", 1, 0), Degradation("noise", 2, 0)):
            assert torch.equal(unchanged.apply(white, keys(0, 0, [3, 4])), white)


class TestPhotos:
    def test_files_that_cannot_be_used_stop_or_are_left_out(self, tmp_path):
        good = save(tmp_path / "good.png")
        (tmp_path / "empty.png").write_bytes(b"")
        (tmp_path / "text.png").write_text("this is no picture")
        Image.new("F", (40, 40)).save(tmp_path / "deep.tif")
        save(tmp_path / "pixel.png", 1, 1)
        save(tmp_path / "narrow.png", 15, 40)
        bad = [tmp_path / name for name in ("empty.png", "text.png", "deep.tif", "pixel.png", "narrow.png")]
        for path in bad:
            with pytest.raises(DataError, match=path.name):
                photos_of(path)
        photos = photos_of(good, *bad, on_error="skip")
        assert photos.paths == [str(good)]
        assert set(photos.faults.unusable) == set(map(str, bad))
        assert "15x40 pixels, but each crop of a photo has 16x16" in photos.faults.unusable[str(bad[-1])]

    def test_a_file_that_is_cut_short_is_found_when_it_is_decoded(self, tmp_path):
        good, cut = save(tmp_path / "good.png"), save(tmp_path / "cut.png")
        cut.write_bytes(cut.read_bytes()[:-1500])
        split = PatchSplit(photos_of(good, cut, on_error="skip"), 8, 16, augment=True)
        assert split.skipped == 0
        assert split.fetch(range(8), 0, 0).samples == 4
        assert split.skipped == 1
        with pytest.raises(DataError, match="no photo of the batch"):
            split.fetch([1, 3], 0, 0)
        photos = photos_of(good)
        save(good, 60, 60)
        with pytest.raises(OSError, match="size has changed"):
            photos.pixels(0)
        save(good)
        with pytest.raises(DataError, match=r"cut\.png"):
            PatchSplit(photos_of(good, cut), 8, 16, augment=True).fetch(range(8), 0, 0)

    def test_what_is_kept_never_takes_more_room_than_there_is(self, tmp_path):
        paths = [save(tmp_path / f"{number}.png", 100, 100) for number in range(4)]
        photos = photos_of(*paths, cache_mb=0.065)  # two of 30,000 bytes
        assert not photos.fit
        assert photos_of(*paths).fit
        for number in (0, 1, 0, 2, 3, 0):
            photos.pixels(number)
            assert len(photos._kept) <= 2
        assert list(photos._kept) == [3, 0]


class TestPatches:
    def test_a_patch_is_a_part_of_its_photo_turned_over(self, folder):
        split = PatchSplit(photos_of(*sorted(folder.iterdir())[:3]), 30, 16, augment=True)
        batch = split.fetch(range(30), 2, 7)
        assert (batch.inputs.shape, batch.inputs.dtype) == ((30, 3, 16, 16), torch.uint8)
        assert batch.targets is batch.inputs
        turned = 0
        for index, patch in enumerate(batch.inputs):
            windows = split.photos.pixels(index % 3).unfold(1, 16, 1).unfold(2, 16, 1)
            ways = [
                way
                for base in (patch, patch.transpose(1, 2))
                for way in (base, base.flip(1), base.flip(2), base.flip(1, 2))
            ]
            found = [(windows == way[:, None, None]).all(-1).all(-1).all(0).any().item() for way in ways]
            assert sum(found) == 1
            turned += not found[0]
        assert 18 <= turned <= 30  # seven of eight ways


class TestTiles:
    def test_they_lie_side_by_side_around_the_centre(self, tmp_path):
        path = save(tmp_path / "a.png", 53, 37)
        split = TileSplit(photos_of(path), 16, None)
        assert len(split) == 3 * 2
        whole = split.fetch(range(6), 0, 0).inputs.view(2, 3, 3, 16, 16).permute(2, 0, 3, 1, 4).reshape(3, 32, 48)
        assert torch.equal(whole, split.photos.pixels(0)[:, 2:34, 2:50])

    def test_so_many_of_each_photo_are_spread_evenly(self, tmp_path):
        paths = [save(tmp_path / "a.png", 160, 32), save(tmp_path / "b.png", 16, 16)]
        split = TileSplit(photos_of(*paths), 16, 4)
        assert [cut[1:3] for cut in split._cuts if cut[0] == 0] == [(0, 32), (0, 112), (16, 32), (16, 112)]
        assert len(split) == 5


class TestFolders:
    def test_photos_are_divided_as_wholes_and_always_alike(self, folder):
        data = load_photo_folder(root=folder, val_photos=3, **SMALL)
        parts = [names(split) for split in (data.train, data.val, data.test)]
        assert [len(part) for part in parts] == [6, 3, 1]
        assert len(set.union(*parts)) == 10
        again = load_photo_folder(root=folder, val_photos=3, **SMALL)
        assert [names(split) for split in (again.train, again.val, again.test)] == parts
        card = data.card()
        assert sorted(path for part in card["files"].values() for path in part) == sorted(map(str, folder.iterdir()))
        assert card["degradation"].items() >= {"kind": "downsample", "factor": 2, "mode": "bicubic"}.items()

    def test_folders_of_parts_are_taken_and_others_held_out(self, tmp_path):
        for number in range(4):
            save(tmp_path / "train" / "inside" / f"{number}.jpg", seed=number)
        save(tmp_path / "val" / "own.jpg")
        (tmp_path / "train" / ".hidden").mkdir()
        save(tmp_path / "train" / ".hidden" / "x.png")
        data = load_photo_folder(root=tmp_path, test_photos=1, **SMALL)
        assert (len(names(data.train)), names(data.val), len(names(data.test))) == (3, {"own.jpg"}, 1)
        assert not names(data.train) & names(data.test)
        assert load_photo_folder(root=tmp_path, test_photos=0, **SMALL).test is None
        save(tmp_path / "test" / "test.jpg")
        whole = load_photo_folder(root=tmp_path, **SMALL)
        assert (len(names(whole.train)), names(whole.test)) == (4, {"test.jpg"})

    @pytest.mark.parametrize("key", ["tile_size", "patch_size"])
    def test_photos_too_small_for_a_key_name_it(self, folder, key):
        with pytest.raises(DataError, match=r"has 4\dx3\d pixels, but each crop of a photo has 64x64") as caught:
            load_photo_folder(root=folder, **{**SMALL, key: 64})
        assert caught.value.hint.startswith(f"choose a smaller dataset.{key}")
        with pytest.raises(DataError, match="no photo of"):
            load_photo_folder(root=folder, on_error="skip", **{**SMALL, key: 64})

    def test_folders_without_enough_photos_are_refused(self, tmp_path):
        with pytest.raises(DataError, match="nothing, does not exist"):
            load_photo_folder(root=tmp_path / "nothing", **SMALL)
        with pytest.raises(DataError, match="no images found below") as caught:
            load_photo_folder(root=tmp_path, **SMALL)
        assert ".png" in caught.value.hint
        for part in ("test", "val"):
            save(tmp_path / f"{part}.png")
            with pytest.raises(ConfigError, match=f"1 for {part} leaves none of 1 photos in .* to train on") as refused:
                load_photo_folder(root=tmp_path, **SMALL)
            assert f"dataset.{part}_photos (0 for no such part)" in refused.value.problems[0].hint

    @pytest.mark.parametrize(
        ("key", "given", "instead"),
        [("patch_size", 15, 14), ("patch_size", 1, 2), ("tile_size", 31, 30), ("tile_size", 14, 16)],
    )
    def test_sizes_that_do_not_fit_are_refused_with_ones_that_do(self, folder, key, given, instead):
        with pytest.raises(ConfigError, match=f"{key}={given}") as caught:
            load_photo_folder(root=folder, **{**SMALL, key: given})
        assert f"{key}={instead}" in caught.value.problems[0].hint


class TestDataset:
    @pytest.mark.parametrize(("kind", "upscale"), [("downsample", 2), ("noise", 1)])
    def test_a_prepared_batch_has_bad_inputs_and_good_targets(self, folder, kind, upscale):
        data = load_photo_folder(root=folder, degradation=kind, **SMALL)
        assert data.facts() == {"in_channels": 3, "upscale": upscale}
        stored = data.train.fetch([1, 2], 0, 0)
        batch = data.prepare(stored, CPU, torch.channels_last)
        assert torch.equal(batch.targets, stored.inputs.float() / 255)
        assert torch.equal(batch.inputs, data.degrade.apply(batch.targets, stored.extras["words"]))
        assert batch.inputs.shape == (2, 3, 16 // upscale, 16 // upscale)
        assert batch.inputs.dtype == batch.targets.dtype == torch.float32
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
        assert dict(batch.extras) == {}
        split = torch.cat([data.prepare(part, CPU, PLAIN).inputs for part in stored.split(2)])
        assert torch.equal(split, batch.inputs)
        half = batch.cast(torch.float16)
        assert (half.inputs.dtype, half.targets.dtype) == (torch.float16, torch.float32)


class TestInstalledPhotos:
    def test_the_photos_of_every_installation_train_and_validate(self):
        data = load_photos(patches=20, skimage=False)
        assert names(data.train) == {"china.jpg", "flower.jpg"}
        assert names(data.val) == {"grace_hopper.jpg"}
        assert (data.test, data.train.in_memory, len(data.train), len(data.val)) == (None, True, 20, 5 * 6)

    def test_a_package_without_its_photos_is_asked_for(self, monkeypatch, tmp_path):
        found, spec = importlib.util.find_spec, importlib.util.find_spec("sklearn")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "skimage" else found(name))
        with pytest.raises(DataError, match=r"astronaut.png of scikit-image not found") as caught:
            load_photos()
        assert "pip install scikit-image" in caught.value.hint
        monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        with pytest.raises(DataError, match="scikit-learn not found"):
            load_photos()

    def test_bicubic_interpolation_has_31_decibels_on_the_portrait(self):
        data = load_photos()
        assert names(data.train) == {"china.jpg", "flower.jpg", "astronaut.png", "rocket.jpg"}
        assert names(data.test) == {"chelsea.png", "coffee.png"}
        batch = data.prepare(data.val.fetch(range(len(data.val)), 0, 0), CPU, PLAIN)
        enlarged = F.interpolate(batch.inputs, scale_factor=2, mode="bicubic", antialias=True)
        error = (enlarged - batch.targets).square().mean((1, 2, 3))
        assert (-10 * error.log10()).mean().item() == pytest.approx(31.0, abs=1.0)
