"""Loops that do more than backward and step: nothing that is not finite, left out or moved is passed over in silence."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from torch import nn

import mptrain
from mptrain.integrations.run_files import rank_files
from mptrain.integrations.watch import WatchingCallback
from mptrain.runlog import read_run
from mptrain.system.errors import UsageError
from mptrain.system.records import EventRecord, OverflowRecord, ScaleRecord


def model_of(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def loss_of(model):
    return nn.functional.cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,)))


def norm_of(parameters):
    return nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]).item()


def both(loop, **watched):
    """Run a loop alone and watched, require equal weights, and return what was recorded."""
    seen = []
    weights = []
    for on in (False, True):
        model = model_of()
        weights.append([model, loop(model, seen if on else None, watched if on else None)])
    pairs = zip(weights[0][0].parameters(), weights[1][0].parameters(), strict=True)
    assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in pairs)
    return seen, weights[1][1]


@contextlib.contextmanager
def watching(seen, watched, model, optimizer, scaler=None):
    if watched is None:
        yield
        return
    with mptrain.watch(model, optimizer, scaler, **{"every": 0, **watched}) as watch:
        watch.on_event(seen.append)
        yield


def kinds(seen):
    return [one.kind for one in seen if isinstance(one, EventRecord)]


def of_kind(seen, kind):
    return [one for one in seen if isinstance(one, EventRecord) and one.kind == kind]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_guard_that_leaves_out_an_update_is_on_record_with_the_names(to_none, tmp_path):
    def loop(model, seen, watched):
        own = torch.optim.AdamW(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
        with watching(seen, watched, model, own):
            for step in range(1, 9):
                own.zero_grad(set_to_none=to_none)
                loss = loss_of(model)
                (loss * (math.inf if step in (3, 8) else 1)).backward()
                if math.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                    own.step()
                schedule.step()

    seen, _ = both(loop, dir=tmp_path / "run")
    first, last = of_kind(seen, "abandoned")
    assert (first.step, last.step) == (3, 7)  # the update that the passes were for; 8 ended with the loop
    assert {name for name, _ in first.fields["tensors"]} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert first.fields["overflow"]
    assert [one.step for one in of_kind(seen, "schedule_moved")] == [3]
    run = read_run(tmp_path / "run")
    assert len([*run.steps()]) == 6
    assert run.summary["learners"]["main"]["left_out"] == 2
    assert [one["event"] for one in run.events()].count("abandoned") == 2


def test_masters_by_hand_are_said_to_hide_passes_and_losses_of_several_are_unknown(tmp_path):
    def loop(model, seen, watched):
        model.half()
        masters = [nn.Parameter(one.detach().float()) for one in model.parameters()]
        own = torch.optim.SGD(masters, 0.1)
        with watching(seen, watched, model, own):
            for step in range(1, 7):
                model.zero_grad()
                loss = nn.functional.cross_entropy(model(torch.randn(16, 6).half()).float(), torch.randint(3, (16,)))
                (loss * (math.inf if step == 3 else 128)).backward()
                for master, one in zip(masters, model.parameters(), strict=True):
                    master.grad = one.grad.float() / 128
                if math.isfinite(nn.utils.clip_grad_norm_(masters, 1.0)):
                    own.step()
                with torch.no_grad():
                    for master, one in zip(masters, model.parameters(), strict=True):
                        one.copy_(master)

    with pytest.warns(UserWarning, match="master weights by hand: gradients are looked at when it steps, after clip"):
        seen, _ = both(loop, dir=tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [math.isnan(step.loss) for step in run.steps()] == [False, False, True, False, False]
    assert "not looked at: the optimizer has none of the model's parameters" in run.state.reason
    assert not of_kind(seen, "abandoned")


def test_passes_that_the_loop_abandons_on_purpose_are_counted(tmp_path):
    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for _ in range(5):
                own.zero_grad()
                loss_of(model).backward()  # as an adversarial pass
                own.zero_grad()
                loss_of(model).backward()
                own.step()

    seen, _ = both(loop, dir=tmp_path / "run")
    (first,) = of_kind(seen, "abandoned")
    assert not first.fields["overflow"]
    assert not first.fields["tensors"]
    assert [one.fields["count"] for one in of_kind(seen, "abandoned_passes")] == [5]
    assert read_run(tmp_path / "run").summary["learners"]["main"]["left_out"] == 5


def test_gradients_that_the_loop_unscales_and_leaves_out_keep_the_change_of_the_scale():
    def loop(model, seen, watched):
        own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        with watching(seen, watched, model, own, scaler):
            for step in range(1, 6):
                own.zero_grad()
                scaler.scale(loss_of(model) * (math.inf if step == 2 else 1)).backward()
                scaler.unscale_(own)
                if math.isfinite(norm_of(model.parameters())):
                    scaler.step(own)
                scaler.update()
                if step == 4:
                    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})

    seen, _ = both(loop)
    assert [one.step for one in of_kind(seen, "abandoned")] == [2]
    scales = [(one.from_scale, one.to_scale, one.why) for one in seen if isinstance(one, ScaleRecord)]
    assert scales == [(1024, 512, "overflow"), (512, 64, "set")]


def halve(parameters):
    for one in parameters:
        one.grad.data.div_(2)  # no version of the gradient moves


def replace(parameters):
    for one in parameters:
        one.grad = one.grad * 3


def noise(parameters):
    generator = torch.Generator().manual_seed(1)
    for one in parameters:
        one.grad.add_(torch.randn(one.shape, generator=generator))


@pytest.mark.parametrize("change", [halve, replace, noise])
def test_gradients_that_change_before_the_update_have_the_norm_that_was_applied(change, tmp_path):
    norms = []

    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for _ in range(4):
                own.zero_grad()
                loss_of(model).backward()
                before = norm_of(model.parameters())
                change([*model.parameters()])
                norms.append((before, norm_of(model.parameters())))
                own.step()

    both(loop, dir=tmp_path / "run")
    steps, norms = [*read_run(tmp_path / "run").steps()], norms[4:]
    assert [one.applied_norm for one in steps] == pytest.approx([after for _, after in norms], rel=1e-4)
    expected = [after if change is replace else before for before, after in norms]  # else the passes' are gone
    assert [one.grad_norm for one in steps] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("at", ["data", "replaced", "in_place"])
def test_an_infinity_that_is_written_after_the_pass_is_named(scaled, at):
    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        with watching(seen, watched, model, own, scaler):
            for step in range(1, 5):
                own.zero_grad()
                scaler.scale(loss_of(model)).backward()
                if step == 2:
                    grad = model[2].bias.grad
                    if at == "replaced":
                        model[2].bias.grad = grad * math.inf
                    else:
                        (grad.data if at == "data" else grad).fill_(math.inf)
                scaler.step(own)
                scaler.update()

    seen, _ = both(loop)
    first = next(one for one in seen if isinstance(one, OverflowRecord))
    assert (first.step, first.skipped, [name for name, _ in first.tensors]) == (2, scaled, ["2.bias"])


def test_gradients_set_by_hand_have_the_norm_as_applied(tmp_path):
    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        x, y = torch.randn(16, 6), torch.randint(3, (16,))

        def loss(weights):
            return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        with watching(seen, watched, model, own):
            for _ in range(3):
                grads = torch.func.grad(loss)({name: one.detach() for name, one in model.named_parameters()})
                for name, one in model.named_parameters():
                    one.grad = grads[name]
                own.step()
        return norm_of(model.parameters())

    _, norm = both(loop, dir=tmp_path / "run")
    *_, last = read_run(tmp_path / "run").steps()
    assert (last.step, last.grad_norm, last.applied_norm) == (3, *[pytest.approx(norm, rel=1e-4)] * 2)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: two passes an update, by an optimizer inside of it."""

    def __init__(self, params, base):
        super().__init__(params, {})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def first(self):
        self.before = [one.detach().clone() for group in self.param_groups for one in group["params"]]
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    one.add_(one.grad, alpha=0.05)
        self.zero_grad()

    def second(self):
        with torch.no_grad():
            for group in self.param_groups:
                for one, before in zip(group["params"], self.before, strict=True):
                    one.copy_(before)
        self.base_optimizer.step()
        self.zero_grad()


