"""Updates that rounding loses in runs of mptrain: at looks, in events, and in the modes that lose none."""

from __future__ import annotations

import pytest
import torch

from mptrain.cli.main import main
from mptrain.engine.histograms import FrozenWeights
from mptrain.numerics.rounding import digest_of_bits
from mptrain.system.records import EventRecord, HistogramRecord
from tests.engine.test_histograms import looked_at
from tests.small_runs import TINY, Kept, loop_of

SLOW = ("optimizer=adamw", "optimizer.lr=1e-4", "schedule=constant")


def sums(before, update, after):
    moving = update != 0
    same = moving & (before == after)
    size = update.abs().double()
    return [
        int(moving.sum()), int(same.sum()), float(size.sum()), float(size[same].sum()),
        float(((after.double() - before.double()) * update.sign()).sum()),
    ]  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16_pure", "bf16_pure", "bf16_stochastic", "bf16_kahan", "bf16"])
def test_a_look_has_what_rounding_did_or_would_have_done_to_the_updates(precision):
    parts, record, before, *_ = looked_at(*SLOW, f"precision={precision}")
    masters = parts.learners[0].weights.masters
    stored = masters.stored()
    assert bool(stored) == (precision in ("fp16_pure", "bf16_pure", "bf16_stochastic"))
    for name, work in masters.working().items():
        old, update = before[name].float(), work - before[name].float()
        start = before[name] if name in stored else old.to(torch.bfloat16)
        end = stored[name] if name in stored else (start.float() + update).to(torch.bfloat16)
        assert record.lost[name] == pytest.approx(sums(start.float(), update, end.float()), rel=1e-5)
    updates, lost, size, _, moved = (sum(column) for column in zip(*record.lost.values(), strict=True))
    assert lost > 0.15 * updates
    if precision == "bf16_stochastic":
        assert moved == pytest.approx(size, rel=0.1)
    if precision == "bf16_pure":
        assert moved < 0.8 * size


def test_updates_in_place_of_a_rule_of_ours_are_counted_and_their_magnitude_is_not_known():
    _, record, *_ = looked_at(*SLOW, "precision=bf16_pure", "precision.optimizer_state=parameters")
    for name, (updates, lost, *magnitudes) in record.lost.items():
        assert (updates, lost) == record.unchanged[name]
        assert magnitudes == [0, 0, 0]
    assert sum(lost for _, lost, *_ in record.lost.values()) > 0


def events_of(folder, *words, kind="frozen"):
    kept = Kept()
    loop_of(
        folder, *TINY, "train.max_steps=6", "diagnostics=histograms", "diagnostics.every=2", *words, kept=kept
    ).run()
    assert kept.of(HistogramRecord)
    return [event for event in kept.of(EventRecord) if event.kind == kind]


@pytest.mark.parametrize(
    "optimizer",
    [("optimizer=adamw",), ("optimizer=torch", "optimizer.name=NAdam", "optimizer.lr=1e-3")],
)
def test_moments_in_bf16_that_cannot_fall_are_named_once(tmp_path, optimizer):
    words = (*optimizer, "precision=bf16_pure")
    (event,) = events_of(tmp_path / "half", *words, "precision.optimizer_state=parameters", kind="state_rounding")
    assert event.fields == {"learner": "main", "state": "exp_avg_sq", "dtype": "bfloat16", "keeps": 0.999}
    assert event.step == 1
    assert events_of(tmp_path / "full", *words, kind="state_rounding") == []


def test_weights_that_stand_still_between_looks_are_named_once_in_module_order(tmp_path):
    words = ("optimizer=adamw", "optimizer.lr=1e-8", "schedule=constant")
    (event,) = events_of(tmp_path / "pure", *words, "precision=bf16_pure")
    names = event.fields["parameters"]
    assert event.step == 2
    assert event.fields["count"] == len(names) > 0
    order = [name for name, _ in loop_of(tmp_path / "order", *TINY).parts.model.named_parameters()]
    assert names == [name for name in order if name in names]
    for other in ("bf16", "bf16_kahan", "fp32", "amp_bf16"):
        assert events_of(tmp_path / other, *words, f"precision={other}") == []
    assert events_of(tmp_path / "still", "optimizer.lr=0", "precision=bf16_pure") == []
    assert events_of(tmp_path / "moves", "optimizer.lr=0.1", "precision=bf16_pure") == []


def test_nothing_stands_still_that_is_rounded_at_random(tmp_path):
    words = ("optimizer=adamw", "optimizer.lr=1e-8", "schedule=constant")
    assert events_of(tmp_path, *words, "precision=bf16_stochastic") == []


def test_a_name_is_said_once_and_only_of_weights_seen_at_both_looks():
    frozen = FrozenWeights()
    assert frozen.compare({"a": 1, "b": 2}) == []
    assert frozen.compare({"a": 1, "b": 3}) == ["a"]
    assert frozen.compare({"a": 1, "b": 3}) == ["b"]
    assert frozen.compare({"a": 1}) == []
    assert frozen.compare({"a": 1, "c": 1}) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (300, 300), (0,)])
def test_a_digest_changes_with_any_element(dtype, shape):
    values = torch.ones(shape, dtype=dtype)
    digest = int(digest_of_bits(values))
    assert int(digest_of_bits(values.clone())) == digest
    for at in range(0, values.numel(), 997):
        changed = values.clone()
        changed.view(-1)[at] = 1.0078125
        assert int(digest_of_bits(changed)) != digest
    if values.numel() > 1:
        assert int(digest_of_bits(values * 1.0078125)) != digest  # all alike, as norm weights move
        two = values.clone().view(-1)
        two[0], two[1] = 2.0, 0.5
        swapped = two.clone()
        swapped[0], swapped[1] = 0.5, 2.0
        assert int(digest_of_bits(two)) != int(digest_of_bits(swapped))


@pytest.mark.parametrize(("precision", "is_said"), [("bf16_pure", True), ("bf16", False), ("bf16_stochastic", False)])
def test_a_run_says_at_its_start_what_its_weights_cannot_follow(tmp_path, monkeypatch, capsys, precision, is_said):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [*TINY, "optimizer=adamw", "optimizer.lr=1e-6", f"precision={precision}", "train.max_steps=2", "run.name=a"]
        )
        == 0
    )
    said = capsys.readouterr()
    assert ("no master copy: at peak lr 1e-06" in said.out + said.err) is is_said
    events = (tmp_path / "outputs" / "a" / "events.jsonl").read_text()
    assert ('"no_master_weights"' in events) is is_said
