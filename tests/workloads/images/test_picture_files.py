"""Every mode of a picture file becomes 8 bits by its own range, in every reader of pictures; what was converted is told."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from mptrain.system.errors import DataError
from mptrain.workloads.base.data_files import Faults, checking, describe
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.detection.detection_images import AnnotatedImage, Listing, PictureOptions, PictureSplit
from mptrain.workloads.enhancement.photo_dataset import Photos
from mptrain.workloads.images.datasets.image_folder import load_image_folder
from mptrain.workloads.images.picture_files import UNDECODABLE, picture_size, read_picture

#: Values from the whole range of 16 bits, in an irregular order.
DEEP = (np.arange(64, dtype=np.uint32) * 40503 % 65536).astype(np.uint16).reshape(8, 8)
HIGH = torch.from_numpy((DEEP >> 8).astype(np.uint8))


def png(path, kind, values):
    """A PNG of 16 bits a channel, which Pillow writes in grey only."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def twelve_bit_tiff(path):
    """A grey TIFF of 12 bits a pixel: the highest of `DEEP`."""
    values = (DEEP >> 4).astype(int).flatten().tolist()
    packed = b"".join(
        bytes((one >> 4, (one & 15) << 4 | other >> 8, other & 255))
        for one, other in zip(*[iter(values)] * 2, strict=True)
    )
    tags = ((256, 8), (257, 8), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 8), (279, len(packed)))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    path.write_bytes(
        b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + struct.pack("<H", len(tags)) + entries + b"\0" * 4
    )


def grey(path):
    if path.name == "twelve.tif":
        twelve_bit_tiff(path)
    elif path.name == "big.tif":
        Image.fromarray(DEEP.astype(">u2")).save(path)
    elif path.suffix == ".pgm":
        path.write_bytes(b"P5 8 8 65535\n" + DEEP.astype(">u2").tobytes())
    else:
        Image.fromarray(DEEP).save(path)
    return str(path)


def pixels_of(path, channels=1):
    picture = read_picture(str(path), channels, Faults())
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(*picture.size[::-1], channels)


