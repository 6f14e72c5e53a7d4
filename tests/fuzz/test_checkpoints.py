"""Whatever the files of a checkpoint hold, it is loaded whole or refused, and nothing in it is run."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.manifest import Manifest, manifest_name, read_manifest
from mptrain.system.errors import CheckpointError
from tests.fuzz.hostile import examples, misfit, only_our_errors, spoiled

STEP = 7


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "checkpoints"
    state = {"step": STEP, "weights": torch.arange(64.0), "adam": {0: (torch.tensor(3.0), "text", None, [1, 2.5])}}
    store = CheckpointStore(folder, keep=2)
    store.save({**state, "step": 3}, step=3, records={"steps.jsonl": 5}, metric=0.25, config_digest="abc")
    store.save(state, step=STEP, records={"steps.jsonl": 10}, metric=0.5, config_digest="abc")
    return folder


def load_all(folder):
    store = CheckpointStore(folder, keep=2)
    for load in (store.load_latest, store.best, lambda: store.load("last"), lambda: store.load("best")):
        with only_our_errors(folder):
            load()


def copied(sound):
    folder = sound.parent / "spoiled"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder, symlinks=True)
    return folder


def store_data(folder, data):
    """A data file, and the manifest that vouches for it."""
    (folder / f"step-{STEP:08d}.pt").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    manifest = Manifest(STEP, f"step-{STEP:08d}.pt", digest, len(data), {"steps.jsonl": 10}, 0.5, "abc")
    (folder / manifest_name(STEP)).write_text(manifest.to_json())


@examples(50, 5000)
@given(st.data())
def test_a_spoiled_manifest(sound, data):
    folder = copied(sound)
    path = folder / manifest_name(STEP)
    path.write_bytes(data.draw(spoiled(path.read_bytes())))
    load_all(folder)


@examples(50, 5000)
@given(st.data())
def test_a_manifest_with_a_value_of_another_kind_and_its_digest(sound, data):
    folder = copied(sound)
    path = folder / manifest_name(STEP)
    tree = data.draw(misfit({key: value for key, value in json.loads(path.read_bytes()).items() if key != "check"}))
    ordered = {key: tree.get(key) for key in sorted(Manifest.__dataclass_fields__)}
    tree["check"] = hashlib.sha256(json.dumps(ordered, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(tree))
    load_all(folder)


@examples(50, 5000)
@given(st.data())
def test_a_spoiled_data_file_that_its_manifest_vouches_for(sound, data):
    folder = copied(sound)
    store_data(folder, data.draw(spoiled((folder / f"step-{STEP:08d}.pt").read_bytes())))
    load_all(folder)


@examples(50, 5000)
@given(st.data())
def test_a_spoiled_pickle_in_a_sound_archive(sound, data):
    folder = copied(sound)
    with zipfile.ZipFile(folder / f"step-{STEP:08d}.pt") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, data.draw(spoiled(content)) if name.endswith(".pkl") else content)
    store_data(folder, whole.getvalue())
    load_all(folder)


class Caller:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("kept", ["archive", "pickle"])
@pytest.mark.parametrize("function", [os.system, exec, eval, torch.load, shutil.rmtree, __import__])
def test_a_pickle_that_calls_something_is_refused(sound, kept, function):
    folder = copied(sound)
    mark = folder.parent / "mark"
    state = {"step": STEP, "weights": Caller(function, f"touch {mark}")}
    whole = io.BytesIO()
    if kept == "archive":
        torch.save(state, whole)
    else:
        pickle.dump(state, whole)
    store_data(folder, whole.getvalue())
    with only_our_errors(folder), pytest.raises(CheckpointError, match="cannot be loaded safely"):
        CheckpointStore(folder, keep=2).load("last")
    assert not mark.exists()
    assert CheckpointStore(folder, keep=2).load_latest().manifest.step == 3


@pytest.mark.parametrize("value", [[1, 2], 3, "text", None])
def test_a_checkpoint_that_is_no_mapping_is_refused(sound, value):
    folder = copied(sound)
    whole = io.BytesIO()
    torch.save(value, whole)
    store_data(folder, whole.getvalue())
    with pytest.raises(CheckpointError, match="instead of a state"):
        CheckpointStore(folder, keep=2).load("last")


@pytest.mark.parametrize(
    "field",
    [
        *({"file": file} for file in ("", "\0", "\ud800", "a\0.pt", "..", "../x.pt", "x" * 5000)),
        *({"metric": metric} for metric in (10**400, True, "0.5", [0.5])),
    ],
    ids=lambda field: repr(field)[:30],
)
def test_a_manifest_with_an_impossible_name_or_metric_is_refused(sound, field):
    folder = copied(sound)
    path = folder / manifest_name(STEP)
    path.write_text(replace(read_manifest(path), **field).to_json())
    store = CheckpointStore(folder, keep=2, higher_is_better=False)
    found = store.best().name if "metric" in field else manifest_name(store.load_latest().manifest.step)
    assert found == manifest_name(3)
