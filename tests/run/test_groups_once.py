"""The parameter groups of a run are on record once, as often as its start is."""

from __future__ import annotations

import json
from pathlib import Path

from small_runs import TINY

from mptrain.cli.main import main


def groups(run):
    events = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "groups"]


def test_a_resumed_run_has_its_groups_once_and_again_if_they_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "optimizer.groups=[{match: '*bias', lr_factor: 0.5}]", "run.name=a", "checkpoint.every_steps=2"]
    assert main([*words, "train.max_steps=2"]) == 0
    before = groups("outputs/a")
    assert len(before) == 1
    assert main(["resume", "outputs/a", "train.max_steps=4"]) == 0
    assert groups("outputs/a") == before
    assert main(["resume", "outputs/a", "train.max_steps=6", "optimizer.groups.0.lr_factor=0.25"]) == 0
    after = groups("outputs/a")
    assert len(after) == 2
    assert after[0] == before[0]
    assert "0.25" in json.dumps(after[1])
