"""A watched loop trains as it would, and its record names what was skipped, not finite, or moved."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import mptrain
from benchmarks.cases.audit import as_on_a_device, counting
from mptrain.engine.options import LogOptions
from mptrain.integrations.watch import Watch
from mptrain.runlog import read_run
from mptrain.system.errors import ConfigError, StorageError, UsageError
from mptrain.system.records import EventRecord, OverflowRecord, ScaleRecord

#: Steps from 1 whose backward pass is not finite below the third layer.
FAULTS = (4, 9)
BEHIND = ["0.weight", "0.bias", "2.weight", "2.bias"]
STEPS = 12


class Network(nn.Sequential):
    """Three layers, whose gradients become infinite between the second and the third in some steps."""

    def __init__(self, *, reentrant=None, faults=FAULTS):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.reentrant, self.faults, self.calls = reentrant, faults, 0

    def first(self, x):
        return self[2](self[1](self[0](x)))

    def forward(self, x):
        self.calls += 1
        if self.reentrant is None:
            h = self.first(x)
        else:
            h = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        if self.calls in self.faults:
            h.register_hook(lambda gradient: gradient * torch.inf)
        return self[4](self[3](h))


def train(
    watched,
    *,
    network=Network,
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    scaled=True,
    clip=True,
    micro=1,
    wrap=lambda model: model,
    every=5,
    folder=None,
):
    """Train for `STEPS` updates, and return losses, weights, events and the watch."""
    torch.manual_seed(0)
    model = wrap(network())
    own = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0) if scaled else None
    watch, events, losses = None, [], []
    if watched:
        watch = mptrain.watch(model, own, scaler, every=every, dir=folder)
        watch.on_event(events.append)
    for _ in range(STEPS):
        own.zero_grad()
        for _ in range(micro):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            loss = nn.functional.cross_entropy(model(x), y) / micro
            (scaler.scale(loss) if scaler else loss).backward()
            losses.append(loss.item())
        if scaler:
            if clip:
                scaler.unscale_(own)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(own)
            scaler.update()
        else:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            own.step()
        schedule.step()
    if watch:
        watch.close()
    return losses, [one.detach().clone() for one in model.parameters()], events, watch


def overflows(events):
    return {one.step: one for one in events if isinstance(one, OverflowRecord)}


def names(record):
    return [name for name, _ in record.tensors]


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


def test_a_full_disk_ends_the_records_and_not_the_training(tmp_path, monkeypatch):
    losses, weights, _, _ = train(False)

    def full(self, record):
        raise StorageError("no space left on device", "free some")

    monkeypatch.setattr("mptrain.runlog.record_writer.RecordWriter.take", full)
    with pytest.warns(UserWarning, match="mptrain.watch writes no more records: no space left on device") as said:
        same, same_weights, events, watch = train(True, folder=tmp_path / "run")
    assert len(said) == 1
    assert losses == same
    assert all(map(torch.equal, weights, same_weights))
    assert [*overflows(events)] == [*FAULTS]
    assert watch.last["step"] == STEPS


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


def test_of_a_model_that_is_compiled_elsewhere_activations_are_left_out(tmp_path):
    model, compiles = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, every=2, dir=tmp_path / "run"):
        for _ in range(5):
            own.zero_grad()
            compiled(torch.randn(4, 8)).square().mean().backward()
            own.step()
    assert all(not one.tensors.get("activations") for one in read_run(tmp_path / "run").histograms())
    assert len(compiles) <= 2  # with and without hooks


def test_the_activations_of_an_optimizer_are_those_of_its_own_modules(tmp_path):
    models = {"one": Network(faults=()), "other": Network(faults=())}
    own = [torch.optim.SGD(model.parameters(), 0.1) for model in models.values()]
    with mptrain.watch(models, own, every=1, dir=tmp_path / "run"):
        both = sum(model(torch.randn(4, 8)).square().mean() for model in models.values())
        both.backward()
        for optimizer in own:
            optimizer.step()
    found = {one.learner: {*one.tensors["activations"]} for one in read_run(tmp_path / "run").histograms()}
    assert found == {f"optimizer{at}": {f"{name}.{layer}" for layer in range(5)} for at, name in enumerate(models)}


def test_a_wrapper_that_another_library_has_put_around_a_scaler_s_method_stays():
    original, called = torch.amp.GradScaler.update, []
    model = Network(faults=())
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    try:
        with mptrain.watch(model, own, scaler):
            inner = torch.amp.GradScaler.update
            torch.amp.GradScaler.update = lambda self, *rest: (called.append(1), inner(self, *rest))[1]
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        scaler.step(own)
        scaler.update()
        assert called == [1]
    finally:
        torch.amp.GradScaler.update = original


def test_nothing_is_left_after_close():
    hooks = torch.amp.GradScaler.update, torch.autograd.backward
    model = Network()
    own = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = {**vars(scaler)}, {**vars(own)}
    with mptrain.watch(model, own, scaler):
        pickle.loads(pickle.dumps(scaler))
        copy.deepcopy(scaler), copy.deepcopy(model)
    assert (torch.amp.GradScaler.update, torch.autograd.backward) == hooks
    assert ({**vars(scaler)}, {**vars(own)}) == before
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_copy_of_a_watched_scaler_is_not_watched():
    model = Network(faults=())
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch(model, own, scaler) as watch:
        another, other = Network(faults=()), copy.deepcopy(scaler)
        steps = torch.optim.SGD(another.parameters(), 0.1)
        other.scale(another(torch.randn(2, 8)).sum()).backward()
        other.step(steps)
        other.update()
        watch.flush()
        assert watch.last == {}


def test_two_optimizers_of_two_models_have_a_row_each():
    one, two = Network(faults=()), Network(faults=(3,))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (one, two)]
    scaler, events = torch.amp.GradScaler("cpu", init_scale=8.0), []
    with mptrain.watch({"g": one, "d": two}, optimizers, scaler) as watch:
        watch.on_event(events.append)
        for _ in range(5):
            for model, own in zip((one, two), optimizers, strict=True):
                own.zero_grad()
                scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
                scaler.step(own)
            scaler.update()
    (found,) = overflows(events).values()
    assert (found.learner, found.step, names(found)) == ("optimizer1", 3, [f"d.{name}" for name in BEHIND])
    assert watch.last["optimizer0/step"] == watch.last["optimizer1/step"] == 5


@pytest.mark.parametrize("to_none", [True, False])
def test_the_loss_of_an_abandoned_update_is_not_added_to_the_next(to_none, tmp_path):
    model, losses = Network(faults=()), []
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        for abandoned in (True, False):
            own.zero_grad(set_to_none=to_none)
            for _ in range(2):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                losses.append(loss.item())
            if not abandoned:
                own.step()
    (step,) = read_run(tmp_path / "run").steps()
    assert step.loss == pytest.approx(sum(losses[-2:]))


def test_parameters_added_later_are_watched_from_their_first_gradient():
    model, more = Network(faults=()), nn.Linear(4, 4)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(nn.ModuleList([model, more]), own) as watch:
        for at in range(4):
            if at == 2:
                own.add_param_group({"params": more.parameters()})
            own.zero_grad()
            (more(model(torch.randn(4, 8))).sum() * (torch.inf if at == 3 else 1)).backward()
            own.step()
        watch.flush()
        assert watch.last["step"] == 4
        assert "1.weight" in watch.last["nonfinite"]


def test_lbfgs_sparse_and_unused_parameters_are_recorded():
    model = nn.ModuleDict({"table": nn.Embedding(10, 4, sparse=True), "unused": nn.Linear(2, 2)})
    own, events = torch.optim.SGD(model.parameters(), 0.1), []
    with mptrain.watch(model, own) as watch:
        watch.on_event(events.append)
        for at in range(3):
            own.zero_grad()
            (model["table"](torch.tensor([1, 1, 2])).sum() * (torch.inf if at == 1 else 1)).backward()
            own.step()
    assert {step: names(one) for step, one in overflows(events).items()} == {2: ["table.weight"]}

    model = Network(faults=())
    own = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(4, 8)

    def closure():
        own.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with mptrain.watch(model, own) as watch:
        for _ in range(2):
            own.step(closure)
    assert watch.last["step"] == 2


def test_a_backward_pass_that_fails_is_no_update_and_the_next_one_counts():
    model = Network(faults=())
    own, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 8)

    def fail(gradient):
        raise ZeroDivisionError

    with mptrain.watch(model, own) as watch:
        h = model.first(x)
        h.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model[4](h).sum().backward()
        own.zero_grad()
        model(x).sum().backward()
        own.step()
    assert (watch.last["step"], watch.last["nonfinite"]) == (1, [])


def test_an_optimizer_beside_the_scaler_is_recorded_without_a_scale():
    one, two = Network(faults=()), Network(faults=())
    scaled, plain = (torch.optim.SGD(model.parameters(), 0.1) for model in (one, two))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch([one, two], [scaled, plain], scaler) as watch:
        scaler.scale(one(torch.randn(4, 8)).sum()).backward()
        scaler.step(scaled)
        scaler.update()
        two(torch.randn(4, 8)).sum().backward()
        plain.step()
    assert (watch.last["optimizer0/loss_scale"], watch.last["optimizer1/loss_scale"]) == (8, 1)


def test_a_rate_that_is_a_tensor_is_recorded_as_it_was(tmp_path):
    model, rate = Network(faults=()), torch.tensor(0.5)
    own = torch.optim.SGD(model.parameters(), lr=rate)
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        for _ in range(3):
            own.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            own.step()
            rate *= 0.5
    assert [one.lr for one in read_run(tmp_path / "run").steps()] == [0.5, 0.25, 0.125]


def test_an_exception_in_the_loop_is_recorded_and_raised(tmp_path):
    model = Network()
    own = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError), mptrain.watch(model, own, dir=tmp_path / "run"):
        raise ZeroDivisionError("of the user")
    state = read_run(tmp_path / "run").state
    assert (state.status, state.reason) == ("failed", "ZeroDivisionError: of the user")


def test_an_existing_folder_and_a_scaler_watched_twice_are_refused(tmp_path):
    model = Network()
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    with pytest.raises(StorageError, match="exists"):
        mptrain.watch(model, own, dir=tmp_path)
    with mptrain.watch(model, own, scaler), pytest.raises(RuntimeError, match="watched already"):
        mptrain.watch(model, own, scaler, dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_tied_and_frozen_parameters_have_one_name_and_one_that_thaws_is_seen():
    model = Network(faults=())
    model[0].bias.requires_grad = False
    model.add_module("tied", nn.Linear(16, 16))
    model.tied.weight = model[2].weight
    own, events = torch.optim.SGD(model.parameters(), 0.1), []
    with mptrain.watch(model, own) as watch:
        watch.on_event(events.append)
        for step in range(1, 4):
            model[0].bias.requires_grad = step == 3
            own.zero_grad()
            loss = model[4](model.tied(model.first(torch.randn(4, 8)))).sum()
            (loss * (torch.inf if step > 1 else 1)).backward()
            own.step()
    found = {step: names(one) for step, one in overflows(events).items()}
    all_names = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias", "tied.bias"]
    assert found == {2: [name for name in all_names if name != "0.bias"], 3: all_names}


@pytest.mark.parametrize("rows", [[1], [1, 2, 2]])
def test_the_norm_of_a_sparse_gradient_is_that_of_its_dense_form(rows, tmp_path):
    model = nn.Embedding(10, 4, sparse=True)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        model(torch.tensor(rows)).square().sum().backward()
        norm = model.weight.grad.to_dense().norm().item()
        own.step()
    assert next(read_run(tmp_path / "run").steps()).grad_norm == pytest.approx(norm, rel=1e-5)


def test_backward_takes_what_it_takes_unwatched():
    model = nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own):
        loss = model(torch.ones(1, 2)).sum()
        torch.autograd.backward((one for one in [loss]), retain_graph=True)
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)], [torch.ones(())])
    assert model.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_pass_between_the_steps_of_two_optimizers_and_the_update_of_their_scaler_is_of_the_second(tmp_path):
    """As a GAN trains: the generator's pass reaches the discriminator, which has already stepped."""
    torch.manual_seed(0)
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    own = [torch.optim.SGD(model.parameters(), 0.0) for model in (one, two)]
    scaler, told = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    with mptrain.watch([one, two], own, scaler, dir=tmp_path / "run"):
        for step in range(3):
            own[1].zero_grad()
            first = two(one(torch.randn(8, 4)).detach()).square().mean()
            scaler.scale(first).backward()
            norm = nn.utils.get_total_norm([one.grad for one in two.parameters()]).item() / scaler.get_scale()
            scaler.step(own[1])
            own[0].zero_grad()
            second = two(one(torch.randn(8, 4))).mean()
            scaler.scale(second * (torch.inf if step == 1 else 1)).backward()
            scaler.step(own[0])
            scaler.update()
            told.append((first.item(), norm, second.item()))
    run = read_run(tmp_path / "run")
    of_first = [(one.loss, one.grad_norm) for one in run.steps() if one.learner == "optimizer1"]
    assert of_first == [pytest.approx((loss, norm), rel=1e-5) for loss, norm, _ in told]
    assert {event["learner"] for event in run.events() if event["event"] == "overflow"} == {"optimizer0"}
    losses = [one.loss for one in run.steps() if one.learner == "optimizer0"]
    assert losses[::2] == [pytest.approx(told[at][2], rel=1e-5) for at in (0, 2)]


