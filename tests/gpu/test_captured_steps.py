"""Steps as CUDA graphs: the bits of launched ones, few launches, no waiting, and a reason where a model cannot be captured."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

from mptrain.engine.ring import Ring
from mptrain.engine.step_runner import WARM_UP, StepRunner, capture_on
from mptrain.system.records import EventRecord
from tests.small_runs import TINY, Kept, loop_of, parts_of, steps_of, whole_and_resumed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]

GAN = ("model=dcgan", "dataset=synthetic", "dataset.image_size=16", "dataset.train_samples=96", "train.batch_size=16",
       "train.epochs=2", "precision=amp_dynamic", "checkpoint.every_epochs=null")  # fmt: skip
RECURRENT = ("model=char_lstm", "model.layers=2", "model.dropout=0.2", "train.max_steps=8", "train.batch_size=4",
             "precision=amp_dynamic", "checkpoint.every_epochs=null")  # fmt: skip
MODES = ["fp32", "amp_dynamic", "fp16_dynamic", "fp16_static", "fp16_pure", "bf16"]


def trained(tmp_path, *words):
    kept = Kept()
    loop = loop_of(tmp_path, *words, "device=cuda", kept=kept)
    loop.run()
    warnings = [event.fields["message"] for event in kept.of(EventRecord) if event.kind == "warning"]
    return loop, [text for text in warnings if "captured" in text]


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "words",
    [
        TINY,
        (*TINY, "train.accumulate=2", "train.clip_norm=0.5", "train.ema_decay=0.9"),
        (*TINY, "model=resnet18", "train.epochs=1"),
        (*TINY, "scaler=dynamic", "scaler.init_scale=1e8", "scaler.max_scale=null", "scaler.growth_interval=3"),
    ],
    ids=["mlp", "accumulated", "resnet18", "overflows"],
)
def test_a_graph_trains_bit_for_bit_like_an_eager_step(tmp_path, words, optimizer, precision, deterministic):
    """Where every operator is deterministic; else within the rounding of sums in another order."""
    chosen = (*words, f"precision={precision}", f"optimizer={optimizer}")
    eager, _ = trained(tmp_path / "eager", *chosen)
    graph, refusals = trained(tmp_path / "graph", *chosen, "train.engine=graph")
    assert not refusals
    assert graph._runner._graphs._graphs
    if deterministic:
        for one, other in zip(steps_of(eager), steps_of(graph), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=2e-2), str(deterministic[0].message)
        return
    assert steps_of(eager) == steps_of(graph)
    ours = graph.parts.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in eager.parts.model.state_dict().items())


@pytest.mark.parametrize(
    ("words", "graphs", "rel"),
    [
        ((*TINY, "precision=fp16_dynamic", "model.dropout=0.3"), 1, 0),
        ((*TINY, "dataset.train_samples=100", "precision=fp16_dynamic", "model.dropout=0.3", "train.epochs=6"), 2, 0),
        (GAN, 1, 1e-2),  # cuDNN's transposed convolutions add in any order
        (RECURRENT, 0, 1e-3),  # and so may its recurrent networks; dropout between their layers is not captured
    ],
    ids=["dropout", "evaluations and a short last batch", "gan", "refused"],
)
def test_a_graph_draws_what_an_eager_step_does(tmp_path, words, graphs, rel):
    eager, _ = trained(tmp_path / "eager", *words)
    graph, refusals = trained(tmp_path / "graph", *words, "train.engine=graph")
    assert bool(refusals) == (not graphs)
    assert len(graph._runner._graphs._graphs) == graphs
    if not rel:
        assert steps_of(eager) == steps_of(graph)
    for one, other in zip(steps_of(eager), steps_of(graph), strict=True):
        assert one["skipped"] == other["skipped"]
        assert one["loss"] == pytest.approx(other["loss"], rel=rel)


def test_an_interrupted_run_of_graphs_goes_on_like_an_undisturbed_one(tmp_path):
    words = (*TINY, "precision=amp_dynamic", "model.dropout=0.3", "train.epochs=4", "train.engine=graph", "device=cuda")
    whole, resumed = whole_and_resumed(tmp_path, *words, after=11)
    assert steps_of(resumed) == steps_of(whole)
    ours = resumed.parts.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in whole.parts.model.state_dict().items())


def steps_with(*words):
    parts, _ = parts_of(*TINY, "device=cuda", "train.epochs=50", *words)
    parts.model.train()
    rings = [Ring(256, len(learner.weights.names), parts.device) for learner in parts.learners]
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    return parts, StepRunner(parts, rings, capture_on(parts.device)), rings, batch


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_a_captured_step_waits_for_nothing_and_is_a_handful_of_launches(precision, no_waiting):
    from torch.profiler import ProfilerActivity, profile

    _, steps, rings, batch = steps_with(f"precision={precision}", "model=resnet18")
    for _ in range(WARM_UP + 2):
        steps.run(batch, [None])
    assert steps._graphs._graphs
    torch.cuda.synchronize()
    with no_waiting():
        steps.run(batch, [None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's own
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                steps.run(batch, [None])
            torch.cuda.synchronize()
    calls = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
    launched = sum(event.count for event in seen.key_averages() if event.key.startswith(calls)) / 10
    assert launched <= 6
    assert len(rings[0].take(wait=True)) == WARM_UP + 13


class Asking(nn.Module):
    """Reads a value on the host, which no graph can."""

    def __init__(self, num_classes, **facts):
        super().__init__()
        self.last = nn.Linear(64, num_classes)

    def forward(self, images):
        flat = images.flatten(1)
        return self.last(flat) if flat.abs().max().item() >= 0 else self.last(-flat)


def test_a_model_that_reads_on_the_host_is_refused_with_a_reason_and_trains_on(tmp_path, monkeypatch):
    import mptrain.run.build.parts

    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda config, dataset: Asking(**dataset.facts()))
    loop, refusals = trained(tmp_path, *TINY, "precision=fp32", "train.engine=graph")
    (refusal,) = refusals
    assert "runs without a CUDA graph" in refusal
    assert len(steps_of(loop)) == loop.planned
    assert all(value.isfinite().all() for value in loop.parts.full_precision().values())


class AskingInside(Asking):
    """Reads a value on the host only while it is captured, as no step before can show."""

    def forward(self, images):
        flat = nn.functional.dropout(images.flatten(1), 0.2)
        if torch.cuda.is_current_stream_capturing():
            flat.abs().max().item()
        return self.last(flat)


def test_a_capture_that_fails_leaves_stream_memory_and_random_numbers_as_they_were(tmp_path, monkeypatch):
    import mptrain.run.build.parts

    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda config, dataset: AskingInside(**dataset.facts()))
    eager, _ = trained(tmp_path / "eager", *TINY, "precision=fp16_dynamic")
    stream = torch.cuda.current_stream()
    graph, refusals = trained(tmp_path / "graph", *TINY, "precision=fp16_dynamic", "train.engine=graph")
    (refusal,) = refusals
    assert "captur" in refusal
    assert torch.cuda.current_stream() == stream
    assert steps_of(eager) == steps_of(graph)
    del eager, graph
    gc.collect()
    torch.cuda.empty_cache()  # which refuses where a capture still counts as under way
    capture = capture_on(torch.device("cuda", torch.cuda.current_device()))
    given, kept = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    again = capture(lambda: kept.add_(given))
    again()
    assert kept.tolist() == [1.0] * 4