def test_the_optimizer_inside_of_a_wrapper_is_the_one_that_updates(tmp_path):
    norms = []

    def loop(model, seen, watched):
        own = Sam(model.parameters(), lambda groups: torch.optim.SGD(groups, 0.1))
        with watching(seen, watched, model, own):
            for _ in range(4):
                loss_of(model).backward()
                own.first()
                loss_of(model).backward()
                norms.append(norm_of(model.parameters()))
                own.second()

    both(loop, dir=tmp_path / "run")
    assert [one.grad_norm for one in read_run(tmp_path / "run").steps()] == pytest.approx(norms[4:], rel=1e-4)


class Wrapper:
    """Wrapper of an optimizer that is none itself."""

    def __init__(self, optim):
        self.optim = optim

    def step(self):
        self.optim.step()


def test_a_wrapper_that_is_no_optimizer_is_looked_into_and_what_holds_none_is_refused(tmp_path):
    model = model_of()
    own = Wrapper(torch.optim.SGD(model.parameters(), 0.1))
    with mptrain.watch(model, own, every=0) as watch:
        loss_of(model).backward()
        own.step()
    assert watch.last["step"] == 1
    for found, hint in ((object.__new__(Wrapper), "in a list"),):
        found.optim = [own.optim]
        with pytest.raises(UsageError, match=r"Wrapper is no torch\.optim\.Optimizer") as error:
            mptrain.watch(model, found)
        assert hint in error.value.hint


