"""Killing the writer of checkpoints: at any moment, a valid checkpoint loads afterwards."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.process

COMMON = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from mptrain.runlog.checkpoints import CheckpointStore

torch.set_num_threads(1)

def save(store, step, value=0):
    state = {"step": step, "value": value, "weights": torch.full((100_000,), float(step))}
    store.save(state, step=step, records={"steps.jsonl": step}, metric=-abs(step - 3), config_digest="d")

def check(store):
    loaded = store.load_latest()
    assert loaded is not None, "no checkpoint"
    step = loaded.state["step"]
    assert loaded.skipped == [], loaded.skipped
    assert loaded.manifest.step == step and loaded.manifest.records == {"steps.jsonl": step}
    assert torch.equal(loaded.state["weights"], torch.full((100_000,), float(step)))
    return loaded.state
"""

RANDOM = (
    COMMON
    + """
store = CheckpointStore(Path(sys.argv[1]), keep=2)
chance = random.Random(int(sys.argv[2]))
save(store, 1)
step, rounds, amid = 1, 0, 0
while rounds < 10 or (amid < 3 and rounds < 100):
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            save(store, step)
    time.sleep(chance.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    manifests = {path.stem for path in store.folder.glob("*.json")}
    found = list(store.folder.iterdir())
    amid += any(p.suffix == ".tmp" or (p.suffix == ".pt" and p.stem not in manifests) for p in found)
    found = check(store)["step"]
    assert found >= step, (found, step)
    step, rounds = found, rounds + 1
assert amid >= 3, f"only {amid} kills fell into a save"
assert step > 1, "nothing was saved"
save(store, step + 1)
assert not list(store.folder.glob("*.tmp"))
"""
)

EVERY_OPERATION = (
    COMMON
    + """
# The child ends without any clean-up just before its n-th change of the folder, for every n.
def one_save_with_a_kill(folder, n, first, then):
    store = CheckpointStore(folder, keep=1)
    save(store, first, value=1)
    child = os.fork()
    if child == 0:
        left = [n]
        def hook(event, arguments):
            if event in ("open", "os.rename", "os.remove") and str(folder) in str(arguments[0]):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
        sys.addaudithook(hook)
        save(store, then, value=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    state = check(store)
    assert (state["step"], state["value"]) in {(first, 1), (then, 2)}, state
    save(store, then, value=3)
    assert check(store)["value"] == 3
    assert not list(folder.glob("*.tmp"))
    return os.waitstatus_to_exitcode(status), state["value"]

seen = []
n = 0
while True:
    code, value = one_save_with_a_kill(Path(sys.argv[1]) / str(n), n, 5, int(sys.argv[2]))
    seen.append(value)
    if code == 0:
        break
    assert code == 9, code
    n += 1
assert n >= 8, f"only {n} operations were seen"
assert seen == sorted(seen) and {1, 2} == set(seen), seen
"""
)


def test_sigkill_at_random_moments_leaves_a_valid_checkpoint(tmp_path, succeed):
    succeed(RANDOM, tmp_path, 0)


@pytest.mark.parametrize("then", [6, 5], ids=["the next step", "the same step again"])
def test_death_at_each_operation_leaves_the_old_or_the_new(tmp_path, succeed, then):
    succeed(EVERY_OPERATION, tmp_path, then)
