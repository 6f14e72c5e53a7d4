"""Trains a network whose gradients overflow in two steps by a framework of others, and prints what a watch has seen.

python -m tests.integrations.framework_loops accelerate|transformers|lightning|manual|fabric [cpu|cuda]
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import mptrain

STEPS, SIZE = 12, 16
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
DRAWS = torch.Generator().manual_seed(1)
X = torch.randn(STEPS * SIZE, 8, generator=DRAWS)
Y = X[:, :4].argmax(1)
DATA = torch.utils.data.TensorDataset(X, Y)


class Faulty(nn.Module):
    """Three layers, whose gradients become infinite between the second and the third in the fourth and ninth step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.net[:3](x)
        if self.calls in (4, 9):
            h.register_hook(lambda gradient: gradient * torch.inf)
        return self.net[3:](h)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x).float(), y)


def scaler():
    return torch.amp.GradScaler(DEVICE, init_scale=1024.0)


def parts(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def accelerate(events):
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=DEVICE == "cpu"), Faulty()
    accelerator.scaler = scaler()
    loader = torch.utils.data.DataLoader(DATA, batch_size=SIZE)
    model, optimizer, loader, schedule = accelerator.prepare(model, *parts(model)[:1], loader, parts(model)[1])
    optimizer.scaler = accelerator.scaler
    with mptrain.watch(model, optimizer, accelerator.scaler) as watch:
        watch.on_event(events.append)
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return watch


def transformers(events):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from mptrain.integrations.transformers import Numerics

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Faulty()

        def forward(self, x=None, labels=None):
            return {"loss": self.inner.loss(x, labels)}

    class Listener(TrainerCallback):
        def on_train_begin(self, *arguments, **more):
            numerics.watch.on_event(events.append)

    numerics = Numerics()
    options = TrainingArguments(
        "unused",
        per_device_train_batch_size=SIZE,
        num_train_epochs=1,
        use_cpu=DEVICE == "cpu",
        report_to=[],
        save_strategy="no",
    )
    samples = [{"x": x, "labels": y} for x, y in DATA]
    trainer = Trainer(Model(), options, train_dataset=samples, callbacks=[numerics, Listener()])
    trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler(), True
    trainer.train()
    return numerics.watch


def lightning(events, *, manual=False):
    import lightning as L
    from lightning.pytorch.plugins import MixedPrecision

    from mptrain.integrations.lightning import Numerics

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.automatic_optimization = Faulty(), not manual

        def training_step(self, batch, index):
            loss = self.inner.loss(*batch)
            if manual:
                optimizer, schedule = self.optimizers(), self.lr_schedulers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                schedule.step()
            return loss

        def configure_optimizers(self):
            optimizer, schedule = parts(self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Listener(L.Callback):
        def on_train_start(self, *arguments):
            numerics.watch.on_event(events.append)

    numerics = Numerics()
    trainer = L.Trainer(
        accelerator=DEVICE,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", DEVICE, scaler())],
        callbacks=[numerics, Listener()],
        gradient_clip_val=None if manual else 1.0,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(DATA, batch_size=SIZE))
    return numerics.watch


def manual(events):
    return lightning(events, manual=True)


def fabric(events):
    import lightning as L
    from lightning.fabric.plugins import MixedPrecision

    own = scaler()
    fabric = L.Fabric(accelerator=DEVICE, devices=1, plugins=[MixedPrecision("16-mixed", DEVICE, own)])
    fabric.launch()
    model = Faulty()
    optimizer, schedule = parts(model)
    model, optimizer = fabric.setup(model, optimizer)
    with mptrain.watch(model, optimizer, own) as watch:
        watch.on_event(events.append)
        for at in range(STEPS):
            x, y = (one[at * SIZE : (at + 1) * SIZE].to(fabric.device) for one in (X, Y))
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x).float(), y))
            optimizer.step()
            schedule.step()
    return watch


if __name__ == "__main__":
    seen = []
    last = globals()[sys.argv[1]](seen).last
    overflows = {one.step: [name for name, _ in one.tensors] for one in seen if hasattr(one, "tensors") and one.skipped}
    moved = [one.step for one in seen if getattr(one, "kind", "") == "schedule_moved"]
    print(json.dumps({"last": last, "skipped": overflows, "moved": moved}))
