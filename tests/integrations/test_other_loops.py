"""Loops whose optimizers, scales, schedules and closures are unlike torch's: recorded, refused, or asked about."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mptrain
from mptrain.runlog import read_run
from mptrain.system.errors import UsageError
from mptrain.system.records import OverflowRecord, ScaleRecord
from tests.integrations.alone_and_watched import Scaler, both, kinds, loss_of, model_of, norm_of, of_kind, watching


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


def test_losses_that_are_not_finite_are_in_the_loss_that_comparisons_judge(tmp_path):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, every=0, dir=tmp_path / "run"):
        for step in range(9):
            own.zero_grad()
            (loss_of(model) * (math.nan if step == 7 else 1)).backward()
            own.step()
    assert math.isnan(read_run(tmp_path / "run").summary["metric"])


def test_a_mixture_of_losses_of_several_optimizers_is_no_metric(tmp_path):
    models = {"d": model_of(), "g": model_of()}
    own = [torch.optim.SGD(one.parameters(), 0.1) for one in models.values()]
    with mptrain.watch(models, own, every=0, dir=tmp_path / "run"):
        for one, optimizer in zip(models.values(), own, strict=True):
            loss_of(one).backward()
            optimizer.step()
    assert "metric" not in read_run(tmp_path / "run").summary


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
