"""Checkpoints: whole or not at all, verified before use, and only what a safe load takes back."""

from __future__ import annotations

import errno
import json
import os
import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mptrain.runlog import checkpoint_data, checkpoints
from mptrain.runlog.checkpoint_data import check_plain
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.manifest import manifests_in, read_manifest
from mptrain.system.errors import CheckpointError, StorageError

RECORDS = {"steps.jsonl": 10, "events.jsonl": 0, "epochs.csv": 3}


def state_of(step):
    return {"step": step, "weights": torch.full((64,), float(step))}


def save(store, step, metric=None, **more):
    return store.save({**state_of(step), **more}, step=step, records=RECORDS, metric=metric, config_digest="abc")


def names(store):
    return sorted(entry.name for entry in store.folder.iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_nothing_is_named_before_it_is_on_the_disk(store, monkeypatch):
    force, rename, seen = os.fsync, Path.replace, []

    def forced(descriptor):
        force(descriptor)
        seen.append(("forced", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    def renamed(draft, target):
        seen.append(("named", draft.stat().st_ino, target.name))
        return rename(draft, target)

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(Path, "replace", renamed)
    manifest = save(store, 7).stat()
    data, folder = (store.folder / "step-00000007.pt").stat(), store.folder.stat()
    assert [one if one[1] != folder.st_ino else one[:2] for one in seen] == [
        ("forced", data.st_ino, data.st_size),
        ("named", data.st_ino, "step-00000007.pt"),
        ("forced", folder.st_ino),
        ("forced", manifest.st_ino, manifest.st_size),
        ("named", manifest.st_ino, "step-00000007.json"),
        ("forced", folder.st_ino),
        ("named", (store.folder / "last").stat().st_ino, "last"),  # for people: nothing reads it back
    ]


def test_a_state_comes_back_equal_with_its_manifest(store):
    state = {
        "model": torch.nn.BatchNorm1d(3).state_dict(),
        "half": torch.tensor([1.0, 65504.0, float("inf")], dtype=torch.float16),
        "numbers": (1, 2.5, True, None, "text", [1, 2]),
        "torch_rng": torch.get_rng_state(),
        "python_rng": random.getstate(),
        "adam": {"state": {0: {"step": torch.tensor(3.0)}}},
    }
    path = store.save(state, step=123, records=RECORDS, metric=0.5, config_digest="abc")
    assert path.name == "step-00000123.json"
    loaded = store.load_latest()
    assert loaded.skipped == []
    for back in (loaded.state, torch.load(path.with_suffix(".pt"), weights_only=True)):
        assert list(back) == list(state)
        assert all(torch.equal(back["model"][name], value) for name, value in state["model"].items())
        assert back["half"].dtype == torch.float16
        assert all(torch.equal(back[name], state[name]) for name in ("half", "torch_rng"))
        assert (back["numbers"], back["python_rng"]) == (state["numbers"], state["python_rng"])
    manifest = loaded.manifest
    assert (manifest.step, manifest.records, manifest.metric, manifest.config_digest) == (123, RECORDS, 0.5, "abc")
    assert manifest.bytes == path.with_suffix(".pt").stat().st_size


def test_a_store_without_a_folder_or_a_metric_lacks_a_best(store):
    assert store.load_latest() is store.best() is None
    for which in ("last", "best"):
        with pytest.raises(CheckpointError, match=which):
            store.load(which)
    save(store, 1)
    assert not (store.folder / "best").exists()
    with pytest.raises(CheckpointError, match="no best"):
        store.load("best")


def test_the_newest_are_kept_and_the_best_beside_them(store):
    for step, metric in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.6), (5, None)):
        save(store, step, metric)
    expected = [f"step-{step:08d}.{end}" for step in (2, 4, 5) for end in ("json", "pt")]
    assert names(store) == sorted(["best", "last", *expected])
    assert (store.folder / "last").read_text() == "step-00000005.json\n"
    assert (store.folder / "best").read_text() == "step-00000002.json\n"
    assert store.load("last").state["step"] == 5
    assert store.load("best").state["step"] == 2
    assert store.load_latest().state["step"] == 5


@pytest.mark.parametrize(("higher", "best"), [(True, 2), (False, 3)])
def test_the_best_follows_the_direction_and_the_older_of_equals_wins(tmp_path, higher, best):
    store = CheckpointStore(tmp_path, keep=9, higher_is_better=higher)
    for step, metric in enumerate((0.5, 0.9, 0.1, 0.9, 0.1, float("nan"), float("inf")), 1):
        save(store, step, metric)
    assert store.load("best").state["step"] == best


def test_a_checkpoint_is_loaded_by_the_path_of_either_file(store):
    for step in (1, 2):
        save(store, step)
    for end in ("json", "pt"):
        assert store.load(store.folder / f"step-00000001.{end}").state["step"] == 1
    with pytest.raises(StorageError, match="step-00000007"):
        store.load(store.folder / "step-00000007.pt")


def test_saving_a_step_again_replaces_it_however_often(store):
    for value in range(4):
        save(store, 5, value=value)
        assert store.load_latest().state["value"] == value
        assert len(names(store)) == 3
        data = store.folder / read_manifest(store.folder / "step-00000005.json").file
        assert store.load(data).state["value"] == value


def cut(end, share):
    def damage(folder):
        path = folder / f"step-00000002.{end}"
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def flipped(offset):
    def damage(folder):
        path = folder / "step-00000002.pt"
        content = bytearray(path.read_bytes())
        content[offset] ^= 1 << random.Random(offset).randrange(8)
        path.write_bytes(content)

    return damage


def changed(**change):
    def damage(folder):
        path = folder / "step-00000002.json"
        path.write_text(replace(read_manifest(path), **change).to_json())

    return damage


def lacking(name):
    def damage(folder):
        path = folder / "step-00000002.json"
        fields = json.loads(path.read_text())
        del fields[name]
        path.write_text(json.dumps(fields))

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        *((flipped(offset), "step-00000002.pt is damaged") for offset in (0, 600, -1)),
        *((cut(end, share), f"step-00000002.{end}") for end in ("pt", "json") for share in (0.0, 0.99)),
        (lambda folder: (folder / "step-00000002.pt").unlink(), "step-00000002.pt"),
        *((changed(**{name: value}), "step-00000002.json") for name, value in (
            ("step", 3), ("file", "../../other.pt"), ("schema", 1), ("schema", 3), ("bytes", "x"), ("metric", "high"),
            ("records", {"steps.jsonl": None}), ("records", 5), ("sha256", None),
        )),
        *((lacking(name), name) for name in ("digests", "parts", "part_files")),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_falls_back_to_the_one_before(store, damage, named):
    for step in (1, 2):
        save(store, step)
    damage(store.folder)
    loaded = store.load_latest()
    assert loaded.state["step"] == 1
    (skipped,) = loaded.skipped
    assert named in skipped
    with pytest.raises(StorageError, match="step-00000002"):
        store.load("last")


def test_no_flipped_bit_of_a_manifest_is_believed(store):
    path = save(store, 2, 0.75)
    content, manifest = path.read_bytes(), read_manifest(path)
    believed = 0
    for index in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[index // 8] ^= 1 << index % 8
        path.write_bytes(flipped)
        try:
            found = read_manifest(path)
        except StorageError:
            continue
        believed += 1
        assert found == manifest  # a flip in the white space between fields changes nothing
    assert believed < 0.02 * 8 * len(content)


def test_when_all_are_damaged_the_error_lists_every_reason(store):
    for step in (1, 2):
        os.truncate(store.folder / read_manifest(save(store, step)).file, 5)
    with pytest.raises(CheckpointError, match=r"(?s)00000002\.pt is damaged.*00000001\.pt is damaged") as caught:
        store.load_latest()
    assert caught.value.exit_code == 6


class Surprise:
    def __reduce__(self):
        return (os.mkdir, ("surprise",))


def test_a_data_file_with_code_in_it_is_never_run(store, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    save(store, 1)
    monkeypatch.setattr(checkpoints, "check_plain", lambda state: [])
    store.save({"x": Surprise()}, step=2, records={}, metric=None, config_digest="")
    loaded = store.load_latest()
    assert loaded.state["step"] == 1
    assert "cannot be loaded safely" in loaded.skipped[0]
    assert not (tmp_path / "surprise").exists()


class Number(float):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, {"b": Surprise()}]}, r"state\['a'\]\[1\]\['b'\] is a .*Surprise"),
        ({"a": Number(1)}, r"state\['a'\] is a .*Number"),
        ({"a": (torch.float16,)}, r"state\['a'\]\[0\] is a torch.dtype"),
        ({(1, 2): 0}, "state has a key of type tuple"),
        ({"a": {1, 2}}, r"state\['a'\] is a set"),
        ({"a": bytearray()}, r"state\['a'\] is a bytearray"),
    ],
)
def test_what_a_safe_load_would_refuse_is_refused_before_anything_is_written(store, value, words):
    with pytest.raises(TypeError, match=words):
        store.save(value, step=1, records={}, metric=None, config_digest="")
    assert not store.folder.exists()


