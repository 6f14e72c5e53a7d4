"""A watched loop trains as it would, and its record names what was skipped, not finite, or moved."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

import mptrain
from benchmarks.cases.audit import as_on_a_device, counting
from mptrain.engine.options import LogOptions
from mptrain.integrations.watch import Watch
from mptrain.runlog import read_run
from mptrain.system.errors import ConfigError, StorageError
from mptrain.system.records import EventRecord, ScaleRecord
from tests.integrations.watched_training import BEHIND, FAULTS, STEPS, Network, names, overflows, train


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"clip": False},
        {"optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True)},
        {"optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True), "clip": False},
        {"optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True)},
        {"wrap": lambda model: torch.compile(model, backend="aot_eager")},
        pytest.param({"wrap": torch.compile}, marks=pytest.mark.slow),  # compiles for 40 s
        {"network": lambda: Network(reentrant=True)},
        {"network": lambda: Network(reentrant=False)},
    ],
    ids=["clipped", "plain", "fused-clipped", "fused", "foreach", "compiled", "inductor", "reentrant", "checkpointed"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler of torch 2.11
def test_a_scaled_loop_is_unchanged_and_names_what_was_skipped(how):
    losses, weights, _, _ = train(False, **how)
    same_losses, same_weights, events, watch = train(True, **how)
    assert losses == same_losses
    assert all(map(torch.equal, weights, same_weights))
    found = overflows(events)
    assert [*found] == [*FAULTS]
    for record in found.values():
        assert (names(record), record.skipped, record.loss) == (BEHIND, True, "finite")
        assert record.boundary == ("2", "4")
    assert [one.step for one in events if isinstance(one, EventRecord)] == [*FAULTS]  # the schedule moved all the same
    assert [(one.step, one.from_scale, one.to_scale) for one in events if isinstance(one, ScaleRecord)] == [
        (4, 1024, 512),
        (9, 512, 256),
    ]
    assert watch.last["step"] == STEPS
    assert watch.last["loss_scale"] == 256


def test_accumulated_micro_batches_are_one_update():
    _, _, events, watch = train(True, micro=3, network=lambda: Network(faults=(5,)))
    assert {step: names(one) for step, one in overflows(events).items()} == {2: BEHIND}
    assert watch.last["step"] == STEPS


def test_without_a_scaler_clipping_does_not_hide_the_names():
    losses, _, _, _ = train(False, scaled=False)
    same, _, events, _ = train(True, scaled=False)
    assert torch.tensor(losses).nan_to_num(7).equal(torch.tensor(same).nan_to_num(7))
    first, *others = overflows(events).values()
    assert (first.step, names(first), first.skipped) == (4, BEHIND, False)
    assert all(one.loss == "nan" and one.count == 6 for one in others)


def test_the_record_has_loss_norm_rate_and_scale_of_each_update(tmp_path):
    losses, _, _, _ = train(True, folder=tmp_path / "run", clip=False)
    run = read_run(tmp_path / "run")
    steps = [*run.steps()]
    assert [one.step for one in steps] == [*range(1, STEPS + 1)]
    assert [one.loss for one in steps] == pytest.approx(losses)
    assert [one.skipped for one in steps] == [step in FAULTS for step in range(1, STEPS + 1)]
    assert [one.updates for one in steps][-1] == STEPS - 2
    assert [one.lr for one in steps] == pytest.approx([0.1 * 0.9**at for at in range(STEPS)])
    assert [one.loss_scale for one in steps] == [1024.0] * 4 + [512.0] * 5 + [256.0] * 3
    torch.manual_seed(0)
    model = Network()
    nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])
    assert steps[0].grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert (run.state.status, run.state.parts["optimizer"]) == ("done", "SGD(lr=0.1)")
    assert [one.step for one in run.histograms()] == [1, 5, 10]
    sampled = next(run.histograms())
    assert set(sampled.tensors["weight_gradients"]) == {
        f"{at}.{kind}" for at in (0, 2, 4) for kind in ("weight", "bias")
    }
    assert sampled.tensors["activations"]["0"].dtype == "float32"
    assert run.summary["learners"]["main"]["skipped"] == 2


@pytest.mark.parametrize("every", [0, 2])
def test_no_update_reads_the_device(every):
    counts = []
    for watched in (False, True):
        model = Network(faults=(3,))
        own, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
        with as_on_a_device(), contextlib.ExitStack() as stack:
            if watched:
                watch = Watch(model, own, scaler, every=every, log=LogOptions(ring=100, seconds=1e9))
                stack.callback(watch.close)
            with counting() as reads:
                for _ in range(5):
                    own.zero_grad()
                    scaler.scale(model(torch.randn(4, 8)).sum()).backward()
                    scaler.step(own)
                    scaler.update()
            counts.append(reads.count)
    assert counts[0] == counts[1]
    assert (watch.last["step"], watch.last["skipped"]) == (5, False)


def test_a_loop_with_another_default_device_is_watched_where_its_tensors_are():
    model, x = Network(faults=(2,)), torch.randn(4, 8)
    own, seen = torch.optim.SGD(model.parameters(), 0.1), []
    with torch.device("meta"), mptrain.watch(model, own, every=1) as watch:
        watch.on_event(seen.append)
        for _ in range(2):
            own.zero_grad()
            model(x).square().mean().backward()
            own.step()
    assert watch.last["step"] == 2
    assert [names(one) for one in overflows(seen).values()] == [BEHIND]


def test_parameters_on_two_devices_are_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match="the parameters of an optimizer are on cpu and meta"):
        mptrain.watch(model, torch.optim.SGD(model.parameters(), 0.1))


def test_an_unknown_loss_is_no_loss_that_is_not_finite(tmp_path):
    model = Network(faults=(2,))
    own, seen = torch.optim.SGD(model.parameters(), 0.1), []
    with mptrain.watch(model, own, dir=tmp_path / "run") as watch:
        watch.on_event(seen.append)
        for _ in range(4):
            own.zero_grad()
            out = model(torch.randn(4, 8))
            out.backward(torch.ones_like(out))
            own.step()
    first, *_ = overflows(seen).values()
    assert (first.step, first.loss, first.phase) == (2, "unknown", "calibrating")
    assert all(math.isnan(one.loss) for one in read_run(tmp_path / "run").steps())


def test_an_existing_folder_and_a_scaler_watched_twice_are_refused(tmp_path):
    model = Network()
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    with pytest.raises(StorageError, match="exists"):
        mptrain.watch(model, own, dir=tmp_path)
    with mptrain.watch(model, own, scaler), pytest.raises(RuntimeError, match="watched already"):
        mptrain.watch(model, own, scaler, dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_what_is_flushed_is_in_the_files(tmp_path):
    model = nn.Linear(3, 1)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, dir=tmp_path / "run") as watch:
        for _ in range(5):
            own.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            own.step()
        watch.flush()
        assert len((tmp_path / "run/steps.jsonl").read_text().splitlines()) == 5


def test_an_evaluation_is_on_record_after_the_update_that_it_follows(tmp_path):
    model = Network(faults=())
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, dir=tmp_path / "run") as watch:
        for step in range(1, 5):
            own.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            own.step()
            if step % 2 == 0:
                watch.evaluated({"loss": float(step)})
    found = [event for event in read_run(tmp_path / "run").events() if event["event"] == "evaluation"]
    assert [event["step"] for event in found] == [2, 4]
