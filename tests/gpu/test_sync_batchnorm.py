"""BatchNorm over ranks with torch's CUDA kernels: the numbers of one rank, and no wait; the ranks are threads on one device."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.batch_norms import OPTIONS, SHAPES, layer_of, over_ranks, whole

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("more", OPTIONS, ids=str)
def test_ranks_have_the_numbers_of_one_and_wait_for_nothing(kind, dtype, more, no_waiting):
    layer = layer_of(kind, **more).cuda()
    x, grad = ((torch.randn(SHAPES[kind]) * 3 + 20).cuda().to(dtype), torch.randn(SHAPES[kind]).cuda().to(dtype))
    over_ranks(layer, x, grad)  # libraries are set up
    with no_waiting():
        found = over_ranks(layer, x, grad)
    answer, grad_x, grads, buffers = whole(layer, x, grad)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": max(4 * torch.finfo(dtype).eps, 2e-5)}
    torch.testing.assert_close(torch.cat([one[0] for one in found]), answer.to(dtype), **close)
    torch.testing.assert_close(torch.cat([one[1] for one in found]), grad_x.to(dtype), **close)
    for index, expected in enumerate(grads):
        torch.testing.assert_close(sum(one[2][index] for one in found), expected.float(), rtol=1e-4, atol=1e-4)
    for name, expected in buffers.items():
        torch.testing.assert_close(found[0][3][name].double(), expected.double(), rtol=1e-5, atol=1e-5)
