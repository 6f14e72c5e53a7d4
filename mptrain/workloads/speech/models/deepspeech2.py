"""Deep Speech 2 (Amodei et al. 2016): convolutions over time and frequency, recurrent layers, and letters for each frame.

Padding changes nothing: convolutions see zeros behind the end of an utterance, BatchNorm leaves them out, and the layers
that read backwards begin at each utterance's own end. The last is done by turning utterances round within their lengths,
on the device, so that nothing needs the lengths on the host, as packed sequences would.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.fields import BelowOneOrZero, NonNegativeInt, PositiveInt
from mptrain.workloads.text.reversal import reverse_padded

#: Frames that become one: the stride of the first convolution along time.
STRIDE = 2

#: Kernel and stride of each convolution, in bins of frequency and frames of time (Amodei et al., table 5 and its text).
_CONVOLUTIONS = (((41, 11), (2, STRIDE)), ((21, 11), (2, 1)))

#: Where rectifiers are cut off (Amodei et al., section 3.1); in FP16 as good as anywhere below 65504.
_CEILING = 20.0

#: What each recurrent layer is made of: gated units, or plain ones with a rectifier or a hyperbolic tangent.
Cell = Literal["gru", "relu", "tanh"]


class DeepSpeech2(nn.Module):
    """From features to the logits of letters.

    As in deepspeech.pytorch, all recurrent layers but the first normalise what they are given, the two directions of one
    are added up, and the last layer has no bias. So are the defaults: 41,187,968 parameters for 161 bins of frequency and 29
    letters, in PyTorch's default initialisation.

    Args:
        vocabulary_size: Letters and the blank, V.
        feature_size: Numbers of a frame, F.
        channels: Of each convolution.
        cell: What the recurrent layers are made of.
        hidden_size: Numbers of a recurrent layer's state in each direction, H.
        layers: Recurrent layers.
        bidirectional: They read backwards, too; False needs no more of an utterance than what was said so far.
        lookahead: Frames ahead that a row convolution behind the recurrent layers sees (Amodei et al., section 3.7,
            for layers that do not read backwards); 0 leaves it out.
        dropout: Share of activations set to zero in training, before each recurrent layer and the last.
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
        """Logits of the letter, or blank, of each second frame.

        Args:
            features: ``[N, T, F]``, 0 where an utterance has ended.
            lengths: Frames of each utterance, int64 ``[N]`` from 1 to T.

        Returns:
            Logits ``[N, ceil(T / 2), V]``, and how many of them belong to each utterance, int64 ``[N]``.
        """
        sound = features.transpose(1, 2).unsqueeze(1)  # one channel of F x T
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            # Not the convolution's own padding: oneDNN crashes on gradients of kernels of which a row sees nothing else.
            (height, length), _ = _CONVOLUTIONS[number]
            sound = convolution(F.pad(sound, (length // 2, length // 2, height // 2, height // 2)))
            if number == 0:
                lengths = (lengths + STRIDE - 1) // STRIDE
                mask = torch.arange(sound.shape[-1], device=lengths.device) < lengths[:, None]
            # No padding is left for the next convolution to see: BatchNorm makes it zero.
            sound = F.hardtanh(norm(sound, mask), 0.0, _CEILING)
        sequence = sound.flatten(1, 2).transpose(1, 2)
        for layer in self.recurrent:
            sequence = layer(self.dropout(sequence), mask, lengths)
        if self.lookahead is not None:
            sequence = F.hardtanh(self.lookahead(sequence.masked_fill(~mask[:, :, None], 0.0)), 0.0, _CEILING)
        sequence = self.norm(sequence.transpose(1, 2), mask).transpose(1, 2)
        return self.letters(self.dropout(sequence)), lengths


class Recurrent(nn.Module):
    """A recurrent layer over sequences of different lengths, in one direction or the sum of two.

    Args:
        input_size: Numbers of a frame that comes in.
        hidden_size: Numbers of one that goes out, and of the state.
        cell: See `Cell`.
        bidirectional: Read backwards as well.
        normalised: Normalise each number over the frames of the batch before (sequence-wise BatchNorm).
    """

    def __init__(self, input_size: int, hidden_size: int, cell: Cell, *, bidirectional: bool, normalised: bool) -> None:
        super().__init__()
        self.norm = MaskedBatchNorm(input_size) if normalised else None
        self.onward = _recurrent(cell, input_size, hidden_size)
        self.backward_ = _recurrent(cell, input_size, hidden_size) if bidirectional else None

    def forward(self, sequence: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """What comes out at each frame; padding gets numbers that mean nothing.

        Args:
            sequence: ``[N, T, C]``.
            mask: Which frames are no padding, bool ``[N, T]``.
            lengths: How many those are, int64 ``[N]``.

        Returns:
            ``[N, T, H]``.
        """
        if self.norm is not None:
            sequence = self.norm(sequence.transpose(1, 2), mask).transpose(1, 2)
        onward: Tensor = self.onward(sequence)[0]
        if self.backward_ is None:
            return onward
        turned = reverse_padded(sequence, lengths)
        return onward + reverse_padded(self.backward_(turned)[0], lengths)


class RowConvolution(nn.Module):
    """Each number of a frame becomes a weighted sum of itself and the same number some frames ahead.

    Args:
        channels: Numbers of a frame.
        ahead: How many frames ahead it sees.
    """

    def __init__(self, channels: int, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.rows = nn.Conv1d(channels, channels, ahead + 1, groups=channels, bias=False)

    def forward(self, sequence: Tensor) -> Tensor:
        """From ``[N, T, C]``, 0 in padding, to the same shape."""
        rows: Tensor = self.rows(F.pad(sequence.transpose(1, 2), (0, self.ahead)))
        return rows.transpose(1, 2)


def _recurrent(cell: Cell, input_size: int, hidden_size: int) -> nn.RNNBase:
    if cell == "gru":
        return nn.GRU(input_size, hidden_size, batch_first=True)
    return nn.RNN(input_size, hidden_size, nonlinearity=cell, batch_first=True)


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of each channel over all places of all sequences in a batch, padding left out.

    So a sequence changes nothing by being padded. It computes in float32 whatever comes in, and answers in the dtype it
    was given; padding comes out as 0. A class of torch's own name for it, so that ``keep_fp32: [norms]`` means it too.
    """

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]  # noqa: A002 (torch's name)
        """Normalise.

        Args:
            input: ``[N, C, ..., T]``.
            mask: Which places are no padding, bool ``[N, T]``, at least one in the batch.

        Returns:
            Of the same shape and dtype.
        """
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
        """Mean and variance of each channel, which the running ones move towards as in torch's own BatchNorm."""
        others = [axis for axis in range(wide.ndim) if axis != 1]
        places = valid.sum() * (wide[0, 0].numel() // wide.shape[-1])
        mean = wide.masked_fill(~valid, 0.0).sum(others) / places
        deviation = (wide - mean.view([1, -1] + [1] * (wide.ndim - 2))).masked_fill(~valid, 0.0)
        variance = deviation.square().sum(others) / places
        with torch.no_grad():  # in place, so that whoever guards the buffers can put them back
            unbiased = variance * (places / (places - 1).clamp(min=1))
            for running, present in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.lerp_(present.to(running.dtype), self.momentum)  # type: ignore[union-attr, arg-type]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return mean, variance


#: Configurations name the class so.
deepspeech2 = DeepSpeech2