@pytest.mark.parametrize("name", ["deep.png", "little.tif", "big.tif", "twelve.tif", "deep.pgm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_become_their_high_byte(tmp_path, name, channels):
    path = grey(tmp_path / name)
    assert torch.equal(pixels_of(path, channels), HIGH[:, :, None].expand(-1, -1, channels))


@pytest.mark.parametrize("name", ["deep.png", "big.tif"])
def test_every_reader_of_pictures_reads_them_so(tmp_path, name):
    (tmp_path / "train").mkdir()
    path = grey(tmp_path / "train" / name)
    Image.fromarray(HIGH.numpy()).save(tmp_path / "train" / "plain.png")
    folder = load_image_folder(root=tmp_path, image_size=8, channels=1, augment=False).train
    listing = Listing([AnnotatedImage(path, ((0, 0, 8, 8, 0, 0),), None)])
    boxed = PictureSplit(listing, torch.arange(1), PictureOptions(8, 1, "stretch", False, None, 0), Faults())
    photos = Photos([path], 1, 8, "tile_size", 1, Faults())
    deep, plain = folder.fetch([0, 1], 0, 0).inputs
    assert torch.equal(deep, plain)
    assert torch.equal(boxed.fetch([0], 0, 0).inputs[0, 0], HIGH)
    assert torch.equal(photos.pixels(0)[0], HIGH)
    for one in (folder, boxed, photos):
        assert one.faults.remarks == {path: "16-bit (the high byte is used)"}


@pytest.mark.parametrize("kind", [2, 6, 4])
def test_channels_of_16_bits_agree_with_grey_of_16_bits(tmp_path, kind):
    channels = {2: 3, 6: 4, 4: 2}[kind]
    png(tmp_path / "a.png", kind, DEEP[:, :, None].repeat(channels, 2))
    faults = Faults()
    assert torch.equal(pixels_of(tmp_path / "a.png", 3), HIGH[:, :, None].expand(-1, -1, 3))
    read_picture(str(tmp_path / "a.png"), 3, faults)
    transparent = ", transparency (left out)" if kind != 2 else ""
    assert list(faults.remarks.values()) == [f"16-bit (the high byte is used){transparent}"]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_without_a_known_range_are_refused(tmp_path, dtype):
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "a.tif"
    Image.fromarray(DEEP.astype(dtype)).save(path)
    for read in (picture_size, pixels_of):
        with pytest.raises(OSError, match="does not define the value of white; save it with 8 or 16 bits"):
            read(str(path))
    with pytest.raises(DataError, match=r"a.tif: cannot be decoded: mode"):
        load_image_folder(root=tmp_path, image_size=8).train.fetch([0], 0, 0)


def colours(mode):
    values = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    if mode == "LAB":
        return Image.merge("LAB", Image.fromarray(values).split())
    return Image.fromarray(values).convert(mode)


@pytest.mark.parametrize(
    ("mode", "name", "remark"),
    [
        ("RGB", "a.png", ""),
        ("L", "a.png", ""),
        ("1", "a.png", ""),
        ("RGB", "a.jpg", ""),
        ("RGB", "a.bmp", ""),
        ("RGB", "a.webp", ""),
        ("RGB", "a.tif", ""),
        ("RGB", "a.ppm", ""),
        ("P", "a.png", "palette"),
        ("RGBA", "a.png", "transparency (left out)"),
        ("LA", "a.png", "transparency (left out)"),
        ("CMYK", "a.jpg", "CMYK"),
        ("LAB", "a.tif", "LAB"),
        ("RGB", "a.gif", "palette"),
    ],
)
def test_eight_bits_stay_what_pillow_makes_of_them(tmp_path, mode, name, remark):
    path = tmp_path / name
    colours(mode).save(path)
    faults = Faults()
    for channels, into in ((3, "RGB"), (1, "L")):
        with Image.open(path) as file:
            expected = file.convert("RGB").convert(into) if mode == "LAB" else file.convert(into)
        assert read_picture(str(path), channels, faults).tobytes() == expected.tobytes()
    assert faults.remarks == ({str(path): remark} if remark else {})


def test_odd_files_are_told(tmp_path):
    first, palette = colours("RGB"), colours("RGB").quantize(16)
    first.save(tmp_path / "a.tif", save_all=True, append_images=[first.rotate(90)])
    palette.save(tmp_path / "b.png", transparency=bytes(range(0, 160, 10)))  # Pillow's warning would be an error
    first.resize((1, 5)).save(tmp_path / "c.png")
    first.save(tmp_path / "d.png", "JPEG")
    png(tmp_path / "e.png", 0, np.full_like(DEEP, 4095))
    faults = Faults()
    found = [read_picture(str(tmp_path / name), 3, faults) for name in ("a.tif", "b.png", "c.png", "d.png", "e.png")]
    assert [one.tobytes() for one in found[:2]] == [first.tobytes(), palette.convert("RGB").tobytes()]
    *told, dark = faults.remarks.values()
    assert told[:2] == ["several frames (the first is used)", "palette, transparency (left out)"]
    assert told[2:] == ["1x5 pixels", "JPEG named .png"]
    assert dark.startswith("16-bit (the high byte is used), dark (at most 16 of 256 grey levels are left")


@pytest.mark.parametrize("workers", [0, 2])
def test_conversions_are_counted_once_a_file(tmp_path, workers):
    for name, number in itertools.product("ab", range(6)):
        path = tmp_path / "train" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colours("RGBA" if number < 2 else "RGB").save(path)
    (tmp_path / "train" / "a" / "bad.png").write_bytes(b"")
    data = load_image_folder(root=tmp_path, image_size=8, on_error="skip", val_share=0.0)
    loader = Loader(data.train, 3, 0, shuffle=True, workers=workers)
    for epoch in range(2):
        assert sum(batch.terms for batch in loader.batches(epoch)) == 12
    loader.close()
    faults = data.train.faults
    assert set(faults.remarks.values()) == {"transparency (left out)"}
    assert (len(faults.remarks), len(faults.unusable)) == (4, 1)
    assert describe(faults.remarks).startswith("transparency (left out): 4 files, such as /")


def test_checking_tells_what_training_would_stop_at():
    with checking() as check:
        Faults("stop").report({"a": "is bad"})
        Faults("skip").report({"b": "is bad"})
        Faults("skip").report({"c": "is bad"}, skippable=False)
    assert (set(check.stopping), set(check.skipped)) == ({"a", "c"}, {"b"})
    with pytest.raises(DataError, match="a: is bad"):
        Faults("stop").report({"a": "is bad"})


@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
@pytest.mark.parametrize("turn", [None, 1, 3, 6, 8])
def test_pictures_that_their_description_turns_are_told(tmp_path, ending, turn):
    exif = Image.Exif()
    if turn:
        exif[274] = turn
    path = tmp_path / f"a.{ending}"
    Image.new("RGB", (8, 6)).save(path, **({"exif": exif} if turn else {}))
    faults = Faults()
    assert read_picture(str(path), 3, faults).size == (8, 6)
    assert faults.remarks.get(str(path), "").startswith("turned by its EXIF orientation") == (turn in (3, 6, 8))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_damaged_description_is_no_fault_of_the_pixels(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\0\0\xff\xff")
    faults = Faults()
    assert read_picture(str(tmp_path / "a.jpg"), 3, faults).size == (8, 6)
    assert not faults.remarks


@pytest.mark.parametrize("kind", ["EPS", "ICO", "TGA", "PCX", "JPEG2000", "DDS"])
def test_other_formats_are_not_tried_whatever_the_name(tmp_path, kind):
    picture = Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8))
    for ending in (".jpg", ".png", ".tif"):
        picture.save(tmp_path / f"a{ending}", format=kind)
        for read in (picture_size, lambda path: read_picture(path, 3, Faults())):
            with pytest.raises(OSError, match="no picture of a known format"):
                read(str(tmp_path / f"a{ending}"))


@pytest.mark.parametrize("kind", ["BMP", "DIB", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"])
def test_formats_that_are_read_are_read_under_another_name(tmp_path, kind):
    picture = Image.fromarray(np.full((16, 16, 3), 200, dtype=np.uint8))
    picture.save(tmp_path / "a.jpg", format=kind)
    found = read_picture(str(tmp_path / "a.jpg"), 3, Faults())
    assert (found.size, abs(int(found.getpixel((8, 8))[0]) - 200) < 3) == ((16, 16), True)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("read", [picture_size, lambda path: read_picture(path, 3, Faults())])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s.png"))
        for name, why in (
            ("pipe", "a named pipe"),
            ("link", "a named pipe"),
            ("s", "a socket"),
            ("folder", "directory"),
        ):
            with pytest.raises(OSError, match=why):
                read(str(tmp_path / f"{name}.png"))


def test_a_damaged_picture_raises_nothing_else(tmp_path):
    draws, path = np.random.default_rng(0), tmp_path / "a.png"
    for kind in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
        Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(path, format=kind)
        whole = path.read_bytes()
        for at in draws.integers(0, len(whole), 40):
            path.write_bytes(whole[:at] + draws.bytes(2) + whole[at + 2 :])
            with contextlib.suppress(UNDECODABLE):
                read_picture(str(path), 3, Faults())


def test_an_exception_of_pillow_itself_is_a_damaged_picture(tmp_path, monkeypatch):
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: {}["x"])
    with pytest.raises(OSError, match="Pillow fails on it: KeyError: 'x'"):
        read_picture(str(tmp_path / "a.png"), 3, Faults())
