from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.engine.fingerprints import (
    VALUES,
    digest_of_batch,
    digest_of_code,
    digest_of_order,
    digest_of_samples,
    digest_of_weights,
    sample_digests,
)
from mptrain.precision.support import unaligned_in_words, unaligned_share
from mptrain.run.build.parts import build
from mptrain.workloads.base.batch import Batch
from tests.small_runs import TINY, Kept, continue_loop, interrupt_after, loop_of, run_in_process


def origin_of(*words):
    return build(compose([*TINY, *words]))[0].origin.initial_weights


def test_the_same_seed_draws_the_same_weights_in_every_precision_mode():
    modes = ("fp32", "amp_dynamic", "fp16_static", "fp16_pure", "bf16")
    digests = {origin_of(f"precision={mode}", "seed=5") for mode in modes}
    assert len(digests) == 1
    assert len(digests.pop()) == 64
    assert origin_of("seed=6") != origin_of("seed=5")


def test_what_training_draws_does_not_depend_on_what_the_model_drew():
    draws = []
    for hidden in ("[8]", "[8,8]"):
        build(compose([*TINY, "model=mlp", f"model.hidden={hidden}", "seed=3"]))
        draws.append(torch.rand(4))
    assert torch.equal(*draws)


def test_one_bit_of_one_weight_changes_the_digest():
    model = nn.Linear(3, 2)
    before = digest_of_weights(model)
    assert digest_of_weights(model) == before
    with torch.no_grad():
        model.bias[1] = torch.nextafter(model.bias[1], torch.tensor(9.0))
    assert digest_of_weights(model) != before


def test_values_of_other_names_shapes_or_dtypes_have_other_digests():
    zeros = torch.zeros(4)
    batch = Batch(zeros, zeros)
    assert digest_of_batch(batch) == digest_of_batch(Batch(zeros.clone(), zeros.clone()))
    others = [Batch(zeros.view(2, 2), zeros), Batch(zeros, zeros.long()), Batch(zeros, zeros, extras={"lane": zeros})]
    assert len({digest_of_batch(each) for each in [batch, *others]}) == 4
    assert digest_of_order(torch.tensor([1, 2])) != digest_of_order(torch.tensor([2, 1]))


def orders(kept: Kept) -> list[dict]:
    return [record.fields for record in kept.records if getattr(record, "kind", "") == "data_order"]


def test_every_epoch_puts_its_order_and_first_batch_on_record(tmp_path):
    epochs = {}
    for mode in ("fp32", "fp16_dynamic"):
        kept = Kept()
        loop_of(tmp_path / mode, *TINY, f"precision={mode}", "train.epochs=2", kept=kept).run()
        epochs[mode] = orders(kept)
    first, second = epochs["fp32"]
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert first["order"] != second["order"]
    assert first["first_batch"] != second["first_batch"]
    assert epochs["fp32"] == epochs["fp16_dynamic"]


def test_an_epoch_that_was_interrupted_is_on_record_once(tmp_path):
    words = (*TINY, "train.epochs=2")
    whole, first, second = Kept(), Kept(), Kept()
    loop_of(tmp_path / "whole", *words, kept=whole).run()
    loop = loop_of(tmp_path / "cut", *words, kept=first)
    interrupt_after(loop, 2)
    continue_loop(loop, *words, kept=second).run()
    assert orders(first) + orders(second) == orders(whole)


def test_the_summary_says_what_a_comparison_needs(tmp_path):
    summary = loop_of(tmp_path, *TINY, "train.epochs=1", "precision=fp32").run()
    json.dumps(summary)
    assert summary["higher_is_better"] is True
    assert 0 <= summary["data_wait"] <= 1
    assert summary["memory_before"] > 0
    assert summary["peak_memory"] > 0
    assert summary["facts"]["upcast"] is False
    assert summary["facts"]["parameters"] > 100
    assert summary["steady_terms_per_second"] is None  # a run shorter than the warm-up has no steady speed


def test_dimensions_that_tensor_cores_do_not_take_are_counted_by_their_elements():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 10), nn.BatchNorm1d(10))
    assert unaligned_share(model) == pytest.approx(160 / (128 + 160))
    assert unaligned_share(nn.BatchNorm1d(3)) == 0
    assert "56 % of the weights" in unaligned_in_words(model)
    assert "1.weight (10x16)" in unaligned_in_words(model)
    assert unaligned_in_words(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(64, 64))) == ""  # colours are few


def test_a_run_says_how_it_began(tmp_path):
    finished = run_in_process(*TINY, "run.name=r", "train.epochs=1", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    lines = (tmp_path / "outputs/r/events.jsonl").read_text().splitlines()
    start, *others = (json.loads(line) for line in lines)
    assert start["event"] == "start"
    assert start["initial_weights"] == origin_of()
    assert [(one["step"], one["epoch"]) for one in others if one["event"] == "data_order"] == [(0, 0)]


class Own(nn.Linear):
    pass


def test_code_is_known_by_source_and_structure():
    whole = digest_of_code(nn.Sequential(Own(2, 3), nn.Dropout(0.1)))
    assert len(whole) == 64
    assert digest_of_code(nn.Sequential(Own(2, 3), nn.Dropout(0.1))) == whole
    others = [
        nn.Sequential(Own(2, 4), nn.Dropout(0.1)),
        nn.Sequential(Own(2, 3), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1)),
    ]
    assert len({whole, *map(digest_of_code, others)}) == 4
    typed = {"nn": nn, "__name__": "__main__"}
    exec("class Own(nn.Linear):\n    def forward(self, x): return x", typed)
    assert digest_of_code(nn.Sequential(typed["Own"](2, 3))) == ""  # typed at a prompt
    noted = nn.Sequential(Own(2, 3), nn.Dropout(0.1))
    noted[0].scale = 2.0
    assert digest_of_code(noted) != whole
    noted.eval()
    noted[0].scale = 1.0
    again = nn.Sequential(Own(2, 3), nn.Dropout(0.1))
    again[0].scale = 1.0
    assert digest_of_code(noted) == digest_of_code(again)


def digest_of(*batches):
    return digest_of_samples(digest for batch in batches for digest in sample_digests(batch))


def test_evaluated_data_are_known_by_every_sample_and_every_target():
    pictures, classes = torch.rand(5, 3, 40, 40), torch.arange(5)
    before = digest_of(Batch(pictures, classes))
    assert digest_of(Batch(pictures, classes)) == before
    others = [Batch(pictures, classes.flip(0)), Batch(pictures[:4], classes[:4]), Batch(pictures.half(), classes)]
    for number in range(5):
        replaced = pictures.clone()
        replaced[number] = torch.rand(3, 40, 40)
        others.append(Batch(replaced, classes))
    assert before not in {digest_of(other) for other in others}
    assert digest_of(Batch(pictures[:2], classes[:2]), Batch(pictures[2:], classes[2:])) == before  # of any batches


def test_a_text_counts_to_its_last_token():
    tokens = torch.zeros(2, VALUES, dtype=torch.int64)
    before = digest_of(Batch(tokens, tokens))
    tokens[1, -1] = 1
    assert digest_of(Batch(tokens, tokens)) != before
    assert digest_of(Batch(torch.zeros(2, 0), tokens)) != before  # no column is no error
