from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.random_streams import keys, normals
from mptrain.workloads.enhancement.datasets.photos import load_photo_folder, load_photos
from mptrain.workloads.enhancement.patches import PatchSplit, Photos, TileSplit
from mptrain.workloads.enhancement.photo_dataset import Degradation

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
    def test_they_have_the_moments_of_the_standard_normal_distribution(self):
        drawn = normals(keys(1, 2, range(20)), 50_000).double()
        assert drawn.mean().abs() < 5e-3
        assert drawn.std() == pytest.approx(1, abs=5e-3)
        assert (drawn**4).mean() == pytest.approx(3, abs=0.05)
        assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.03
        neighbours = torch.corrcoef(torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()]))[0, 1]
        assert neighbours.abs() < 5e-3
        assert drawn.isfinite().all()

    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_any_number_of_them_follows_from_seed_epoch_and_index_alone(self, count):
        some = normals(keys(3, 4, [5, 9]), count)
        assert some.shape == (2, count)
        assert torch.equal(some[1:], normals(keys(3, 4, [9]), count))
        for other in (keys(2, 4, [9]), keys(3, 5, [9]), keys(3, 4, [8])):
            assert not torch.equal(some[1:], normals(other, count))


class TestDegradation:
    @pytest.mark.parametrize("factor", [2, 3, 4])
    def test_downsampling_is_pillows_bicubic_to_within_a_rounding(self, tmp_path, factor):
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

    def test_noise_has_its_deviation_is_not_clipped_and_belongs_to_the_sample(self):
        white = torch.ones(2, 3, 64, 64)
        noisy = Degradation("noise", 2, 25).apply(white, keys(0, 0, [3, 4]))
        assert ((noisy - white).std() * 255).item() == pytest.approx(25, rel=0.02)
        assert noisy.max() > 1.2
        assert torch.equal(noisy[1:], Degradation("noise", 2, 25).apply(white[:1], keys(0, 0, [4])))

    def test_a_factor_of_1_and_a_sigma_of_0_change_nothing(self):
        picture = torch.rand(1, 3, 8, 8)
        assert torch.equal(Degradation("downsample", 1, 0).apply(picture, keys(0, 0, [0])), picture)
        assert torch.equal(Degradation("noise", 2, 0).apply(picture, keys(0, 0, [0])), picture)


class TestPhotos:
    @pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK"])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_pictures_of_every_kind_get_the_channels_asked_for(self, tmp_path, mode, channels):
        path = save(tmp_path / ("a.tif" if mode == "CMYK" else "a.png"), mode=mode)
        pixels = photos_of(path, channels=channels).pixels(0)
        assert (pixels.shape, pixels.dtype) == ((channels, 30, 40), torch.uint8)
        with Image.open(path) as file:
            expected = file.convert("RGBA").convert("RGB" if channels == 3 else "L").getpixel((7, 3))
        assert pixels[:, 3, 7].tolist() == list(expected if channels == 3 else (expected,))

    def broken(self, tmp_path):
        whole = save(tmp_path / "good.png")
        (tmp_path / "empty.png").write_bytes(b"")
        (tmp_path / "text.png").write_text("this is no picture")
        Image.new("F", (40, 40)).save(tmp_path / "deep.tif")
        save(tmp_path / "pixel.png", 1, 1)
        save(tmp_path / "narrow.png", 15, 40)
        others = (tmp_path / f"{name}.png" for name in ("empty", "text", "pixel", "narrow"))
        return [whole, tmp_path / "deep.tif", *others]

    def test_files_that_cannot_be_used_are_left_out_and_counted(self, tmp_path):
        paths = self.broken(tmp_path)
        photos = photos_of(*paths, on_error="skip")
        assert photos.paths == [str(paths[0])]
        assert len(photos.faults.found) == 5
        assert "15x40 pixels, but each crop of a photo has 16x16" in photos.faults.found[str(tmp_path / "narrow.png")]
        assert "mode F does not define the value of white" in photos.faults.found[str(tmp_path / "deep.tif")]

    @pytest.mark.parametrize("number", range(1, 6))
    def test_a_file_that_cannot_be_used_stops_with_its_name(self, tmp_path, number):
        path = self.broken(tmp_path)[number]
        with pytest.raises(DataError, match=path.name):
            photos_of(path)

    def test_a_file_that_is_cut_short_is_found_when_it_is_decoded(self, tmp_path):
        good, cut = save(tmp_path / "good.png"), save(tmp_path / "cut.png")
        cut.write_bytes(cut.read_bytes()[:-1500])
        split = PatchSplit(photos_of(good, cut, on_error="skip"), 8, 16, augment=True)
        assert split.skipped == 0
        assert split.fetch(range(8), 0, 0).samples == 4
        assert split.skipped == 1
        with pytest.raises(DataError, match="no photo of the batch"):
            split.fetch([1, 3], 0, 0)
        with pytest.raises(DataError, match=r"cut\.png"):
            PatchSplit(photos_of(good, cut), 8, 16, augment=True).fetch(range(8), 0, 0)

    def test_a_file_that_was_replaced_by_another_size_is_not_used(self, tmp_path):
        path = save(tmp_path / "a.png")
        photos = photos_of(path)
        save(path, 60, 60)
        with pytest.raises(OSError, match="size has changed"):
            photos.pixels(0)

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

    def test_patches_follow_from_seed_epoch_and_index_whatever_else_is_in_the_batch(self, folder):
        split = PatchSplit(photos_of(*sorted(folder.iterdir())), 30, 16, augment=True)
        whole, part = split.fetch([4, 9, 2], 1, 5), split.fetch([9], 1, 5)
        assert torch.equal(whole.inputs[1:2], part.inputs)
        assert torch.equal(whole.more["words"][1:2], part.more["words"])
        for epoch, seed in ((2, 5), (1, 6)):
            other = split.fetch([9], epoch, seed)
            assert not torch.equal(other.inputs, part.inputs)
            assert not torch.equal(other.more["words"], part.more["words"])

    def test_a_photo_of_exactly_the_size_of_a_patch_has_one(self, tmp_path):
        path = save(tmp_path / "a.png", 16, 16)
        batch = PatchSplit(photos_of(path), 5, 16, augment=False).fetch(range(5), 0, 0)
        assert all(torch.equal(patch, photos_of(path).pixels(0)) for patch in batch.inputs)


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

    def test_tiles_and_their_noise_are_the_same_in_every_run(self, folder):
        split = TileSplit(photos_of(*sorted(folder.iterdir())), 16, None)
        one, other = split.fetch([3, 5], 0, 0), split.fetch([5], 7, 123)
        assert torch.equal(one.inputs[1:], other.inputs)
        assert torch.equal(one.more["words"][1:], other.more["words"])


