"""One BatchNorm layer over the parts of a batch that ranks have, which are threads, and over the whole of it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from mptrain.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from tests.pretended_ranks import each_rank


class OfSequences(nn.BatchNorm1d):
    """The layer with inputs of three dimensions."""


#: Of nine samples of five channels.
SHAPES = {
    nn.BatchNorm1d: (9, 5),
    OfSequences: (9, 5, 12),
    nn.BatchNorm2d: (9, 5, 4, 3),
    nn.BatchNorm3d: (9, 5, 2, 3, 2),
}
PARTS = (2, 6, 1)
OPTIONS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]


def layer_of(kind, **more):
    layer = kind(5, **more)
    if layer.affine:
        nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    return layer


def over_ranks(layer, x, grad):
    """Answer, gradient of the input, of the parameters, and buffers of each of several ranks."""

    def one(ranks):
        own = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(layer)), ranks)[0]
        assert type(copy.deepcopy(own)) is SyncBatchNorm
        part = x.split(PARTS)[ranks.rank].clone().requires_grad_()
        answer = own(part)
        with torch.autograd.set_multithreading_enabled(False):  # a device's one thread would wait for the other ranks'
            answer.backward(grad.split(PARTS)[ranks.rank])
        return answer.detach(), part.grad, [p.grad for p in own.parameters()], dict(own.named_buffers())

    return each_rank(len(PARTS), one)


def whole(layer, x, grad):
    exact = copy.deepcopy(layer).double()
    x = x.double().requires_grad_()
    answer = exact(x)
    answer.backward(grad.double())
    return answer.detach(), x.grad, [p.grad for p in exact.parameters()], dict(exact.named_buffers())
