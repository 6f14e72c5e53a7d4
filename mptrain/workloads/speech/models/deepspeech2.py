"""Deep Speech 2 (Amodei et al. 2016): convolutions over time and frequency, recurrent layers, and logits of letters.

Padding has no effect: convolutions see zeros after the end of an utterance, BatchNorm excludes them, and backward
layers start at the end of each utterance, reversed on the device, so that the host needs no lengths.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.system.fields import BelowOneOrZero, NonNegativeInt, PositiveInt
from mptrain.workloads.text.subwords import lengths_mask, reverse_padded

#: Reduction of the number of frames: the stride of the first convolution along time.
STRIDE = 2

#: Kernel and stride of each convolution, in frequency bins and time frames (Amodei et al., table 5 and its text).
_CONVOLUTIONS = (((41, 11), (2, STRIDE)), ((21, 11), (2, 1)))

#: Upper limit of the clipped ReLU (Amodei et al., section 3.1); FP16 would allow any limit below 65504.
_CEILING = 20.0

#: Kind of recurrent layer: gated units, or plain units with ReLU or tanh.
Cell = Literal["gru", "relu", "tanh"]


class DeepSpeech2(nn.Module):
    """Speech recognition network Deep Speech 2: spectral features to logits of letters for CTC (Amodei et al. 2016).

    As in deepspeech.pytorch, all recurrent layers but the first normalise their inputs, the outputs of both directions
    are added, and the output layer has no bias. The defaults are also from there: 41,187,968 parameters for 161
    frequency bins and 29 letters, with PyTorch's default initialisation.

    Args:
        cell: Kind of recurrent layers: ``gru``, or plain units with ``relu`` or ``tanh``.
        hidden_size: Size of a recurrent layer's state in each direction.
        bidirectional: Layers also run backwards; False needs only the utterance so far.
        lookahead: Frames ahead that a row convolution after the recurrent layers sees (Amodei et al., section 3.7, for
            unidirectional layers); 0 for no row convolution.
        dropout: Dropout probability before each recurrent layer and the output layer.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        feature_size: int,
        channels: PositiveInt = 32,
        cell: Cell = "gru",
        hidden_size: PositiveInt = 800,
        layers: PositiveInt = 5,
        bidirectional: bool = True,
        lookahead: NonNegativeInt = 0,
        dropout: BelowOneOrZero = 0.0,
    ) -> None:
        super().__init__()
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        width, bins = 1, feature_size
        for kernel, stride in _CONVOLUTIONS:
            self.convolutions.append(nn.Conv2d(width, channels, kernel, stride))
            self.norms.append(MaskedBatchNorm(channels))
            width, bins = channels, (bins - 1) // stride[0] + 1
        sizes = [width * bins, *[hidden_size] * (layers - 1)]
        self.recurrent = nn.ModuleList(
            Recurrent(size, hidden_size, cell, bidirectional=bidirectional, normalised=number > 0)
            for number, size in enumerate(sizes)
        )
        self.lookahead = RowConvolution(hidden_size, lookahead) if lookahead else None
        self.norm = MaskedBatchNorm(hidden_size)
        self.letters = nn.Linear(hidden_size, vocabulary_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of every second frame, ``[N, ceil(T / 2), V]``, and how many are valid, int64 ``[N]``.

        The features are ``[N, T, F]``, zero-padded, and ``lengths`` the frames of each utterance, int64 ``[N]`` from 1
        to T.
        """
        sound = features.transpose(1, 2).unsqueeze(1)  # one channel of F x T
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            # Explicit padding, because oneDNN crashes on gradients of a kernel whose row sees only padding.
            (height, length), _ = _CONVOLUTIONS[number]
            sound = convolution(F.pad(sound, (length // 2, length // 2, height // 2, height // 2)))
            if number == 0:
                lengths = (lengths + STRIDE - 1) // STRIDE
                mask = lengths_mask(lengths, sound.shape[-1])
            # BatchNorm sets padding to zero, so the next convolution sees none.
            sound = F.hardtanh(norm(sound, mask), 0.0, _CEILING)
        sequence = sound.flatten(1, 2).transpose(1, 2)
        for layer in self.recurrent:
            sequence = layer(self.dropout(sequence), mask, lengths)
        if self.lookahead is not None:
            sequence = F.hardtanh(self.lookahead(sequence.masked_fill(~mask[:, :, None], 0.0)), 0.0, _CEILING)
        sequence = self.norm(sequence.transpose(1, 2), mask).transpose(1, 2)
        return self.letters(self.dropout(sequence)), lengths


class Recurrent(nn.Module):
    """Recurrent layer over padded sequences, in one direction or with the outputs of both directions added.

    If ``normalised``, each input feature is normalised over the frames of the batch (sequence-wise BatchNorm).
    """

    def __init__(self, input_size: int, hidden_size: int, cell: Cell, *, bidirectional: bool, normalised: bool) -> None:
        super().__init__()
        self.norm = MaskedBatchNorm(input_size) if normalised else None
        self.onward = _recurrent(cell, input_size, hidden_size)
        self.backward_ = _recurrent(cell, input_size, hidden_size) if bidirectional else None

    def forward(self, sequence: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Run the layer over ``[N, T, C]`` to ``[N, T, H]`` from a zero state; the output at padding is meaningless.

        ``mask``, bool ``[N, T]``, marks valid frames, and ``lengths``, int64 ``[N]``, counts them.
        """
        if self.norm is not None:
            sequence = self.norm(sequence.transpose(1, 2), mask).transpose(1, 2)
        onward: Tensor = self.onward(sequence)[0]
        if self.backward_ is None:
            return onward
        turned = reverse_padded(sequence, lengths)
        return onward + reverse_padded(self.backward_(turned)[0], lengths)


class RowConvolution(nn.Module):
    """Row convolution: each feature becomes a weighted sum of itself and its values in some frames ahead.

    Unidirectional recurrent layers get a little future context from it (Amodei et al. 2016, section 3.7).
    """

    def __init__(self, channels: int, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.rows = nn.Conv1d(channels, channels, ahead + 1, groups=channels, bias=False)

    def forward(self, sequence: Tensor) -> Tensor:
        """Mix each frame with those ahead, each feature by itself, ``[N, T, C]`` in and out, with zeros in padding."""
        rows: Tensor = self.rows(F.pad(sequence.transpose(1, 2), (0, self.ahead)))
        return rows.transpose(1, 2)


def _recurrent(cell: Cell, input_size: int, hidden_size: int) -> nn.RNNBase:
    if cell == "gru":
        return nn.GRU(input_size, hidden_size, batch_first=True)
    return nn.RNN(input_size, hidden_size, nonlinearity=cell, batch_first=True)


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of each channel over all valid positions of all sequences in a batch, without padding.

    Computation is in float32, and outputs have the dtype of the inputs. The class is derived from torch's BatchNorm, so
    that ``keep_fp32: [norms]`` (precision option: layers that stay in FP32) applies to it.
    """

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]  # noqa: A002 (torch's name)
        """Normalise ``[N, C, ..., T]`` at the valid positions, bool ``[N, T]``, at least one; padding becomes 0."""
        shape = [1, -1] + [1] * (input.ndim - 2)
        valid = mask.view(len(mask), *[1] * (input.ndim - 2), -1)
        wide = input.float()
        if self.training:
            mean, variance = self._moments(wide, valid)
        else:
            mean, variance = self.running_mean.float(), self.running_var.float()  # type: ignore[union-attr]
        gain = self.weight.float() * torch.rsqrt(variance + self.eps)
        shift = self.bias.float() - mean * gain
        normal = wide * gain.view(shape) + shift.view(shape)
        return normal.masked_fill(~valid, 0.0).to(input.dtype)

    def _moments(self, wide: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each channel, and update the running ones as torch's BatchNorm does."""
        others = [axis for axis in range(wide.ndim) if axis != 1]
        places = valid.sum() * (wide[0, 0].numel() // wide.shape[-1])
        mean = wide.masked_fill(~valid, 0.0).sum(others) / places
        deviation = (wide - mean.view([1, -1] + [1] * (wide.ndim - 2))).masked_fill(~valid, 0.0)
        variance = deviation.square().sum(others) / places
        with torch.no_grad():  # in place, so that the caller can restore the buffers
            unbiased = variance * (places / (places - 1).clamp(min=1))
            for running, present in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.lerp_(present.to(running.dtype), self.momentum)  # type: ignore[union-attr, arg-type]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return mean, variance


#: Name in configurations.
deepspeech2 = DeepSpeech2