class Scaler:
    """Loss scaler of a loop's own; as timm's, with one of torch inside, if it is given one."""

    def __init__(self, inner=None):
        self.value = 1024.0
        if inner is not None:
            self._scaler = inner


def test_a_scaler_that_is_none_of_torch_is_refused_with_what_to_give():
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    for scaler, hint in ((Scaler(torch.amp.GradScaler("cpu")), "_scaler"), (Scaler(), "loss_scale=")):
        with pytest.raises(UsageError, match=r"Scaler is no torch\.amp\.GradScaler") as error:
            mptrain.watch(model, own, scaler)
        assert hint in error.value.hint
    with pytest.raises(UsageError, match="two answers"):
        mptrain.watch(model, own, torch.amp.GradScaler("cpu"), loss_scale=lambda: 1.0)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loop_that_scales_by_hand_tells_its_scale(as_tensor, tmp_path):
    scales, norms = Scaler(), []

    def loop(model, seen, watched):
        scales.value = 1024.0
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for step in range(1, 7):
                own.zero_grad()
                (loss_of(model) * scales.value * (math.inf if step == 3 else 1)).backward()
                for one in model.parameters():
                    one.grad.div_(scales.value)
                if math.isfinite(norm := norm_of(model.parameters())):
                    norms.append(norm)
                    own.step()
                else:
                    scales.value /= 2

    seen, _ = both(
        loop,
        dir=tmp_path / "run",
        loss_scale=lambda: torch.tensor(scales.value) if as_tensor else scales.value,
    )
    steps = [*read_run(tmp_path / "run").steps()]
    assert [one.loss_scale for one in steps] == [1024.0] * 2 + [512.0] * 3
    assert [one.grad_norm for one in steps] == pytest.approx(norms[5:], rel=1e-4)
    assert [one.applied_norm for one in steps] == pytest.approx(norms[5:], rel=1e-4)
    assert [(one.from_scale, one.to_scale) for one in seen if isinstance(one, ScaleRecord)] == [(1024, 512)]
    assert [one.step for one in of_kind(seen, "abandoned")] == [3]