def test_gradients_that_are_unscaled_but_not_stepped_are_no_update():
    model = Network(faults=())
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch(model, own, scaler) as watch:
        for step in range(4):
            own.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).sum()).backward()
            scaler.unscale_(own)
            if step % 2:
                scaler.step(own)
            scaler.update()
    assert watch.last["step"] == 2


def test_a_loop_that_unscales_and_steps_itself_is_recorded(tmp_path):
    torch.manual_seed(0)
    model = Network(faults=(3,))
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    losses, norms = [], []
    with mptrain.watch(model, own, scaler, dir=tmp_path / "run"):
        for _ in range(5):
            own.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(own)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                own.step()
                losses.append(loss.item()), norms.append(norm.item())
            scaler.update()
    found = list(read_run(tmp_path / "run").steps())
    assert [one.loss for one in found] == pytest.approx(losses, rel=1e-6)
    assert [one.grad_norm for one in found] == pytest.approx(norms, rel=1e-5)
    assert [(one.loss_scale, one.skipped, one.overflow) for one in found] == [(8.0, False, False)] * 2 + [
        (4.0, False, False)
    ] * 2


class Clipping(torch.optim.AdamW):
    """An optimizer whose step does something, and then the step of its base."""

    def step(self, closure=None):
        return super().step(closure)


