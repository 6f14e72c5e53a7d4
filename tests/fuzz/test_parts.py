"""Whatever the files of a sharded checkpoint hold, it is loaded whole or refused, and nothing in it is run."""

from __future__ import annotations

import hashlib
import io
import resource
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.runlog.checkpoint_data import insert_shards
from mptrain.system.errors import CheckpointError
from tests.fuzz.hostile import ODD, examples, only_our_errors, spoiled

WHOLE = {"/weight": torch.arange(9.0).reshape(3, 3), "/bias": torch.ones(2, dtype=torch.float16)}
STATE = {
    "step": 7,
    "weight": {"__part__": "/weight", "shape": [3, 3]},
    "bias": {"__part__": "/bias", "shape": [2]},
}
PARTS = [
    {name: value[:2].clone() for name, value in WHOLE.items()},
    {name: value[2:].clone() for name, value in WHOLE.items()},
]


def packed(value):
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def sound():
    return {f"rank-{rank}.pt": packed(parts) for rank, parts in enumerate(PARTS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spoiled")


def written(folder, files):
    """The digests of files that are there now."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def load(folder, files, state=STATE):
    """Load files that their manifest vouches for."""
    digests = written(folder, files)
    with only_our_errors(folder):
        return insert_shards(state, folder, digests)
    return None


def test_what_is_sound_is_loaded(sound, folder):
    loaded = load(folder, sound)
    assert loaded["step"] == 7
    assert torch.equal(loaded["weight"], WHOLE["/weight"])
    assert torch.equal(loaded["bias"], WHOLE["/bias"])
    assert loaded["bias"].dtype == torch.float16


@examples(50, 5000)
@given(st.data())
def test_a_spoiled_part(sound, folder, data):
    name = data.draw(st.sampled_from(sorted(sound)))
    load(folder, {**sound, name: data.draw(spoiled(sound[name]))})


@examples(50, 5000)
@given(st.data())
def test_parts_and_marks_with_values_of_another_kind(sound, folder, data):
    values = st.sampled_from([*ODD, (), torch.ones(2), torch.ones(1, 3, dtype=torch.int64), torch.empty(0)])
    name = data.draw(st.sampled_from(["/weight", "/bias", "/other"]))
    parts = data.draw(st.sampled_from([{**PARTS[1], name: data.draw(values)}, data.draw(values)]))
    mark = {"__part__": name, "shape": data.draw(values)} if data.draw(st.booleans()) else STATE["weight"]
    try:
        content = packed(parts)
    except (TypeError, AttributeError, RuntimeError):  # which nobody can save
        return
    load(folder, {**sound, "rank-1.pt": content}, {**STATE, "weight": mark})


WRONG = {
    "one rank's are missing": {"rank-0.pt": PARTS[0]},
    "one has another name": {"rank-0.pt": PARTS[0], "rank-2.pt": PARTS[1]},
    "they are larger than the whole": {f"rank-{rank}.pt": PARTS[0] for rank in range(2)},
    "one is missing of one rank": {"rank-0.pt": PARTS[0], "rank-1.pt": {"/bias": PARTS[1]["/bias"]}},
    "one has another dtype": {"rank-0.pt": PARTS[0], "rank-1.pt": {**PARTS[1], "/weight": torch.ones(1, 3).double()}},
    "one has another shape": {"rank-0.pt": PARTS[0], "rank-1.pt": {**PARTS[1], "/weight": torch.ones(1, 2)}},
    "there are none": {},
}


@pytest.mark.parametrize("what", WRONG)
def test_parts_that_do_not_fit_together_are_refused(folder, what):
    for path in folder.iterdir():
        path.unlink()
    digests = written(folder, {name: packed(value) for name, value in WRONG[what].items()})
    with pytest.raises(CheckpointError):
        insert_shards(STATE, folder, digests)


@pytest.mark.parametrize("huge", [torch.ones(1).expand(2**40), torch.empty(2**40, device="meta")])
def test_a_few_bytes_that_name_much_memory_take_none(sound, folder, huge):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load(folder, {**sound, "rank-1.pt": packed({"/weight": huge, "/bias": huge})}) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 2**20  # KiB


def test_a_signal_is_no_damage(sound, folder, monkeypatch):
    def press(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "load", press)
    with pytest.raises(KeyboardInterrupt):
        insert_shards(STATE, folder, written(folder, sound))


def test_a_state_in_which_one_list_stands_everywhere_is_gone_through_once(sound, folder):
    shared = [STATE["weight"]]
    for _ in range(60):
        shared = [shared, shared]
    before = time.process_time()
    assert len(insert_shards({"state": shared}, folder, written(folder, sound))["state"]) == 2
    assert time.process_time() - before < 10