def test_the_check_finds_all_tensors_in_their_order():
    state = OrderedDict(a=torch.zeros(10), b=[torch.zeros(3, dtype=torch.float16)], c=(1, None, "x"))
    state["d"] = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert [tensor.nbytes for tensor in check_plain(state)] == [40, 6, 16]


def test_what_killed_writers_left_is_removed_by_the_next_save(store):
    save(store, 1)
    for end in ("pt.1a2b3c4d.tmp", "json.1a2b3c4d.tmp", "pt"):
        (store.folder / f"step-00000002.{end}").write_bytes(b"half")
    (store.folder / "last.9.tmp").write_bytes(b"half")
    save(store, 3)
    assert names(store) == ["last"] + [f"step-0000000{step}.{end}" for step in (1, 3) for end in ("json", "pt")]


def test_after_a_fallback_the_damaged_future_does_not_push_out_the_new_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 30)
    os.truncate(store.folder / "step-00000030.pt", 5)
    save(store, 20)
    assert store.load_latest().state["step"] == 20
    assert [path.name for path in manifests_in(store.folder)] == ["step-00000020.json"]


def test_dropping_the_future_moves_the_pointers_back(store):
    for step, metric in ((1, 0.1), (2, 0.2), (3, 0.3)):
        save(store, step, metric)
    store.drop_after(2)
    assert store.load_latest().state["step"] == 2
    for pointer in ("last", "best"):
        assert (store.folder / pointer).read_text() == "step-00000002.json\n"
    store.drop_after(0)
    assert names(store) == []