class Twice(Clipping):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [Clipping, Twice])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_calls_the_step_of_its_base_is_one_update(kind, scaled):
    for base in (torch.optim.AdamW, Clipping):
        base([torch.zeros(1, requires_grad=True)])  # from here on torch hooks the steps of this class too
    model, events = Network(faults=()), []
    own = kind(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    with mptrain.watch(model, own, scaler) as watch:
        watch.on_event(events.append)
        for step in range(4):
            own.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).sum()).backward()
            if step == 1:
                with pytest.raises(ZeroDivisionError):
                    own.step(lambda: 1 / 0)
            scaler.step(own)
            scaler.update()
    assert (watch.last["step"], events) == (4, [])


def test_losses_of_accumulated_passes_that_reach_other_parameters_are_added_up(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(8, 3), "two": nn.Linear(8, 3), "trunk": nn.Linear(6, 8)})
    own, losses = torch.optim.SGD(model.parameters(), 0.01), []
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        for step in range(4):
            own.zero_grad(set_to_none=step < 2)
            losses.append(0.0)
            for head, weight in (("two", 100.0), ("one", 1.0)) if step % 2 else (("one", 1.0), ("two", 100.0)):
                loss = weight * nn.functional.cross_entropy(model[head](model["trunk"](x)), y)
                loss.backward()
                losses[-1] += loss.item()
            own.step()
    assert [one.loss for one in read_run(tmp_path / "run").steps()] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("every", [0, 2])