class TestFolders:
    def test_photos_are_divided_as_wholes_and_always_alike(self, folder):
        data = load_photo_folder(root=folder, val_photos=3, **SMALL)
        parts = [names(split) for split in (data.train, data.val, data.test)]
        assert [len(part) for part in parts] == [6, 3, 1]
        assert len(set.union(*parts)) == 10
        again = load_photo_folder(root=folder, val_photos=3, **SMALL)
        assert [names(split) for split in (again.train, again.val, again.test)] == parts

    def test_folders_called_train_val_and_test_are_taken_as_they_are(self, tmp_path):
        for part in ("train", "val", "test"):
            save(tmp_path / part / "inside" / f"{part}.jpg")
        (tmp_path / "train" / ".hidden").mkdir()
        save(tmp_path / "train" / ".hidden" / "x.png")
        data = load_photo_folder(root=tmp_path, **SMALL)
        assert [names(split) for split in (data.train, data.val, data.test)] == [
            {"train.jpg"},
            {"val.jpg"},
            {"test.jpg"},
        ]

    def test_what_is_not_there_as_a_folder_is_held_out_of_train(self, tmp_path):
        for number in range(4):
            save(tmp_path / "train" / f"{number}.png", seed=number)
        save(tmp_path / "val" / "own.png")
        data = load_photo_folder(root=tmp_path, test_photos=1, **SMALL)
        assert names(data.val) == {"own.png"}
        assert len(names(data.test)) == 1
        assert len(names(data.train)) == 3
        assert not names(data.train) & names(data.test)
        assert load_photo_folder(root=tmp_path, test_photos=0, **SMALL).test is None

    @pytest.mark.parametrize("photos", [1, 2])
    def test_too_few_photos_to_divide_are_refused(self, tmp_path, photos):
        for number in range(photos):
            save(tmp_path / f"{number}.png")
        with pytest.raises(ConfigError, match="leaves none to train on") as caught:
            load_photo_folder(root=tmp_path, **SMALL)
        assert "dataset.val_photos=0" in caught.value.problems[0].hint

    def test_a_folder_without_images_is_refused_with_the_endings_that_are_known(self, tmp_path):
        with pytest.raises(DataError, match="no images found below") as caught:
            load_photo_folder(root=tmp_path, **SMALL)
        assert ".png" in caught.value.hint

    def test_a_folder_that_is_not_there_is_said_not_to_be_there(self, tmp_path):
        with pytest.raises(DataError, match=rf"the folder of the photos, {tmp_path}/nothing, does not exist"):
            load_photo_folder(root=tmp_path / "nothing", **SMALL)

    @pytest.mark.parametrize("key", ["tile_size", "patch_size"])
    def test_photos_that_are_too_small_are_told_with_the_key_that_asks_for_more(self, folder, key):
        with pytest.raises(DataError, match=r"has 4\dx3\d pixels, but each crop of a photo has 64x64") as caught:
            load_photo_folder(root=folder, **{**SMALL, key: 64})
        assert caught.value.hint.startswith(
            f"choose a smaller dataset.{key}, or larger photos, or set dataset.on_error="
        )

    def test_a_split_whose_photos_are_all_too_small_is_refused(self, folder):
        with pytest.raises(DataError, match="no photo of") as caught:
            load_photo_folder(root=folder, on_error="skip", **{**SMALL, "tile_size": 64})
        assert "choose a smaller dataset.tile_size" in caught.value.hint

    @pytest.mark.parametrize(
        ("words", "says", "instead"),
        [
            ({"patch_size": 15}, "patch_size=15 is not a multiple", "patch_size=14"),
            ({"patch_size": 1}, "patch_size=1 is not a multiple", "patch_size=2"),
            ({"tile_size": 31}, "tile_size=31 is not a multiple", "tile_size=30"),
            ({"tile_size": 14}, "SSIM's window and the border need 15 pixels", "tile_size=16"),
        ],
    )
    def test_sizes_that_do_not_go_together_are_refused_with_ones_that_do(self, folder, words, says, instead):
        with pytest.raises(ConfigError, match=says) as caught:
            load_photo_folder(root=folder, **{**SMALL, **words})
        assert instead in caught.value.problems[0].hint


