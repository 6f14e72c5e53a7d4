"""Deep Speech 2: its published size, and that an utterance is heard the same whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mptrain.precision.upcast import Upcast
from mptrain.workloads.speech.models.deepspeech2 import MaskedBatchNorm, Recurrent, RowConvolution, deepspeech2
from tests.loops import each

LENGTHS = torch.tensor([31, 8, 1, 20])


def small(**changes):
    choices = {"channels": 3, "hidden_size": 8, "layers": 2, **changes}
    return deepspeech2(vocabulary_size=6, feature_size=20, **choices)


def padded(seed=0):
    features = torch.randn(4, 31, 20, generator=torch.Generator().manual_seed(seed))
    return features.masked_fill((torch.arange(31) >= LENGTHS[:, None])[:, :, None], 0.0)


@pytest.mark.parametrize(
    ("vocabulary_size", "changes", "parameters"),
    [
        # The defaults of deepspeech.pytorch: 5 layers of 800 units and 29 labels.
        (29, {}, 41_187_968),
        # Issue 608 of that project: 7 layers of 768 units and 73 labels have "around 52 million".
        (73, {"layers": 7, "hidden_size": 768}, 52_434_464),
        # Micikevicius et al. 2018, section 4.3: 3 layers and a row convolution have about 115 million; their width is not told, and 2560 is the one of Amodei et al. for that.
        (29, {"layers": 3, "hidden_size": 2560, "bidirectional": False, "lookahead": 19}, 108_818_208),
    ],
)
def test_parameters_are_as_many_as_published(vocabulary_size, changes, parameters):
    with torch.device("meta"):
        model = deepspeech2(vocabulary_size=vocabulary_size, feature_size=161, **changes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@each("bins", [1, 20, 21])
@each("frames", [1, 2, 5, 12])
def test_sounds_smaller_than_a_kernel_run_forward_and_backward(bins, frames):
    model = deepspeech2(vocabulary_size=6, feature_size=bins, channels=8, hidden_size=4, layers=1)
    logits, lengths = model(torch.randn(2, frames, bins), torch.tensor([frames, 1]))
    logits.sum().backward()
    assert logits.shape[1] == int(lengths[0]) == (frames + 1) // 2
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "changes", [{}, {"cell": "relu"}, {"cell": "tanh"}, {"bidirectional": False, "lookahead": 3}], ids=str
)
def test_an_utterance_has_the_same_logits_alone_and_padded(changes):
    model, features = small(**changes), padded()
    model(features, LENGTHS)  # so that running statistics are not those of the beginning
    model.eval()
    together, lengths = model(features, LENGTHS)
    assert lengths.tolist() == [16, 4, 1, 10]
    for row, length in enumerate(LENGTHS.tolist()):
        alone, own = model(features[row : row + 1, :length], LENGTHS[row : row + 1])
        assert alone.shape[1] == int(own) == int(lengths[row])
        torch.testing.assert_close(together[row, : int(own)], alone[0], atol=1e-6, rtol=1e-5)


def test_more_padding_changes_no_statistics_or_gradients():
    def trained(features):
        torch.manual_seed(1)
        model = small()
        logits, lengths = model(features, LENGTHS)
        mask = (torch.arange(logits.shape[1]) < lengths[:, None])[:, :, None]
        logits.square().masked_fill(~mask, 0.0).sum().backward()
        return model

    one, other = trained(padded()), trained(torch.cat([padded(), torch.zeros(4, 13, 20)], 1))
    for (name, buffer), same in zip(one.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(buffer, same, msg=name)
    for (name, parameter), same in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, same.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_padding_is_of_no_consequence_behind_the_first_norm():
    norm, mask = MaskedBatchNorm(3), torch.tensor([[True, True, False], [True, False, False]])
    sound = torch.randn(2, 3, 3)
    dirty = sound.masked_fill(~mask[:, None], float("inf"))
    assert torch.equal(norm(dirty, mask), norm(sound, mask))
    assert norm.running_mean.isfinite().all()
    valid = norm(sound, mask).transpose(1, 2)[mask]
    torch.testing.assert_close(valid.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(valid.var(0, correction=0), torch.ones(3), atol=1e-2, rtol=0)


def test_masked_norm_without_padding_is_torchs_own():
    own, torchs = MaskedBatchNorm(3), nn.BatchNorm2d(3)
    sound, mask = torch.randn(4, 3, 5, 7) * 3 + 1, torch.ones(4, 7, dtype=torch.bool)
    for _ in range(2):
        torch.testing.assert_close(own(sound, mask), torchs(sound), atol=1e-5, rtol=1e-5)
    for name, buffer in torchs.named_buffers():
        torch.testing.assert_close(getattr(own, name), buffer)
    torch.testing.assert_close(own.eval()(sound, mask), torchs.eval()(sound), atol=1e-5, rtol=1e-5)


def test_masked_norm_of_one_place_and_of_large_halves_is_finite():
    norm = MaskedBatchNorm(2)
    one = norm(torch.randn(1, 2, 1), torch.ones(1, 1, dtype=torch.bool))
    assert one.isfinite().all()
    assert norm.running_var.isfinite().all()
    large = torch.full((4, 2, 50), 60000.0).half()
    large[:, :, ::2] = -60000.0  # squares and sums of these are inf in FP16
    normal = norm(large, torch.ones(4, 50, dtype=torch.bool))
    assert normal.dtype == torch.float16
    assert normal.abs().mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("cell", ["gru", "relu", "tanh"])
def test_two_directions_are_those_of_packed_sequences(cell):
    layer = Recurrent(5, 7, cell, bidirectional=True, normalised=False)
    kinds = {"gru": nn.GRU, "relu": nn.RNN, "tanh": nn.RNN}
    extra = {} if cell == "gru" else {"nonlinearity": cell}
    packed = kinds[cell](5, 7, batch_first=True, bidirectional=True, **extra)
    with torch.no_grad():
        for (name, parameter), (_, reverse) in zip(
            layer.onward.named_parameters(), layer.backward_.named_parameters(), strict=True
        ):
            getattr(packed, name).copy_(parameter)
            getattr(packed, f"{name}_reverse").copy_(reverse)
    sequence, lengths = torch.randn(3, 6, 5), torch.tensor([6, 1, 4])
    expected, _ = pad_packed_sequence(
        packed(pack_padded_sequence(sequence, lengths, batch_first=True, enforce_sorted=False))[0], batch_first=True
    )
    mask = torch.arange(6) < lengths[:, None]
    heard = layer(sequence, mask, lengths).masked_fill(~mask[:, :, None], 0.0)
    torch.testing.assert_close(heard, expected[:, :, :7] + expected[:, :, 7:])


def test_a_row_convolution_sees_frames_ahead_and_none_behind():
    rows = RowConvolution(1, 2)
    nn.init.ones_(rows.rows.weight)
    assert rows(torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 4, 1)).flatten().tolist() == [111, 1110, 1100, 1000]


def test_half_precision_is_half_from_end_to_end():
    model, features = small(), padded()
    model(features, LENGTHS)
    expected, _ = model.eval()(features, LENGTHS)
    half = model.half()
    for module in half.modules():
        if isinstance(module, MaskedBatchNorm):
            module.float()
    with Upcast():
        heard, _ = half(features.half(), LENGTHS)
    assert heard.dtype == torch.float16
    valid = torch.arange(16) < ((LENGTHS + 1) // 2)[:, None]
    assert (heard.float() - expected)[valid].abs().max() < 0.02


@each("kind", [nn.GRU, nn.LSTM, nn.RNN])
@each("bidirectional", [False, True])
def test_packed_sequences_in_fp16_agree_up_to_rounding(kind, bidirectional):
    network = kind(6, 5, num_layers=2, bidirectional=bidirectional, batch_first=True)
    sequence, lengths = torch.randn(3, 7, 6).half(), torch.tensor([7, 1, 4])

    def run(network, sequence):
        output, _ = network(pack_padded_sequence(sequence, lengths, batch_first=True, enforce_sorted=False))
        values, _ = pad_packed_sequence(output, batch_first=True)
        gradients = torch.autograd.grad(values.float().square().sum(), list(network.parameters()))
        return values, gradients

    network.half().float()  # the same weights in both
    expected, slopes = run(network, sequence.float())
    with Upcast():
        values, gradients = run(network.half(), sequence)
    assert values.dtype == torch.float16
    torch.testing.assert_close(values.float(), expected, atol=5e-3, rtol=1e-2)
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient.float(), slope, atol=3e-2, rtol=3e-2)
    with Upcast(), torch.autocast("cpu", dtype=torch.float16):
        _, gradients = run(network.float(), sequence.float())
    assert all(gradient.isfinite().all() for gradient in gradients)