def test_a_parameter_that_takes_the_place_of_another_is_watched(tmp_path, every):
    model = nn.Linear(3, 2)
    own, norms = torch.optim.SGD(model.parameters(), 0.1), []
    with mptrain.watch(model, own, every=every, dir=tmp_path / "run"):
        for step in range(6):
            if step == 3:
                model.weight = nn.Parameter(torch.ones(2, 3))
                own.param_groups[0]["params"][0] = model.weight
            own.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            norms.append(nn.utils.get_total_norm([one.grad for one in model.parameters()]).item())
            own.step()
    assert [one.grad_norm for one in read_run(tmp_path / "run").steps()] == pytest.approx(norms, rel=1e-5)


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


def test_complex_gradients_count_with_both_their_parts():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model, own = nn.ParameterList([parameter]), torch.optim.SGD([parameter], 0.1)
    with mptrain.watch(model, own, every=0) as watch:
        for imaginary, overflow in ((2.0, False), (math.nan, True)):
            parameter.grad = torch.complex(torch.ones(3), torch.full((3,), imaginary))
            own.step()
            watch.flush()
            assert bool(watch.last["nonfinite"]) is overflow
            if not overflow:
                assert watch.last["grad_norm"] == pytest.approx(nn.utils.get_total_norm([parameter.grad]).item())


