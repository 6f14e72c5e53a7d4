"""An infinity that neither the loss nor a gradient uses is a note, whatever module returns it; one that is used is a fault."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_config
from mptrain.lab.doctor.check import check_scaling
from tests.faulty_networks import WIDTH


class Scores(nn.Module):
    """Returns numbers beyond the range of FP16 beside its output."""

    def __init__(self):
        super().__init__()
        self.main, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, given):
        scores = torch.exp(self.aside(given).abs() * 4 + 16)
        return self.main(given), {"scores": scores, "sum": scores.sum(1)}


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Scores()

    def forward(self, given):
        return self.inner(given)[0]


class DropsDetached(Drops):
    def forward(self, given):
        main, aside = self.inner(given)
        with torch.no_grad():
            self.shown = aside["scores"].log()
        return main


class Divides(Drops):
    """Makes zeros where half precision has infinities."""

    def forward(self, given):
        main, aside = self.inner(given)
        return main + 3e7 / aside["scores"].mean(1, keepdim=True)


class Ranks(Drops):
    """Chooses the largest, of which half precision has several."""

    def forward(self, given):
        main, aside = self.inner(given)
        return main * (1 + aside["scores"].argmax(1, keepdim=True))


@pytest.mark.parametrize("precision", ["fp16_dynamic", "amp_dynamic"])
@pytest.mark.parametrize("network", [Drops, DropsDetached])
def test_what_nothing_uses_is_a_note(network, precision, words_of):
    config = compose(words_of(network, f"precision={precision}"))
    report = check_scaling(config, lambda _: None)
    assert not report.findings
    assert "odd.inner: values are not finite in float16, which changes neither loss nor gradients" in report.notes
    found = diagnose_config(config).examination
    assert (found.cause, found.also) == ("none", ())
    assert any(note.startswith("exp in odd.inner (Scores) returns inf in float16") for note in found.notes)


@pytest.mark.long
@pytest.mark.parametrize("network", [Divides, Ranks])
def test_what_the_loss_depends_on_is_a_fault_although_the_loss_stays_finite(network, words_of):
    config = compose(words_of(network, "precision=fp16_dynamic"))
    assert any(one.where == ("odd.inner",) for one in check_scaling(config, lambda _: None).findings)
    found = diagnose_config(config).examination
    assert (found.cause, found.module, found.operator) == ("forward", "odd.inner", "exp")
