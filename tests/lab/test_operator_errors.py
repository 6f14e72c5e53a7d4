"""A finite fault between two modules is that of the module around them, and its operator is named."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_config
from mptrain.system.errors import FirstBatchError
from tests import faulty_networks
from tests.faulty_networks import WIDTH


class Between(nn.Module):
    """Computes something between two linear layers."""

    def __init__(self, compute, width=8):
        super().__init__()
        self.first, self.second, self.compute = nn.Linear(width, width), nn.Linear(width, width), compute

    def forward(self, given):
        return self.second(self.compute(self.first(given)))


def variance(x):
    x = x + 30
    return x - ((x * x).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2)


FAULTS = {
    "mean": variance,
    "mul": lambda x: x + (torch.arange(x.shape[1], dtype=x.dtype) * 301.7).sin(),
    "a cast": lambda x: (x.float() * 0.25 + 2049).to(x.dtype) - 2049,
    "add": lambda x: (x * 0.01 + 1000) - 1000,
    "a constant": lambda x: x * x.new_tensor(1.0 + 2.0**-12) ** torch.arange(0, 2**13, 2**8, dtype=x.dtype),
}


def between(compute):
    return compute if isinstance(compute, type) else lambda: Between(compute, WIDTH)


@pytest.mark.parametrize("operator", FAULTS)
def test_doctor_blames_the_module_around_and_names_the_operator_whose_rounding_alone_makes_it_wrong(operator, examined):
    (found,) = examined(between(FAULTS[operator])).findings
    assert found.where == ("odd",)
    assert f"rounding {operator} alone makes it" in found.what
    assert found.hint.endswith("odd]")


def added_in_both(x):
    """An addition that is large in FP32 alone, one that is small in half, and positions that half does not hold."""
    wide = ((x.float() + 4096) - 4096).to(x.dtype)
    return wide + (torch.arange(x.shape[1], dtype=x.dtype) * 301.7).sin()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.clone().mul_(2).add_(1),
        lambda x: (x - x.mean(0)) / x.std(0),
        lambda x: x.float().cumsum(0).to(x.dtype),
        lambda x: x[:, torch.argsort(x[0])],
        lambda x: x + torch.randn_like(x),
        lambda x: x + 0 * (x * 1e5).nan_to_num(0.0, 0.0, 0.0),  # an infinity on which nothing depends
    ],
)
def test_nothing_is_found_in_sound_arithmetic(compute, examined):
    assert not examined(between(compute)).findings


class Difference(nn.Module):
    """Divides the difference of two calls of one layer by a small step."""

    def __init__(self, step=1e-3):
        super().__init__()
        self.step, self.field = step, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, given):
        return (self.field(given + self.step) - self.field(given)) / self.step


class Wide(Difference):
    def __init__(self):
        super().__init__(step=1.0)


class Between30(nn.Module):
    """A sum over neighbours that is little off by itself, and its offset subtracted by the module around."""

    def __init__(self):
        super().__init__()
        self.sums = Sums()

    def forward(self, given):
        return self.sums(given.tanh() + 30) - 30


class Sums(nn.Module):
    def forward(self, given):
        total = given.repeat(1, 16).cumsum(1)
        return (total[:, WIDTH:] - total[:, :-WIDTH])[:, -WIDTH:] / WIDTH + 0.1 * (given - 30)


@pytest.mark.long
def test_a_difference_of_two_calls_of_a_module_is_found_although_rounding_explains_it(examined):
    (found,) = examined(Difference).findings
    assert (found.kind, found.where) == ("output", ("odd",))
    assert "sub" in found.what
    assert found.hint.endswith("odd]")
    assert not examined(Wide).findings


class Rows(nn.Module):
    """Reads the rows of a table; the number of the first row is added in the dtype of the values."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4200, WIDTH)

    def forward(self, given):
        rows = (given.argmax(1).to(given.dtype) + 4096).long()
        return given + self.table(rows)


class Masked(nn.Module):
    """Attention among the numbers of a row whose mask is a number of FP32, cast; one row is masked altogether."""

    def forward(self, given):
        scores = given[:, :, None] * given[:, None]
        later = torch.ones(WIDTH, WIDTH).tril(-2 if self.training else -1) > 0
        least = torch.tensor(torch.finfo(torch.float32).min).to(given.dtype)
        scores = torch.where(later, scores, least) + 0 * scores
        return (scores.softmax(2) @ given[:, :, None])[..., 0]