@pytest.mark.parametrize("clip", [False, True])
def test_a_loop_that_scales_by_hand_and_does_not_tell_is_asked(clip):
    how = "changes its gradients more than once" if clip else "divides its gradients by 256"

    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for _ in range(4):
                own.zero_grad()
                (loss_of(model) * 256).backward()
                for one in model.parameters():
                    one.grad.div_(256)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                own.step()

    with pytest.warns(UserWarning, match=f"{how} .* give mptrain.watch loss_scale="):
        seen, _ = both(loop)
    assert len(of_kind(seen, "not_looked_at")) == 1


def test_an_optimizer_that_never_steps_is_asked_about(tmp_path):
    model = model_of()
    watched, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    watch = mptrain.watch(model, watched, every=0, dir=tmp_path / "run")
    for _ in range(40):
        other.zero_grad()
        loss_of(model).backward()
        other.step()
    with pytest.warns(UserWarning, match="40 backward passes and no update of the watched SGD"):
        watch.close()
    assert read_run(tmp_path / "run").summary["learners"]["main"]["left_out"] == 40


@pytest.mark.parametrize("kind", ["second", "epoch", "plateau"])
def test_schedules_of_all_groups_are_followed_and_only_those_that_move_with_each_update(kind):
    def loop(model, seen, watched):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        own, scaler = torch.optim.SGD(groups, 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        moves = {
            "second": lambda step: 0.9**step,
            "epoch": lambda step: 0.5 ** (step // 5),
            "plateau": lambda step: 0.1 if step >= 5 else 1.0,
        }
        schedule = torch.optim.lr_scheduler.LambdaLR(own, [lambda step: 1.0, moves[kind]])
        with watching(seen, watched, model, own, scaler):
            for step in range(1, 12):
                own.zero_grad()
                scaler.scale(loss_of(model) * (math.inf if step in (1, 5) else 1)).backward()
                scaler.step(own)
                scaler.update()
                schedule.step()

    with pytest.warns(UserWarning, match="lr_scheduler.step"):  # torch's own, of the first step that was skipped
        seen, _ = both(loop)
    moved = of_kind(seen, "schedule_moved")
    assert [(one.step, one.fields["group"]) for one in moved] == ([(1, 1), (5, 1)] if kind == "second" else [])


def test_parameters_that_are_frozen_at_first_are_looked_at_from_their_first_gradient(tmp_path):
    norms = []

    def loop(model, seen, watched):
        model.requires_grad_(False)
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            model.requires_grad_(True)
            for _ in range(3):
                own.zero_grad()
                loss_of(model).backward()
                norms.append(norm_of(model.parameters()))
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                own.step()

    both(loop, dir=tmp_path / "run")
    steps = [*read_run(tmp_path / "run").steps()]
    assert [one.grad_norm for one in steps] == pytest.approx(norms[3:], rel=1e-4)
    assert all(math.isfinite(one.loss) for one in steps)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_watch_that_fails_records_no_more_and_the_training_goes_on(scaled, tmp_path, monkeypatch):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    with mptrain.watch(model, own, scaler, every=0, dir=tmp_path / "run") as watch:
        for step in range(6):
            if step == 3:
                monkeypatch.setattr(watch.learners[0].passes, "look", lambda: 1 / 0)
                expected = pytest.warns(UserWarning, match="has stopped, and training goes on: ZeroDivisionError")
            with expected if step == 3 else contextlib.nullcontext():
                own.zero_grad()
                scaler.scale(loss_of(model)).backward()
                scaler.step(own)
                scaler.update()
            watch.step(0.5)
    run = read_run(tmp_path / "run")
    assert [one.step for one in run.steps()] == [1, 2, 3]
    what = "steps after 3: ZeroDivisionError: division by zero"
    assert run.state.reason == f"not looked at: {what}"
    assert [one["what"] for one in run.events() if one["event"] == "not_looked_at"] == [what]
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    assert "not everything looked at" in " ".join(report_of(tmp_path / "run").split())


def report_of(folder):
    from mptrain.report.run_page import run_page
    from mptrain.runlog.run_paths import RunPaths

    return run_page(RunPaths(folder)).lead


def test_records_that_fail_are_said_to_be_lost_where_the_loop_ends(tmp_path, monkeypatch):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    watch = mptrain.watch(model, own, every=0, dir=tmp_path / "run")
    own.zero_grad()
    loss_of(model).backward()
    own.step()
    monkeypatch.setattr(watch.learners[0].updates._log, "digest", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="lost are the last records: ZeroDivisionError"):
        watch.close()
    assert read_run(tmp_path / "run").state.reason.startswith("not looked at: the last records: ZeroDivisionError")


def test_histograms_that_fail_are_no_silence(tmp_path, monkeypatch):
    monkeypatch.setattr("mptrain.engine.histograms.count_exponents", lambda *_: 1 / 0)
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    said = pytest.warns(UserWarning, match="leaves the histograms of an update out")
    with said, mptrain.watch(model, own, every=1, dir=tmp_path / "run"):
        for _ in range(3):
            own.zero_grad()
            loss_of(model).backward()
            own.step()
    reason = "not looked at: histograms of an update: ZeroDivisionError: division by zero"
    assert read_run(tmp_path / "run").state.reason == reason


def test_a_pass_that_reaches_another_part_tells_gradients_set_to_zero_from_others(tmp_path):
    def loop(model, seen, watched):
        other = nn.Linear(6, 3)
        other.load_state_dict({"weight": torch.ones(3, 6), "bias": torch.zeros(3)})
        own = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.01)
        with watching(seen, watched, nn.ModuleList([model, other]), own):
            for step in range(4):
                given = torch.randn(16, 6)
                (model(given).sum() * (math.nan if step == 1 else 1)).backward() if step < 2 else None
                if step == 1:
                    own.zero_grad(set_to_none=False)
                    continue
                other(given).square().mean().backward()
                own.step()
                own.zero_grad(set_to_none=False)

    seen, _ = both(loop, dir=tmp_path / "run")
    assert [one.fields["overflow"] for one in of_kind(seen, "abandoned")] == [True]
    assert not any(one.overflow for one in read_run(tmp_path / "run").steps())


def test_a_closure_that_is_called_often_has_the_loss_before_the_update(tmp_path):
    def loop(model, seen, watched):
        own, told = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4), []

        with watching(seen, watched, model, own):
            for _ in range(4):
                given, labels = torch.randn(16, 6), torch.randint(3, (16,))

                def closure(given=given, labels=labels):
                    own.zero_grad()
                    loss = nn.functional.cross_entropy(model(given), labels)
                    loss.backward()
                    return loss

                told.append(own.step(closure).item())
        return told

    seen, told = both(loop, dir=tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [one.loss for one in run.steps()] == pytest.approx(told, rel=1e-6)
    assert not of_kind(seen, "abandoned")
    assert "left_out" not in run.summary["learners"]["main"]


def test_what_another_rank_has_not_looked_at_is_in_the_report(tmp_path):
    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for _ in range(3):
                own.zero_grad()
                loss_of(model).backward()
                own.step()

    both(loop, dir=tmp_path / "run")
    assert report_of(tmp_path / "run").endswith("3 updates in 3 steps, none skipped.")
    files = rank_files(tmp_path / "run", 1, sharded=False)
    files.take(EventRecord("not_looked_at", 2, {"learner": "main", "what": "steps after 2", "rank": 1}))
    files.close()
    assert [one["rank"] for one in read_run(tmp_path / "run").events() if one["event"] == "not_looked_at"] == [1]
    assert report_of(tmp_path / "run").endswith("none of these skipped, not everything looked at.")


def test_losses_that_are_not_finite_are_in_the_loss_that_comparisons_judge(tmp_path):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, every=0, dir=tmp_path / "run"):
        for step in range(9):
            own.zero_grad()
            (loss_of(model) * (math.nan if step == 7 else 1)).backward()
            own.step()
    assert math.isnan(read_run(tmp_path / "run").summary["metric"])


