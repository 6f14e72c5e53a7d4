"""Loops with loss scaling: by torch's scaler, by wrappers of it, and by hand."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.integrations.loops.judge import (
    batches,
    body,
    cpu_scaler,
    forward,
    loop,
    loss_of,
    mlp,
    norm,
    restored,
    update,
)


@loop()
def accumulated(watch, truth):
    """Two updates of 256 micro-batches; one of the second is NaN."""
    model, scaler = mlp(), cpu_scaler(128.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = batches(8)

    def losses(poisoned=None):
        for at in range(256):
            _, x, y = data[at % 8]
            yield loss_of(model, x, y, math.nan if at == poisoned else None) / 256

    with watch(model, optimizer, scaler):
        update(truth, model, optimizer, losses(), scaler)
        update(truth, model, optimizer, losses(poisoned=100), scaler, skipped=True)
    return model


@loop()
def scaler_of_timm(watch, truth):
    """The scaler of timm passes, clips and steps in one call, of two micro-batches; the second update overflows."""
    import timm.utils

    model, scale = mlp(), 1024.0
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.01), timm.utils.NativeScaler(device="cpu")
    scaler._scaler = cpu_scaler(scale)
    with watch(model, optimizer, scaler._scaler):
        for i, x, y in batches(6):
            if i % 2:
                optimizer.zero_grad()
            loss = loss_of(model, x, y, math.inf if i == 3 else None) / 2
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=i % 2 == 0)
            if i % 2 == 0:
                truth.spoiled(["0.weight", "0.bias"] * (i == 4))
                truth.step(skipped=i == 4, scale=scale)
                truth.scaled(scale, scale := scaler._scaler.get_scale())
    return model


@loop()
def parts_of_a_model(watch, truth):
    """Optimizers of matrices and of biases have one scaler; a bias overflows alone, and one iteration steps matrices only."""
    model, scaler = mlp(), cpu_scaler()
    matrices, biases = ([one for one in model.parameters() if one.ndim == size] for size in (2, 1))
    first, second = torch.optim.SGD(matrices, 0.05), torch.optim.AdamW(biases, 0.01)
    at = 0
    model[2].bias.register_hook(lambda grad: grad * math.inf if at == 3 else grad)
    with watch(model, [first, second], scaler):
        for at, x, y in batches(7):
            first.zero_grad()
            second.zero_grad()
            scale, loss = scaler.get_scale(), loss_of(model, x, y)
            scaler.scale(loss).backward()
            truth.look(model, "optimizer1")
            truth.step("optimizer0", loss=loss, norm=norm(matrices, scale), scale=scale)
            scaler.step(first)
            if at != 6:
                truth.step("optimizer1", skipped=at == 3, loss=loss, norm=norm(biases, scale), scale=scale)
                scaler.step(second)
            else:
                truth.left_out += 1  # of the biases
            scaler.update()
            truth.scaled(scale, scaler.get_scale())
    return model


def checkpointed(watch, truth, reentrant):
    """Nested checkpoints with dropout inside; the third pass is NaN in the part that is computed again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.05), cpu_scaler()
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    with watch(model, optimizer, scaler, every=2):
        for i, x, y in batches(5):
            part = functools.partial(forward, model[:4], poison=math.nan if i == 3 else None)
            hidden = again(functools.partial(again, part), x.requires_grad_())
            update(truth, model, optimizer, F.cross_entropy(model[4](hidden), y), scaler, skipped=i == 3)
    return model


for name, reentrant in (("checkpointed", False), ("checkpointed_reentrant", True)):
    loop(name=name)(functools.partial(checkpointed, reentrant=reentrant))


class Lora(nn.Module):
    """Frozen FP16 layer with FP32 adapters."""

    def __init__(self, base):
        super().__init__()
        self.base = base.half().requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, base.in_features) / 3)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return F.linear(x, self.base.weight.float(), self.base.bias.float()) + x @ self.lora_a.T @ self.lora_b.T


@loop()
def adapters(watch, truth):
    """LoRA in BF16: the optimizer has the adapters only, of which one overflows in the fourth update."""
    torch.manual_seed(0)
    model, at = nn.Sequential(Lora(nn.Linear(6, 8)), nn.ReLU(), Lora(nn.Linear(8, 3))), 0
    optimizer, scaler = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01), cpu_scaler()
    model[0].lora_b.register_hook(lambda grad: grad + math.inf if at == 4 else grad)
    with watch(model, optimizer, scaler):
        for at, x, y in batches(6):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            loss = F.cross_entropy(out.float(), y)
            update(truth, model, optimizer, loss, scaler, skipped=at == 4)
    return model


