"""Sparse gradients, complex parameters, a parameter that gets another dtype, float64 in a batch: refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mptrain.run.build.parts
from mptrain.config.compose import compose
from mptrain.engine.rehearsal import rehearse
from mptrain.system.errors import ConfigError
from tests.engine.changing_networks import Small, run
from tests.small_runs import TINY


class OwnSparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(4, 16)), nn.Linear(16, 10)

    def forward(self, images):
        words = (images.flatten(1)[:, :5].float() * 3.99).clamp(0, 3).long()
        return self.head(F.embedding(words, self.table, sparse=True).mean(1))


def test_any_other_sparse_gradient_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match=r"the gradient of table is sparse"):
        run(OwnSparse, "precision=fp16_dynamic", monkeypatch=monkeypatch)


class Casts(Small):
    def forward(self, images):
        self.head.bias.data = self.head.bias.data.double()
        return self.body(images.flatten(1)) @ self.head.weight.T + self.head.bias.float()


def test_a_parameter_that_gets_another_dtype_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"head.bias is replaced by torch.float64"):
        run(Casts, "precision=fp32", monkeypatch=monkeypatch)


def test_complex_parameters_are_refused_by_name_in_every_mode(monkeypatch):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter, self.head = nn.Parameter(torch.ones(33, dtype=torch.complex64)), nn.Linear(64, 10)

    for precision in ("fp32", "amp_bf16", "fp16_dynamic"):
        with pytest.raises(ConfigError, match=r"the parameter filter is torch\.complex64"):
            run(Filter, f"precision={precision}", monkeypatch=monkeypatch)


@pytest.mark.parametrize("name", ["targets", "mask"])
def test_float64_in_a_batch_is_named(name):
    parts, _ = mptrain.run.build.parts.build(compose(TINY))
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    wide = torch.ones(len(batch.inputs), dtype=torch.float64)
    batch = replace(batch, targets=wide) if name == "targets" else replace(batch, extras={"mask": wide})

    def loss(model, micro):
        return (model(micro.inputs).mean(1) * micro.extras.get("mask", micro.targets)).mean()

    object.__setattr__(parts.learners[0].objective, "loss", loss)
    with pytest.raises(ConfigError, match=f"not a float32 scalar: the batch's {name} is float64") as caught:
        rehearse(parts, batch)
    assert caught.value.hint == f"convert in the data set: {name}.float()"
