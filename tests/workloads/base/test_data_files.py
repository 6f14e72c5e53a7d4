"""Search for data files: devices, named pipes, cycles of links and whole file systems are refused, never read without end."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path

import pytest

from mptrain.cli.main import main
from mptrain.system.errors import DataError
from mptrain.workloads.base import data_files
from mptrain.workloads.base.data_files import Faults, as_stored, files_below, hidden_noted, special_file, walk
from mptrain.workloads.base.dataset import file_digests
from mptrain.workloads.detection import detection_images
from mptrain.workloads.images.picture_files import has_images, picture_size
from mptrain.workloads.sound.recordings import RecordingError, recording_seconds

#: Each data set that takes a path, with its key and a suffix of its files.
TAKES = {
    "coco": ("root", ".json"),
    "fashion_mnist": ("root", ".gz"),
    "gettext": ("path", ".mo"),
    "image_folder": ("root", ".png"),
    "imagenet": ("root", ".png"),
    "labelled_text": ("path", ".tsv"),
    "pairs": ("path", ".tsv"),
    "photo_folder": ("root", ".png"),
    "recordings": ("root", ".wav"),
    "speech": ("path", ".wav"),
    "table": ("path", ".csv"),
    "text": ("path", ".txt"),
    "trans_de_en": ("path", ".txt"),
    "voc": ("root", ".xml"),
}


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", TAKES)
def test_no_data_set_reads_special_files_or_a_whole_system(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    key, suffix = TAKES[name]
    os.mkfifo("pipe")
    for folder in ("pipes/train/fr/LC_MESSAGES", "links/train/fr/LC_MESSAGES"):
        Path(folder).mkdir(parents=True)
    os.mkfifo(f"pipes/train{suffix}")
    os.mkfifo(f"pipes/train/fr/LC_MESSAGES/x{suffix}")
    Path(f"links/train/fr/LC_MESSAGES/x{suffix}").symlink_to("/dev/zero")
    Path(f"links/train{suffix}").symlink_to("/dev/zero")
    for place in ("/dev/zero", "/dev/stdin", "pipe", "/", "/proc/self", "pipes", "links", f"links/train{suffix}"):
        began = time.perf_counter()
        code = main(["doctor", f"dataset={name}", f"dataset.{key}={place}"])
        shown = capsys.readouterr().err
        assert code in (2, 6), (place, code, shown)
        assert time.perf_counter() - began < 10, place  # 5 s on an idle machine
        assert "error: " in shown, place
        assert "bug in mptrain" not in shown, (place, shown)


def test_every_data_set_with_a_path_is_tried():
    from mptrain.config.catalogue import configs_folder

    given = {
        path.stem
        for path in (configs_folder() / "dataset").glob("*.yaml")
        if any(line.strip().startswith(("root:", "path:")) for line in path.read_text().splitlines())
    }
    assert given - set(TAKES) == {"cifar10", "cifar100"}  # torchvision reads files of fixed names and digests


@pytest.mark.parametrize(("number", "left_out"), [(errno.EINVAL, True), (errno.EACCES, True), (errno.EIO, False)])
def test_a_folder_that_cannot_be_listed_is_left_out_and_a_failing_disk_is_not(number, left_out, tmp_path, monkeypatch):
    (tmp_path / "net").mkdir()
    (tmp_path / "a.png").touch()
    scandir = os.scandir

    def refusing(place):
        if str(place).endswith("net"):
            raise OSError(number, os.strerror(number), place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    with contextlib.nullcontext() if left_out else pytest.raises(OSError, match="Input/output"):
        assert [names for _, _, names in walk(tmp_path, (".png",))] == [["a.png"], []]


def test_cycles_of_links_end_and_each_file_is_found_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.png").touch()
    (tmp_path / "a/up").symlink_to("..")
    (tmp_path / "a/other").symlink_to("../b")
    (tmp_path / "b/other").symlink_to("../a")
    (tmp_path / "b/itself").symlink_to("itself")
    found = sorted(f"{parent}/{name}" for parent, _, names in walk(tmp_path, (".png",)) for name in names)
    expected = ["a/a.png", "a/other/b.png", "a/other/itself", "b/b.png", "b/itself", "b/other/a.png"]
    assert found == [f"{tmp_path}/{name}" for name in expected]
    assert files_below(tmp_path, (".png",)) == [tmp_path / "a/a.png", tmp_path / "b/b.png"]


def test_a_socket_is_refused_and_a_dangling_link_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gone.png").symlink_to("nowhere.png")
    assert [names for _, _, names in walk(".", (".png",))] == [["gone.png"]]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s.PNG")
        with pytest.raises(DataError, match=r"s\.PNG cannot be read: it is a socket, not a file"):
            list(walk(".", (".png",)))


@pytest.mark.timeout(20)
def test_lists_of_files_lead_to_no_special_file_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.wav")
    Path("list.tsv").touch()
    with pytest.raises(RecordingError, match="it is a named pipe, not a file"):
        recording_seconds("pipe.wav")
    for path in ("pipe.wav", "/dev/zero"):
        assert special_file(path).endswith(", not a file")
        assert len(file_digests([path])) == 1
        with pytest.raises(OSError, match="not a file"):
            picture_size(path)
    assert special_file("list.tsv") == special_file("nowhere") == special_file(".") == ""


def test_pictures_of_a_long_list_are_regular_files(tmp_path, monkeypatch):
    monkeypatch.setattr(detection_images, "HEADERS", 0)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "to_pipe.png").symlink_to("pipe.png")
    (tmp_path / "file.png").touch()
    (tmp_path / "to_file.png").symlink_to("file.png")
    names = ("pipe", "to_pipe", "file", "to_file", "none")
    pictures = [detection_images.AnnotatedImage(str(tmp_path / f"{name}.png"), (), None) for name in names]
    found = detection_images.present(pictures, tmp_path, Faults("skip"))
    assert [Path(one.path).stem for one in found] == ["file", "to_file"]


def test_a_search_ends_where_nearly_all_is_no_data(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MOST_OTHERS", 20)
    for number in range(60):
        (tmp_path / f"train/{number}").mkdir(parents=True)
        (tmp_path / f"train/{number}/x.png").touch()
        (tmp_path / f"train/{number}/x.json").touch()
    assert len(files_below(tmp_path / "train", (".png",))) == 60
    (tmp_path / "labels").mkdir()
    for number in range(60):
        (tmp_path / f"labels/{number}.txt").touch()
    assert has_images(tmp_path / "train")
    assert not has_images(tmp_path / "labels")
    with pytest.raises(DataError, match="more than 20 files and folders below"):
        list(walk(tmp_path / "labels", (".png",)))


def test_hidden_entries_and_those_of_macos_are_left_out_and_noted(tmp_path):
    kept = ["a.png", "sub/b.PNG", "sub/c.txt"]
    hidden = [
        "._a.png",
        "sub/.cache/x.png",
        "__MACOSX/sub/._b.PNG",
        ".ipynb_checkpoints/a-checkpoint.png",
        ".gitignore",
    ]
    for name in (*kept, *hidden):
        (tmp_path / ".root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".root" / name).touch()
    with hidden_noted() as said:
        found = files_below(tmp_path / ".root", (".png",))
        files_below(tmp_path / ".root", (".png",))  # each is counted once
    assert [str(path.relative_to(tmp_path / ".root")) for path in found] == kept[:2]
    assert len(said) == 1
    assert said[0].startswith(f"left out: 4 hidden files or folders, such as {tmp_path / '.root'}/")
    with hidden_noted() as said:
        files_below(tmp_path / ".root" / "sub", (".txt",))
    assert said == [f"left out: 1 hidden file or folder, such as {tmp_path / '.root/sub/.cache'}"]


def test_paths_of_lists_are_found_in_either_unicode_form(tmp_path):
    for place in ("e\u0301t\u0301", "caf\u00e9"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "u\u0308.txt").touch()
        (tmp_path / place / "\u00f6.txt").touch()
    for folder in ("e\u0301t\u0301", "\u00e9t\u0301", "caf\u00e9", "cafe\u0301"):
        for name in ("\u00fc.txt", "u\u0308.txt", "o\u0308.txt", "\u00f6.txt"):
            if folder != "\u00e9t\u0301":
                assert Path(as_stored(str(tmp_path / folder / name))).exists()
    for path in ("nowhere/\u00fc", "plain", "\0\u00fc", "\udcff"):
        assert as_stored(path) == path
