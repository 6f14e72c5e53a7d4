"""A checkpoint whose digest is right and whose state is not: keys that are missing, values of another kind. Every command says so."""

from __future__ import annotations

import copy
import hashlib
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_run
from mptrain.lab.replay import replay_run
from mptrain.run.evaluation import evaluate_run, export_run
from mptrain.run.resume import launch, resume
from mptrain.runlog.manifest import manifest_name, read_manifest
from mptrain.system.errors import CheckpointError, MptrainError
from tests.fuzz.hostile import examples
from tests.small_runs import TINY

STEP = 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("states")
    words = (*TINY, "precision=fp16_dynamic", "optimizer=adam", "train.ema_decay=0.9", f"train.max_steps={STEP}")
    launch(compose([*words, f"run.root={root}", "run.name=sound"]), lambda opening: [])
    return root / "sound"


def with_state(sound, change):
    """A copy of the run whose last checkpoint says something else, and whose manifest vouches for it."""
    folder = sound.parent / "spoiled"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder, symlinks=True)
    data = folder / "checkpoints" / f"step-{STEP:08d}.pt"
    state = torch.load(data, weights_only=True)
    change(state)
    torch.save(state, data)
    path = folder / "checkpoints" / manifest_name(STEP)
    whole = data.read_bytes()
    path.write_text(replace(read_manifest(path), sha256=hashlib.sha256(whole).hexdigest(), bytes=len(whole)).to_json())
    return folder


def commands(folder):
    run = str(folder)
    yield "resume", lambda: resume(run, ["train.max_steps=6"], lambda opening: [])
    yield "eval", lambda: evaluate_run(run, [], "last", average=True)
    yield "raw", lambda: evaluate_run(run, [], "last", average=False)
    yield "export", lambda: export_run(run, "last", torch.float16, average=True, output=None)
    yield "diagnose", lambda: diagnose_run(run, [], None, None)
    yield "replay", lambda: replay_run(run, ["scaler=static", "scaler.scale=8"])
    begun = [*TINY, f"model.weights={run}", f"run.root={folder.parent}", "run.name=begun", "train.max_steps=1"]
    yield "weights", lambda: launch(compose(begun), lambda opening: [])


def places(tree, path=()):
    """Every key of nested mappings, as a path."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def run_all(folder, only=None):
    for name, command in commands(folder):
        if only is not None and name not in only:
            continue
        shutil.rmtree(folder.parent / "begun", ignore_errors=True)
        refused = None
        try:
            command()
        except MptrainError as error:
            refused = error
        assert refused is None or (refused.exit_code in (2, 3, 4, 6) and str(refused).strip()), (name, repr(refused))


KINDS = [None, 0, -1, 2**70, 1.5, float("nan"), True, "text", [], [1], {}, {"a": 1}, {1: 2}, torch.tensor(3.0), torch.zeros(0),
         torch.zeros(2, 3, dtype=torch.int64), torch.tensor(float("nan"))]  # fmt: skip


@pytest.mark.long
@examples(25, 1500)
@given(st.data())
def test_states_without_a_key_or_with_a_value_of_another_kind(sound, data):
    state = torch.load(sound / "checkpoints" / f"step-{STEP:08d}.pt", weights_only=True)
    path = data.draw(st.sampled_from(list(places(state))))
    number = data.draw(st.integers(-1, len(KINDS) - 1))

    def change(tree):
        parent = at(tree, path[:-1])
        if number < 0:
            del parent[path[-1]]
        else:
            parent[path[-1]] = copy.deepcopy(KINDS[number])

    name = data.draw(st.sampled_from(["resume", "eval", "raw", "export", "diagnose", "replay", "weights"]))
    run_all(with_state(sound, change), [name])


@pytest.mark.parametrize("path", [("progress",), ("model",), ("learners", "main"), ("accounts", "main"), ("random",)])
def test_a_state_without_its_parts_is_refused_with_6(sound, path):
    folder = with_state(sound, lambda tree: at(tree, path[:-1]).pop(path[-1]))
    for name, command in commands(folder):
        if name == "replay" or (name != "resume" and len(path) > 1):  # replay reads records alone
            continue
        shutil.rmtree(folder.parent / "begun", ignore_errors=True)
        with pytest.raises(CheckpointError) as refused:
            command()
        assert refused.value.exit_code == 6, name
