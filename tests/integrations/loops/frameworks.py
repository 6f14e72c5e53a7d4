"""Loops of frameworks that train more than once with one callback."""

from __future__ import annotations

import math
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from tests.integrations.loops.judge import batches, cpu_scaler, loop, loss_of, mlp


@loop(processes=1)
def trainer_of_transformers(watch, truth):
    """Trained twice from the beginning, and then resumed."""
    from transformers import Trainer, TrainingArguments

    from mptrain.integrations.transformers import Numerics

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.truth = mlp(), truth

        def forward(self, x, labels):
            loss = F.cross_entropy(self.net(x), labels)
            self.truth.step(loss=loss)
            return {"loss": loss}

    model = Network()
    samples = [{"x": x, "labels": y} for _, xs, ys in batches(2) for x, y in zip(xs, ys, strict=True)]
    callbacks = [] if watch.folder is None else [Numerics(dir=watch.folder / "run", every=3)]
    with tempfile.TemporaryDirectory() as models:
        options = TrainingArguments(
            models,
            use_cpu=True,
            per_device_train_batch_size=8,
            num_train_epochs=1,
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model, options, train_dataset=samples, callbacks=callbacks)
        trainer.train()
        model.truth = truth.also("run-2")
        trainer.args.num_train_epochs = 2
        trainer.train()
        model.truth = truth.also("run-3", before=8)
        trainer.args.num_train_epochs = 3
        trainer.train(resume_from_checkpoint=True)
    watch.parts = [model, trainer.optimizer]
    return model


@loop(processes=1)
def trainer_of_lightning(watch, truth):
    """Fitted twice with evaluations, the second time with a scaler that skips the second update."""
    import lightning as L
    from lightning.pytorch.plugins import MixedPrecision

    from mptrain.integrations.lightning import Numerics

    class Network(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.truth, self.poisoned = mlp(), truth, None

        def training_step(self, batch, index):
            _, x, y = batch
            bad = index == self.poisoned
            loss = loss_of(self.net, x, y, math.inf if bad else None)
            self.truth.spoiled(["net.0.weight", "net.0.bias"] * bad)
            self.truth.step(skipped=bad, loss=loss)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", F.cross_entropy(self.net(batch[1]), batch[2]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(plugins):
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=callbacks,
            plugins=plugins,
        )
        data, checked = (torch.utils.data.DataLoader(batches(count), batch_size=None) for count in (6, 2))
        trainer.fit(model, data, checked)
        model.truth.evaluations = 1

    model = Network()
    callbacks = [] if watch.folder is None else [Numerics(dir=watch.folder / "run", every=3)]
    fit([])
    model.truth, model.poisoned = truth.also("run-2", scales=[(1024.0, 512.0)]), 1
    fit([MixedPrecision("16-mixed", "cpu", cpu_scaler())])
    watch.parts = [model]
    return model