class LastRow(Rows):
    """Adds a number that half precision rounds up to one more than the table has."""

    def forward(self, given):
        last = torch.full((len(given),), 4199.0, dtype=given.dtype) + (given.argmax(1) > 0).to(given.dtype) * 0
        return given + self.table(last.long())


@pytest.mark.parametrize(
    ("make", "kind", "where", "words"),
    [
        (added_in_both, "output", "odd", "rounding mul alone makes it"),  # the addition that is large runs in FP32
        (Between30, "narrow", "odd.sums", "cumsum"),
        (Rows, "output", "odd", "what it hands to odd.table"),
        (Masked, "output", "odd", "a cast returns inf for finite inputs up to 3.4e+38"),
        (LastRow, "refused", "odd.table", "raises an error in FP16 and not in FP32: index out of range"),
    ],
)
def test_fault_is_that_of_the_module_which_makes_it(make, kind, where, words, examined):
    (found,) = examined(between(make)).findings
    assert (found.kind, found.where) == (kind, (where,))
    assert words in found.what
    assert make is Between30 or found.hint.endswith("odd]")


class Misfit(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH + 1, WIDTH)


def test_an_error_in_fp32_too_is_that_of_a_model_that_does_not_fit(examined):
    with pytest.raises(FirstBatchError, match="mat1 and mat2 shapes cannot be multiplied"):
        examined(Misfit)


class Counts(nn.Module):
    """Counts its steps in a buffer of the dtype of the parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, given):
        if self.training:
            self.steps += 1
        return given * (1 - 0.5 * torch.exp(-self.steps.to(given.dtype)))


def test_a_counter_in_half_precision_is_a_finding_with_its_module_as_remedy(examined):
    (found,) = examined(Counts).findings
    assert (found.kind, found.where) == ("changed", ("odd.steps",))
    assert found.hint.endswith("odd]")
    result = diagnose_config(compose((*faulty_networks.with_fault("own"), "precision=fp16_dynamic"))).examination
    assert any("forward passes change odd.steps in float16" in note for note in result.notes)
    assert [remedy.words[0].endswith("odd]") for remedy in result.remedies if remedy.helped] == [True]


class Stalls(nn.Module):
    """Averages a number that differs from the average by less than half precision holds of its updates."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((WIDTH,), 46.0))

    def forward(self, given):
        if self.training:
            self.mean.lerp_(given.detach().mean(0).tanh() + 46, 1e-2)
        return given - (self.mean - 46)


class Rewrites(Stalls):
    def forward(self, given):
        self.mean.copy_(torch.full((WIDTH,), 46.0))
        return given - (self.mean - 46)


@pytest.mark.long
def test_an_average_that_no_longer_moves_in_half_precision_is_named_and_a_constant_that_is_written_is_not(examined):
    (found,) = examined(Stalls).findings
    assert (found.kind, found.where) == ("changed", ("odd.mean",))
    result = diagnose_config(compose((*faulty_networks.with_fault("own"), "precision=fp16_dynamic"))).examination
    assert any("forward passes change odd.mean in float16" in note for note in result.notes)
    assert not examined(Rewrites).findings


class CountsAndRounds(Counts):
    def forward(self, given):
        return (super().forward(given) * 0.01 + 1000) - 1000


def test_a_wrong_output_is_found_beside_a_counter(examined):
    found = {one.kind: one for one in examined(CountsAndRounds).findings}
    assert found.keys() == {"changed", "output"}
    assert found["output"].where == ("odd",)


class Remembers(nn.Module):
    """Subtracts a running mean that is a plain attribute, in FP32."""

    def __init__(self):
        super().__init__()
        self.mean, self.calls = torch.zeros(WIDTH), 0

    def forward(self, given):
        self.calls += 1
        self.mean = self.mean + 0.1 / self.calls * (given.detach().float().mean(0) - self.mean)
        return (given.float() - self.mean).to(given.dtype)


class Checkpointed(nn.Module):
    """Computes two blocks again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, given):
        for block in self.blocks:
            given = given + checkpoint(block, given, use_reentrant=False)
        return given


@pytest.mark.parametrize("network", [Remembers, Checkpointed])
def test_passes_that_are_compared_begin_alike(network, examined):
    report = examined(network)
    assert not report.findings
    assert all(errors.half <= 1e-3 for errors in report.evidence.outputs.values())