class TestDataset:
    @pytest.mark.parametrize(("kind", "upscale"), [("downsample", 2), ("noise", 1)])
    def test_a_prepared_batch_has_bad_inputs_and_good_targets_in_float32(self, folder, kind, upscale):
        data = load_photo_folder(root=folder, degradation=kind, **SMALL)
        assert data.facts() == {"in_channels": 3, "upscale": upscale}
        stored = data.train.fetch([1, 2], 0, 0)
        batch = data.prepare(stored, CPU, torch.channels_last)
        assert torch.equal(batch.targets, stored.inputs.float() / 255)
        assert torch.equal(batch.inputs, data.degrade.apply(batch.targets, stored.more["words"]))
        assert batch.inputs.shape == (2, 3, 16 // upscale, 16 // upscale)
        assert batch.inputs.dtype == batch.targets.dtype == torch.float32
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
        assert dict(batch.more) == {}
        half = batch.cast(torch.float16)
        assert (half.inputs.dtype, half.targets.dtype) == (torch.float16, torch.float32)

    def test_a_batch_of_parts_is_prepared_like_the_whole(self, folder):
        data = load_photo_folder(root=folder, degradation="noise", **SMALL)
        stored = data.train.fetch(range(5), 0, 0)
        whole = data.prepare(stored, CPU, PLAIN).inputs
        assert torch.equal(torch.cat([data.prepare(part, CPU, PLAIN).inputs for part in stored.split(2)]), whole)

    def test_the_card_names_the_photos_and_the_degradation(self, folder):
        card = load_photo_folder(root=folder, **SMALL).card()
        assert sorted(path for part in card["files"].values() for path in part) == sorted(map(str, folder.iterdir()))
        assert card["degradation"] == {
            "kind": "downsample",
            "factor": 2,
            "mode": "bicubic",
            "antialias": True,
            "bits": 8,
        }
        assert "labels" not in card
        assert load_photo_folder(root=folder, **SMALL).describe() == "3x8x8 to 3x16x16"


class TestInstalledPhotos:
    def test_the_photos_of_every_installation_train_and_validate(self):
        data = load_photos(patches=20, skimage=False)
        assert names(data.train) == {"china.jpg", "flower.jpg"}
        assert names(data.val) == {"grace_hopper.jpg"}
        assert data.test is None
        assert data.train.in_memory
        assert (len(data.train), len(data.val)) == (20, 5 * 6)

    def test_those_of_scikit_image_are_more_to_train_on_and_to_test_on(self):
        data = load_photos()
        assert names(data.train) == {"china.jpg", "flower.jpg", "astronaut.png", "rocket.jpg"}
        assert names(data.test) == {"chelsea.png", "coffee.png"}

    def test_without_scikit_image_it_is_asked_for(self, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "skimage" else found(name))
        with pytest.raises(DataError, match=r"astronaut.png of scikit-image not found") as caught:
            load_photos()
        assert "pip install scikit-image" in caught.value.hint

    def test_a_package_that_came_without_its_photo_is_named(self, monkeypatch, tmp_path):
        spec = importlib.util.find_spec("sklearn")
        (tmp_path / "datasets" / "images").mkdir(parents=True)
        monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        with pytest.raises(DataError, match="scikit-learn not found"):
            load_photos()

    def test_what_there_is_to_beat_on_the_portrait_is_bicubic_interpolation_at_32_decibels(self):
        data = load_photos()
        batch = data.prepare(data.val.fetch(range(len(data.val)), 0, 0), CPU, PLAIN)
        enlarged = F.interpolate(batch.inputs, scale_factor=2, mode="bicubic", antialias=True)
        error = (enlarged - batch.targets).square().mean((1, 2, 3))
        assert (-10 * error.log10()).mean().item() == pytest.approx(31.0, abs=1.0)
