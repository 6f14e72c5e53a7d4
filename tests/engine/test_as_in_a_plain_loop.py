"""Buffers that grow, TorchScript, quantization, layers without gradients at first: trained and resumed as in a plain loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from mptrain.system.errors import ConfigError
from tests.engine.plain_loops import Helped, Net, Queue, in_plain_torch, trained

MODES = ("fp32", "amp_dynamic", "fp16_dynamic", "bf16")


class Resizes(Net):
    """Keeps means of its features in a buffer that it resizes in its first pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.ones(1))

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            with torch.no_grad():
                first = len(self.sizes) == 1
                now = hidden.detach().abs().mean(0).to(self.sizes.dtype)
                self.sizes.resize_(16).copy_(now if first else self.sizes.lerp(now, 0.5))
        return self.head(hidden / (0.5 + self.sizes)) * self.factor


class Caches(Net):
    """Appends features of each batch to a buffer that checkpoints of the weights do not hold, and makes a counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None, persistent=False)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            rows = hidden.detach()[:2]
            self.cache = rows if self.cache is None else torch.cat([self.cache, rows])
            if not hasattr(self, "passes"):
                self.register_buffer("passes", torch.zeros(1, dtype=torch.int64))
            self.passes += 1
        return self.head(hidden - self.cache.mean(0)) * self.factor


class Scripted(Net):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.script(nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16)))


class Traced(Net):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.trace(nn.Sequential(nn.Linear(64, 16), nn.ReLU()), torch.zeros(2, 64))


class Counts(nn.Module):
    """In TorchScript, puts a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.head(images.flatten(1)) / self.seen


def whole_script():
    torch.manual_seed(1)
    return torch.jit.script(Counts())


class Observed(Net):
    """Quantization aware training: observers get one range for each channel in the first pass."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao import quantization

            self.body.qconfig = quantization.get_default_qat_qconfig("fbgemm")
            quantization.prepare_qat(self.train(), inplace=True)


def state_of(loop):
    return {**dict(loop.parts.model.named_buffers()), **loop.parts.model.state_dict(), **loop.parts.full_precision()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Resizes, Caches, Scripted, Traced, whole_script, Observed, Queue, Helped])
def test_it_trains_as_in_a_plain_loop(make, monkeypatch):
    net, expected = in_plain_torch(make, monkeypatch)
    for mode in MODES:
        if make is Observed and mode != "fp32":  # torch has no kernel for it
            with pytest.raises(ConfigError, match="fail on the first batch"):
                trained(make, monkeypatch, f"precision={mode}")
            continue
        loop, losses = trained(make, monkeypatch, f"precision={mode}")
        if mode == "fp32":
            assert losses == expected
            found = state_of(loop)
            assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())
            assert [*loop.parts.model.state_dict()] == [*net.state_dict()]
        else:
            assert losses == pytest.approx(expected, rel=0.05), mode


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Resizes, Caches, Scripted, Traced, whole_script, Observed])
def test_a_resumed_run_is_the_undisturbed_run(make, monkeypatch):
    for mode in ("fp32", "fp16_dynamic")[: 1 if make is Observed else 2]:
        (whole, losses), (again, same) = (
            trained(make, monkeypatch, f"precision={mode}", resumed=resumed) for resumed in (False, True)
        )
        assert losses == same, mode
        first, second = state_of(whole), state_of(again)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], value) for name, value in second.items()), mode
    assert not whole.found.doubts


class Waits(Net):
    """As `Thaws`, as its error advises."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, images):
        if self.training:
            self.passes += 1
        with torch.set_grad_enabled(bool(self.passes > 3)):
            hidden = self.features(images)
        return self.head(hidden)


def test_what_is_computed_without_gradients_at_first_trains_as_in_a_plain_loop(monkeypatch):
    net, expected = in_plain_torch(Waits, monkeypatch, fused=False)  # fused, torch needs every gradient
    loop, losses = trained(Waits, monkeypatch, "precision=fp32")
    assert losses == expected
    assert torch.equal(loop.parts.model.body.weight, net.body.weight)
