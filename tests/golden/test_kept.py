"""Kept records depend on the numbers of a run only."""

from __future__ import annotations

import json

from tests.golden import kept


def run_folder(root, monkeypatch, *, seconds=0.5, memory=1000, loss=0.25, events=(0, 1), generator="1", exponent=3):
    monkeypatch.setattr(kept, "state_of", lambda run: {".model.weight": "abc", ".random.python.1.0": generator})
    root.mkdir()
    overflows = [{"event": "overflow", "step": 2}, {"event": "evaluation", "step": 2, "message": f"took {seconds} s"}]
    (root / "steps.jsonl").write_text(json.dumps({"learner": "main", "step": 1, "loss": loss}) + "\n")
    (root / "events.jsonl").write_text("".join(json.dumps(overflows[number]) + "\n" for number in events))
    (root / "epochs.csv").write_text(f"learner,epoch,train_loss,seconds,terms_per_second\nmain,1,{loss},{seconds},9\n")
    (root / "summary.json").write_text(json.dumps({"metric": 0.5, "peak_memory": memory, "train_seconds": seconds}))
    (root / "data.json").write_text(json.dumps({"name": "digits", "labels": ["0", "1"]}))
    tensors = {"weights": {"0.weight": {"dtype": "float16", "counts": [exponent]}}}
    (root / "histograms.jsonl").write_text(json.dumps({"learner": "main", "step": 1, "tensors": tensors}) + "\n")
    (root / "samples").mkdir()
    (root / "samples" / "captions.json").write_text(f"{seconds}")
    (root / "samples" / "faces-000001.png").write_bytes(b"picture")
    return kept.kept_of(root)


def test_clock_memory_and_the_order_of_reading_leave_no_trace(tmp_path, monkeypatch):
    one = run_folder(tmp_path / "one", monkeypatch)
    other = run_folder(tmp_path / "other", monkeypatch, seconds=7.25, memory=2000, events=(1, 0))
    assert kept.text_of(one) == kept.text_of(other)
    assert json.loads(kept.text_of(one)) == one
    assert one["epochs"] == [{"learner": "main", "epoch": "1", "train_loss": "0.25"}]
    assert (one["summary"], list(one["samples"])) == ({"metric": 0.5}, ["faces-000001.png"])


def test_a_name_of_a_tensor_leaves_none_in_histograms_and_a_dtype_or_a_kind_of_number_does(tmp_path):
    def digest(name="0.weight", dtype="float16", kind="inf"):
        tensors = {"weights": {name: {"dtype": dtype, "largest": None}}}
        nonfinite = {f"tensors.weights.{name}.largest": kind}
        line = {"learner": "main", "step": 1, "tensors": tensors, "nonfinite": nonfinite}
        (tmp_path / "histograms.jsonl").write_text(json.dumps(line) + "\n")
        return kept._histograms(tmp_path / "histograms.jsonl")

    assert digest(name="first.weight") == digest()
    assert digest(dtype="bfloat16") != digest()
    assert digest(kind="nan") != digest()


def test_a_loss_an_exponent_or_a_generator_does(tmp_path, monkeypatch):
    one = run_folder(tmp_path / "one", monkeypatch)
    for part, changed in {
        "steps": {"loss": 0.26}, "histograms": {"exponent": 4}, "state": {"generator": "2"}, "events": {"events": (0,)}
    }.items():  # fmt: skip
        other = run_folder(tmp_path / part, monkeypatch, **changed)
        assert other[part] != one[part], part