@loop()
def plateau(watch, truth):
    """ReduceLROnPlateau follows a metric: that it moves after a skipped update is no fault."""
    model, scaler = mlp(), cpu_scaler(8192.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    with watch(model, optimizer, scaler):
        for i, x, y in batches(12):
            skipped, rate = i in (3, 8, 12), optimizer.param_groups[0]["lr"]
            loss = loss_of(model, x, y, math.inf if skipped else None)
            update(truth, model, optimizer, loss, scaler, skipped=skipped, lr=rate)
            if i % 4 == 0:
                schedule.step(1.0)
    return model


@loop()
def warm_up_of_a_group(watch, truth):
    """The rate of the second group is set by hand before each update, of which two are skipped."""
    model, scaler = mlp(), cpu_scaler()
    groups = [{"params": model[2].parameters(), "lr": 0.01}, {"params": model[0].parameters(), "lr": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    truth.moved = 2
    with watch(model, optimizer, scaler):
        for i, x, y in batches(8):
            optimizer.param_groups[1]["lr"] = 0.01 * i / 8
            loss = loss_of(model, x, y, math.inf if i in (2, 5) else None)
            update(truth, model, optimizer, loss, scaler, skipped=i in (2, 5))
    return model


@loop()
def fused(watch, truth):
    """Fused AdamW skips inside of its kernel; a schedule of each update moves all the same."""
    model, scaler, data = mlp(), cpu_scaler(), batches(12)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
    truth.moved = 2
    with watch(model, optimizer, scaler):
        for i in range(1, 7):
            losses = (
                loss_of(model, x, y, math.inf if at in (4, 10) else None) / 2 for at, x, y in data[2 * i - 2 : 2 * i]
            )
            rate = schedule.get_last_lr()[0]
            update(truth, model, optimizer, losses, scaler, skipped=i in (2, 5), lr=rate)
            schedule.step()
    return model


@loop()
def loaded_scale(watch, truth):
    """The state of the scaler is loaded twice, the second time after a skip."""
    model, scaler = mlp(), cpu_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watch(model, optimizer, scaler):
        for i, x, y in batches(8):
            if i in (5, 7):
                before, loaded = scaler.get_scale(), 64.0 if i == 5 else 8.0
                scaler.load_state_dict({**scaler.state_dict(), "scale": loaded})
                truth.scaled(before, loaded)
            update(truth, model, optimizer, loss_of(model, x, y, math.inf if i == 6 else None), scaler, skipped=i == 6)
    return model


@loop()
def scale_that_is_set(watch, truth):
    """``update`` is given the next scale, once after gradients that are unscaled and left out."""
    model, scaler = mlp(), cpu_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    given = {2: 256.0, 4: 16.0, 5: torch.tensor(4096.0)}
    with watch(model, optimizer, scaler):
        for i, x, y in batches(7):
            optimizer.zero_grad()
            scale, loss = scaler.get_scale(), loss_of(model, x, y)
            scaler.scale(loss).backward()
            if i == 4:
                scaler.unscale_(optimizer)
                truth.left_out += 1
            else:
                truth.step(loss=loss, norm=norm(model, scale), scale=scale)
                scaler.step(optimizer)
            scaler.update(given.get(i))
            truth.scaled(scale, scaler.get_scale())
    return model


@loop()
def scaler_switched_off(watch, truth):
    """A script with a switch calls a disabled scaler throughout; the third update is NaN, and nobody skips it."""
    model, scaler = mlp(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with watch(model, optimizer, scaler):
        for i, x, y in batches(6):
            optimizer.zero_grad()
            loss = loss_of(model, x, y, math.nan if i == 3 else None)
            scaler.scale(loss).backward()
            truth.look(model)
            scaler.unscale_(optimizer)
            truth.step(loss=loss, norm=norm(model), scale=1.0)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with restored(model, optimizer, when=i == 3):
                scaler.step(optimizer)
                scaler.update()
    return model


@loop(said=("the optimizer has none of the model's parameters, as with master weights by hand",), looked=False)
def masters_by_hand(watch, truth):
    """The optimizer has FP32 copies of FP16 weights, with a fixed scale; the third pass is not finite and left out."""
    model = mlp().half()
    masters = [nn.Parameter(one.detach().float()) for one in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.05, momentum=0.9)
    with watch(model, optimizer):
        for i, x, y in batches(6):
            model.zero_grad()
            loss = F.cross_entropy(forward(model, x.half(), math.inf if i == 3 else None).float(), y)
            (loss * 128).backward()
            truth.look(model)
            for master, one in zip(masters, model.parameters(), strict=True):
                master.grad = one.grad.float() / 128
            if not math.isfinite(nn.utils.clip_grad_norm_(masters, 0.05)):
                truth.left_out += 1
                continue
            truth.step(loss=(loss.item(), loss.item() * 128, math.nan), norm=norm(masters))
            optimizer.step()
            with torch.no_grad():
                for master, one in zip(masters, model.parameters(), strict=True):
                    one.copy_(master)
    return [model, *masters]


@body(7, said=("the loop changes its gradients more than once between pass and update; if a loss scale is among that",))
def scale_by_hand(truth, model, optimizer, i, x, y):
    """A fixed scale that the watch is not told, with clipping; the fifth pass overflows and is left out."""
    optimizer.zero_grad()
    loss = loss_of(model, x, y, math.inf if i == 5 else None)
    (loss * 1024).backward()
    truth.look(model)
    total = norm(model)
    for one in model.parameters():
        one.grad.mul_(1 / 1024)
    if not math.isfinite(total):
        truth.left_out += 1
        return
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    truth.step(loss=loss.item() * 1024, norm=total)
    optimizer.step()