def test_an_overflow_stays_on_record_if_the_optimizer_is_given_parameters_before_its_step(tmp_path):
    model, more = model_of(), nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(nn.ModuleList([model, more]), own, every=0, dir=tmp_path / "run"):
        (loss_of(model) * math.inf).backward()
        own.add_param_group({"params": [*more.parameters()]})
        own.step()
    (overflow,) = [one for one in read_run(tmp_path / "run").events() if one["event"] == "overflow"]
    assert {name for name, _ in overflow["tensors"]} == {f"0.{name}" for name, _ in model.named_parameters()}


def test_a_watch_that_nobody_closes_ends_with_its_loop(tmp_path):
    original = torch.autograd.backward

    def cell():
        model = model_of()
        own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        mptrain.watch(model, own, scaler, dir=tmp_path / "run")
        for _ in range(5):
            own.zero_grad()
            scaler.scale(loss_of(model)).backward()
            gc.collect()  # nobody holds the watch, which goes on
            scaler.step(own)
            scaler.update()

    cell()
    gc.collect()
    assert torch.autograd.backward is original
    run = read_run(tmp_path / "run")
    assert (len([*run.steps()]), run.state.status) == (5, "done")


PROGRAM = """
import os, sys, threading, time, torch, mptrain
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(4, 2)
own = torch.optim.SGD(model.parameters(), 0.1)
watch = mptrain.watch(model, own, every=0, dir=sys.argv[2])
for step in range(1, 61):
    own.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    own.step()
    if step == 30 and sys.argv[1] == "fork" and os.fork() == 0:
        for _ in range(5):
            own.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            own.step()
        sys.exit(0)
    if step == 60 and sys.argv[1] == "term":
        time.sleep(1.2)
        own.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        own.step()
        print("ready", flush=True)
        time.sleep(60)
if sys.argv[1] == "raise":
    raise ValueError("of the loop")
if sys.argv[1] == "fork":
    os.wait()
if sys.argv[1] == "exit":
    sys.exit(3)
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["end", "exit", "raise", "fork", "term"])
def test_a_process_that_ends_without_close_leaves_its_steps(how, tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if how == "term":
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGTERM)
    _, said = program.communicate(timeout=120)
    expected = {"exit": 3, "raise": 1, "term": -signal.SIGTERM}.get(how, 0)
    assert program.returncode == expected, said
    run = read_run(tmp_path / "run")
    assert [one.step for one in run.steps()] == [*range(1, 61)]
    status = {"raise": "failed", "term": "running"}.get(how, "done")
    assert (run.state.status, "ValueError: of the loop" in run.state.reason) == (status, how == "raise")


def test_another_thread_may_flush(tmp_path):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    ended = threading.Event()
    with mptrain.watch(model, own, every=0, dir=tmp_path / "run") as watch:

        def flushing():
            while not ended.is_set():
                watch.flush()
                time.sleep(0)

        thread = threading.Thread(target=flushing)
        thread.start()
        for _ in range(200):
            own.zero_grad()
            loss_of(model).backward()
            own.step()
        ended.set()
        thread.join()
    assert [one.step for one in read_run(tmp_path / "run").steps()] == [*range(1, 201)]


def test_a_callback_begins_again_beside_its_first_records_and_takes_only_numbers(tmp_path):
    callback, model = WatchingCallback(every=0, dir=tmp_path / "run"), model_of()
    for steps in (0, 3):
        own = torch.optim.SGD(model.parameters(), 0.1)
        callback._start(model, own, None, steps)
        for _ in range(3):
            own.zero_grad()
            loss_of(model).backward()
            own.step()
        with pytest.warns(UserWarning, match="no numbers: report, confusion, none, nested"):
            callback._evaluated(
                {
                    "accuracy": torch.tensor(0.5),
                    "report": "precision",
                    "confusion": [[1]],
                    "none": None,
                    "nested": {},
                    "a_runtime": 3.0,
                    "samples_per_second": 1.0,
                }
            )
        callback._close()
    for name, expected in (("run", [1, 2, 3]), ("run-2", [4, 5, 6])):
        run = read_run(tmp_path / name)
        assert [one.step for one in run.steps()] == expected
        assert run.summary["learners"]["main"] == {**run.summary["learners"]["main"], "skipped": 0, "updates": 3}
        assert [one["metrics"] for one in run.events() if one["event"] == "evaluation"] == [{"accuracy": 0.5}]
    with pytest.warns(UserWarning, match="does not watch this training: Scaler is no"):
        callback._start(model, own, Scaler(), 0)
    assert callback.watch is None


def test_a_mixture_of_losses_of_several_optimizers_is_no_metric(tmp_path):
    models = {"d": model_of(), "g": model_of()}
    own = [torch.optim.SGD(one.parameters(), 0.1) for one in models.values()]
    with mptrain.watch(models, own, every=0, dir=tmp_path / "run"):
        for one, optimizer in zip(models.values(), own, strict=True):
            loss_of(one).backward()
            optimizer.step()
    assert "metric" not in read_run(tmp_path / "run").summary


def test_a_look_while_a_frozen_part_is_flushed_keeps_its_losses(tmp_path):
    model = model_of()
    own = [torch.optim.SGD(one.parameters(), 0.1) for one in (model[0], model[2])]
    with mptrain.watch(model, own, every=0, dir=tmp_path / "run") as watch:
        for _ in range(3):
            for at, part in enumerate((model[0], model[2])):
                model.requires_grad_(False)
                part.requires_grad_(True)
                loss_of(model).backward()
                own[at].step()
                watch.flush()
    assert all(math.isfinite(one.loss) for one in read_run(tmp_path / "run").steps())


def test_compiled_autograd_is_looked_at_where_the_optimizer_steps():
    from torch._dynamo import compiled_autograd

    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for step in range(3):
                own.zero_grad()
                loss = loss_of(model) * (math.nan if step == 2 else 1)
                with compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
                own.step()

    with pytest.warns(UserWarning, match="compiled autograd: gradients are looked at when"):
        seen, _ = both(loop)
    assert [one.step for one in seen if isinstance(one, OverflowRecord)] == [3]
    assert kinds(seen) == ["not_looked_at"]


def test_a_full_disk_keeps_steps_rather_than_histograms(tmp_path, monkeypatch):
    from mptrain.runlog import record_writer

    write, room = record_writer.write_all, [6000]

    def full(descriptor, pending):
        if len(pending) > room[0]:
            raise OSError(28, "No space left on device")
        room[0] -= len(pending)
        write(descriptor, pending)

    monkeypatch.setattr(record_writer, "write_all", full)
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)

    def loop():
        with mptrain.watch(model, own, every=1, dir=tmp_path / "run") as watch:
            for _ in range(40):
                own.zero_grad()
                loss_of(model).backward()
                own.step()
                watch.flush()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop()
    assert [str(one.message).partition(":")[0].rpartition(" ")[2] for one in said] == ["histograms", "records"]
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert len(lines) > 10
    assert [json.loads(one)["step"] for one in lines] == [*range(1, len(lines) + 1)]
    assert (tmp_path / "run" / "histograms.jsonl").read_bytes() == b""