def full_at_once(monkeypatch):
    def full(path):
        draft = path.with_name("full.tmp")
        draft.symlink_to("/dev/full")
        return draft

    monkeypatch.setattr(checkpoint_data, "temporary", full)


def full_at_a_later_piece(monkeypatch):
    """torch hides the error of the file that it writes to."""
    write, pieces = checkpoint_data.HashedFile._write, []

    def full_once(file, piece):
        pieces.append(piece)
        if len(pieces) == 5:
            raise OSError(errno.ENOSPC, "full")
        write(file, piece)

    monkeypatch.setattr(checkpoint_data.HashedFile, "_write", full_once)


def full_at_the_manifest(monkeypatch):
    def refuse(descriptor, data):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", refuse)


@pytest.mark.parametrize("size", [1, 1_000_000])
@pytest.mark.parametrize("fill", [full_at_once, full_at_a_later_piece, full_at_the_manifest])
def test_a_disk_that_is_full_keeps_the_last_checkpoint(store, monkeypatch, fill, size):
    save(store, 1)
    with monkeypatch.context() as patch:
        fill(patch)
        with pytest.raises(StorageError, match="the disk is full") as caught:
            save(store, 2, big=torch.zeros(size))
    assert "still intact: the checkpoint of step 1" in caught.value.hint
    assert store.load_latest().state["step"] == 1
    assert not [name for name in names(store) if name.endswith(".tmp")]
    save(store, 2)
    assert store.load_latest().state["step"] == 2


def test_at_least_one_checkpoint_is_kept(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        CheckpointStore(tmp_path, keep=0)


def test_digests_of_records_are_kept_and_guarded(store):
    path = store.save(
        {}, step=3, records={"steps.jsonl": 1}, digests={"steps.jsonl": "ab"}, metric=None, config_digest=""
    )
    assert read_manifest(path).digests == {"steps.jsonl": "ab"}
    path.write_text(path.read_text().replace('"ab"', '"ac"'))
    with pytest.raises(CheckpointError, match="its fields are inconsistent"):
        read_manifest(path)
