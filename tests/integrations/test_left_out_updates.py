"""Updates and passes that a loop leaves out are on record, with their number, or with their names where they overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mptrain
from mptrain.runlog import read_run
from mptrain.system.records import ScaleRecord
from tests.integrations.alone_and_watched import both, loss_of, model_of, norm_of, of_kind, watching


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
