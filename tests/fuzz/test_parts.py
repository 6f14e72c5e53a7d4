"""Whatever the files of a sharded checkpoint hold, it is loaded whole or refused, and nothing in it is run."""

from __future__ import annotations

import copy
import hashlib
import pickle
import resource
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint
from fuzz.hostile import ODD, examples, only_our_errors, spoiled
from hypothesis import given
from hypothesis import strategies as st

from mptrain.errors import CheckpointError
from mptrain.runlog.shards import DESCRIPTION, with_parts

PART = "__0_0.distcp"
WEIGHTS = {"/weight": torch.arange(6.0).reshape(2, 3), "/bias": torch.ones(2, dtype=torch.float16)}
STATE = {"step": 7, "weight": {"__part__": "/weight"}, "bias": {"__part__": "/bias"}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "step-00000007.parts"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(WEIGHTS, checkpoint_id=folder)
    return {name: (folder / name).read_bytes() for name in (DESCRIPTION, PART)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spoiled")


def written(folder, files):
    """The digests of files that are there now."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def load(folder, files):
    """Load files that their manifest vouches for."""
    digests = written(folder, files)
    with only_our_errors(folder):
        return with_parts(STATE, folder, digests)
    return None


def test_what_is_sound_is_loaded(sound, folder):
    loaded = load(folder, sound)
    assert loaded["step"] == 7
    assert torch.equal(loaded["weight"], WEIGHTS["/weight"])
    assert torch.equal(loaded["bias"], WEIGHTS["/bias"])


@examples(80, 5000)
@given(st.data())
def test_a_spoiled_description(sound, folder, data):
    load(folder, {**sound, DESCRIPTION: data.draw(spoiled(sound[DESCRIPTION]))})


@examples(80, 5000)
@given(st.data())
def test_a_spoiled_part(sound, folder, data):
    load(folder, {**sound, PART: data.draw(spoiled(sound[PART]))})


@examples(80, 5000)
@given(st.data())
def test_a_description_with_values_of_another_kind(sound, folder, data):
    described = pickle.loads(sound[DESCRIPTION])
    for _ in range(data.draw(st.integers(1, 2))):
        thing, attribute = data.draw(st.sampled_from(fields_of(described)))
        value = copy.deepcopy(data.draw(st.sampled_from([*ODD, (), (1,), (2**40, 2**40), (-2, 3), torch.int64, PART])))
        object.__setattr__(thing, attribute, value)
    try:
        description = pickle.dumps(described)
    except (TypeError, AttributeError):  # an index that no mapping takes
        return
    load(folder, {**sound, DESCRIPTION: description})


def fields_of(described):
    """Whatever can be another value in a description, as far as it still has its form."""
    things = [described]
    if isinstance(described.state_dict_metadata, dict):
        for entry in described.state_dict_metadata.values():
            things.append(entry)
            chunks = getattr(entry, "chunks", None)
            things += chunks if isinstance(chunks, list) else []
    if isinstance(described.storage_data, dict):
        things += [*described.storage_data.keys(), *described.storage_data.values()]
    things = [thing for thing in things if hasattr(thing, "__dict__")]
    return [(thing, name) for thing in things for name in vars(thing) if name != "properties"] + [
        (thing.properties, "dtype") for thing in things if hasattr(thing, "properties")
    ]


def test_a_few_bytes_that_name_much_memory_take_none(sound, folder):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in (
        b"\x80\x04}r\x00\x00\x00\x08.",  # remembered under a number of which others make the length of a table
        b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b"x.",  # a text of a terabyte
        b"\x80\x04\x95" + (2**40).to_bytes(8, "little") + b"}.",  # a frame of one
    ):
        assert load(folder, {**sound, DESCRIPTION: bomb}) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 2**20  # KiB


HOSTILE = {
    "a key that is nested deeply": b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
    "a key of which there are powers of two": b"\x80\x02})" + b"2\x86" * 60 + b"Ns.",
    "a set of such": b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90.",
    "bytes that are only named": b"\x80\x05\x96" + (2**31).to_bytes(8, "little") + b".",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_descriptions_are_refused_in_time(sound, folder, what):
    assert load(folder, {**sound, DESCRIPTION: HOSTILE[what]}) is None


@pytest.mark.parametrize("twice", ["chunk", "place"])
def test_what_is_there_twice_is_refused(sound, folder, twice):
    described = pickle.loads(sound[DESCRIPTION])
    entry = described.state_dict_metadata["/bias"]
    if twice == "chunk":
        entry.size = torch.Size([4])
        entry.chunks = entry.chunks * 2
    else:
        places = described.storage_data
        for place in places.values():
            place.offset = 0
    with pytest.raises(CheckpointError, match=r"there twice|of its own"):
        with_parts(STATE, folder, written(folder, {**sound, DESCRIPTION: pickle.dumps(described)}))


def test_a_signal_is_no_damage(sound, folder, monkeypatch):
    def press(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "load", press)
    with pytest.raises(KeyboardInterrupt):
        with_parts(STATE, folder, written(folder, sound))


def test_a_state_in_which_one_list_stands_everywhere_is_gone_through_once(sound, folder):
    shared = [{"__part__": "/weight"}]
    for _ in range(60):
        shared = [shared, shared]
    before = time.process_time()
    assert len(with_parts({"state": shared}, folder, written(folder, sound))["state"]) == 2
    assert time.process_time() - before < 10