class Unrated(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def test_an_optimizer_without_a_rate_and_losses_told_as_numbers_are_taken(tmp_path):
    model = nn.Linear(3, 1)
    own = Unrated(model.parameters())
    with mptrain.watch(model, own, dir=tmp_path / "run") as watch:
        for loss in (0.5, torch.tensor([[2.0]])):
            model(torch.ones(2, 3)).sum().backward()
            own.step()
            watch.step(loss)
        model(torch.ones(2, 3)).sum().backward()
        own.step()
        with pytest.raises(UsageError, match=r"the loss of a step has the shape \[2\]"):
            watch.step(torch.ones(2))
    found = list(read_run(tmp_path / "run").steps())
    assert [one.loss for one in found[:2]] == [0.5, 2.0]
    assert all(math.isnan(one.lr) for one in found)


def _faked(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(torch.ones(4, 8))


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
        lambda model, x: torch.func.vmap(model)(x),
        lambda model, x: torch.func.jacrev(lambda one: model(one).sum())(x),
        lambda model, x: torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(x),
        lambda model, x: len(make_fx(model)(x).graph.nodes),
        _faked,
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_torch_traces_or_transforms_is_left_alone(call):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)
    expected = call(model, x)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own) as watch:
        found = call(model, x)
        model(x).sum().backward()
        own.step()
    assert watch.last["step"] == 1
    assert (found == expected) if isinstance(found, int) else (call is _faked or torch.equal(found, expected))


def test_gradients_set_by_hand_are_unscaled_once(tmp_path):
    model = nn.Linear(4, 1)
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    with mptrain.watch(model, own, scaler, dir=tmp_path / "run"):
        grads = torch.autograd.grad(scaler.scale(model(torch.ones(2, 4)).mean()), list(model.parameters()))
        for one, grad in zip(model.parameters(), grads, strict=True):
            one.grad = grad
        scaler.step(own)
        scaler.update()
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters()]).item()
    assert next(read_run(tmp_path / "run").steps()).grad_norm == pytest.approx(norm, rel=1e-5)


def test_the_loss_of_a_pass_with_reentrant_checkpoints_is_counted_once(tmp_path):
    plain = train(True, folder=tmp_path / "plain")[0]
    again = train(True, network=lambda: Network(reentrant=True), folder=tmp_path / "again")[0]
    assert plain == again
    assert [one.loss for one in read_run(tmp_path / "again").steps()] == pytest.approx(again)


def test_an_optimizer_that_steps_within_the_pass_has_the_loss_of_that_pass(tmp_path):
    torch.manual_seed(0)
    model, losses = nn.Linear(4, 1), []
    own = torch.optim.SGD([model.weight], 0.1)

    def step(_):
        own.step()
        own.zero_grad()

    with mptrain.watch(model, own, dir=tmp_path / "run"):
        model.weight.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            losses.append(loss.item())
    assert [one.loss for one in read_run(tmp_path / "run").steps()] == pytest.approx(losses)


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


def test_a_function_that_fails_is_called_no_more_and_training_goes_on():
    model, calls = Network(), []
    own = torch.optim.SGD(model.parameters(), 0.1)

    def fail(event):
        calls.append(event)
        raise KeyError("step")

    watch = mptrain.watch(model, own)
    watch.on_event(fail)
    for _ in range(STEPS):
        own.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        own.step()
    with pytest.warns(UserWarning, match="is not called again"):
        watch.close()
    assert (len(calls), watch.last["step"]) == (1, STEPS)


def test_a_model_is_saved_and_copied_while_it_is_sampled(tmp_path):
    model = Network(faults=())
    with mptrain.watch(model, torch.optim.SGD(model.parameters(), 0.1)):
        torch.save(model, tmp_path / "model.pt")
        copy.deepcopy(model)(torch.randn(2, 8))
