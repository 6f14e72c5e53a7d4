"""Fine-tunes a small checkpoint saved in BF16 by a framework of others, watched, and prints what the watch says.

python -m tests.integrations.half_weights_loops plain|accelerate|transformers|lightning bfloat16|float32 FOLDER
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings

import torch
from torch.utils.data import DataLoader

import mptrain
from mptrain.runlog import read_run

STEPS, RATE = 8, 2e-5


def checkpoint(dtype):
    """Return a model as ``from_pretrained`` loads a checkpoint that was saved in BF16."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=64, **sizes)).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        chosen = {} if dtype == "bfloat16" else {"dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(folder, **chosen)


def samples():
    torch.manual_seed(1)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (4 * STEPS, 16))]


def plain(model, folder):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with mptrain.watch(model, optimizer, every=2, dir=folder):
        for batch in DataLoader(samples(), batch_size=4):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()


def accelerate(model, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=4))
    with mptrain.watch(model, optimizer, every=2, dir=folder):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch).loss)
            optimizer.step()


def transformers(model, folder):
    from transformers import Trainer, TrainingArguments

    from mptrain.integrations.transformers import Numerics

    options = TrainingArguments(
        "unused",
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=RATE,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    Trainer(model, options, train_dataset=samples(), callbacks=[Numerics(every=2, dir=folder)]).train()


def lightning(model, folder):
    import lightning as L

    from mptrain.integrations.lightning import Numerics

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    trainer = L.Trainer(
        accelerator="cpu",
        precision="bf16-true" if next(model.parameters()).dtype == torch.bfloat16 else "bf16-mixed",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Numerics(every=2, dir=folder)],
    )
    trainer.fit(Module(), DataLoader(samples(), batch_size=4))


if __name__ == "__main__":
    framework, dtype, folder = sys.argv[1:]
    model = checkpoint(dtype)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        globals()[framework](model, folder)
    run = read_run(folder)
    still = [name for name, value in model.named_parameters() if torch.equal(value, start[name])]
    events = [event for event in run.events() if event["event"] in ("no_master_weights", "frozen", "state_rounding")]
    looks = [record.lost for record in run.histograms()]
    words = [str(each.message) for each in said if "mptrain" in str(each.message)]
    print(json.dumps({"warnings": words, "events": events, "still": still, "looks": looks}))
