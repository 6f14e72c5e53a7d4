"""Last layers that do not look at the whole vocabulary in training, against layers and sums that do."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.precision.upcast import Upcast
from mptrain.workloads.language.models import softmaxes
from mptrain.workloads.language.models.softmaxes import AdaptiveSoftmax, SampledSoftmax, draw, inclusion, log_uniform

HALF = [torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


def given_and_targets(vocabulary, places=(3, 5), features=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*places, features, generator=generator), torch.randint(vocabulary, places, generator=generator)


class TestSampler:
    def test_it_is_zipfs_law_and_sums_up_to_one(self):
        probabilities = log_uniform(1000, CPU)
        assert probabilities.double().sum().item() == pytest.approx(1.0, abs=1e-6)
        assert probabilities[0].item() == pytest.approx(math.log(2) / math.log(1001))
        assert probabilities[999].item() == pytest.approx(math.log(1001 / 1000) / math.log(1001), rel=1e-4)
        assert (probabilities.diff() < 0).all()
        assert inclusion(torch.tensor([1e-45, 1e-30]), torch.tensor(1e-20)).log().isfinite().all()
        for samples in (1, 500, 999):
            tokens, time = draw(probabilities, samples)
            assert len(set(tokens.tolist())) == samples
            assert time > 0

    def test_each_token_is_drawn_as_often_as_is_expected_of_it(self):
        """The mean of what is expected, given the time, is the share of draws that have the token."""
        probabilities, drawn, expected, rounds = log_uniform(60, CPU), torch.zeros(60), torch.zeros(60), 2000
        for _ in range(rounds):
            tokens, time = draw(probabilities, 12)
            drawn[tokens] += 1
            expected += inclusion(probabilities, time)
        deviation = (expected / rounds * (1 - expected / rounds) / rounds).sqrt()
        assert ((drawn - expected).abs() / rounds < 5 * deviation).all()
        assert drawn[0] > 2 * drawn[30] > 0

    def test_sums_over_what_was_drawn_have_no_bias(self):
        """Horvitz and Thompson's estimate of a softmax's denominator."""
        probabilities, terms = log_uniform(60, CPU), torch.randn(60).exp()
        estimates = []
        for _ in range(1500):
            tokens, time = draw(probabilities, 20)
            estimates.append((terms[tokens] / inclusion(probabilities[tokens], time)).sum())
        found = torch.stack(estimates)
        assert abs(found.mean() - terms.sum()) < 5 * found.std() / len(found) ** 0.5


class TestSampled:
    def test_its_loss_by_hand(self):
        layer, (given, targets) = SampledSoftmax(6, 20, 8), given_and_targets(20)
        torch.manual_seed(3)
        losses, best = layer(given, targets)
        torch.manual_seed(3)
        tokens, time = draw(log_uniform(20, CPU), 8)
        chances = inclusion(log_uniform(20, CPU), time).log().double()
        corrected = (given @ layer.weight.t() + layer.bias).double() - chances
        assert best is None
        assert losses.dtype == torch.float32
        hits = 0
        for place in range(15):
            scores, right = corrected.flatten(0, 1)[place], targets.flatten()[place].item()
            others = [token for token in tokens.tolist() if token != right]
            hits += len(others) < 8
            expected = torch.logsumexp(scores[[right, *others]], 0) - scores[right]
            assert losses.flatten()[place].item() == pytest.approx(expected.item(), rel=1e-5)
        assert 0 < hits < 15  # the right token was among those drawn at some places, and was not counted twice

    def test_it_learns_the_probabilities_of_the_whole_softmax(self):
        """A table of one distribution, of which each loss sees 6 of 30 tokens."""
        layer = SampledSoftmax(1, 30, 6)
        wanted = torch.softmax(torch.randn(30), 0)
        optimizer = torch.optim.Adam([layer.bias], lr=0.05)
        for step in range(1000):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 1000)
            targets = torch.multinomial(wanted, 256, replacement=True)[None]
            loss = layer(torch.zeros(1, 256, 1), targets)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = layer.bias.detach().softmax(0)
        assert (found - wanted).abs().sum() / 2 < 0.05
        assert (torch.full((30,), 1 / 30) - wanted).abs().sum() / 2 > 0.2  # what it knew before

    @pytest.mark.parametrize("dtype", HALF)
    def test_half_precision_draws_the_same_tokens_and_float32_losses(self, dtype):
        layer, (given, targets) = SampledSoftmax(6, 5000, 64), given_and_targets(5000)
        torch.manual_seed(5)
        losses, _ = layer(given, targets)
        after = torch.get_rng_state()
        layer.to(dtype)
        torch.manual_seed(5)
        with Upcast():
            half, _ = layer(given.to(dtype), targets)
        assert torch.equal(torch.get_rng_state(), after)
        assert half.dtype == torch.float32
        assert (half - losses).abs().max() < 16 * torch.finfo(dtype).eps

    @pytest.mark.parametrize("dtype", HALF)
    def test_one_drawn_token_that_is_right_everywhere_costs_nothing(self, dtype):
        layer = SampledSoftmax(4, 2, 1).to(dtype)
        given = torch.randn(2, 500, 4).to(dtype).requires_grad_()
        targets = torch.zeros(2, 500, dtype=torch.int64)
        with Upcast():
            losses = torch.cat([layer(given, targets)[0] for _ in range(8)])
            (losses.mean() * 1024).backward()
        assert losses.isfinite().all()
        assert (losses == 0).any()
        assert (losses > 0).any()
        assert given.grad.isfinite().all()
        assert layer.weight.grad.isfinite().all()

    def test_gradients_of_a_frequent_token_are_summed_up_in_fp32(self):
        """8,192 terms below 1: a sum in FP16 stops at 2,048 times the last digit of such a term."""
        found = []
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(0)
            layer = SampledSoftmax(4, 1000, 10)
            nn.init.zeros_(layer.bias)
            layer.to(dtype)
            with Upcast():
                layer(torch.zeros(8, 1024, 4, dtype=dtype), torch.full((8, 1024), 999))[0].sum().backward()
            found.append(layer.bias.grad[999].item())
        assert found[0] < -4096
        assert found[1] == pytest.approx(found[0], rel=2e-3)


class TestAdaptive:
    def pair(self, vocabulary=40, cutoffs=(8, 20), shrink=2.0, features=12):
        own = AdaptiveSoftmax(features, vocabulary, cutoffs, shrink)
        torchs = nn.AdaptiveLogSoftmaxWithLoss(features, vocabulary, list(cutoffs), shrink)
        torchs.load_state_dict({name.replace("tails", "tail"): value for name, value in own.state_dict().items()})
        return own, torchs

    @pytest.mark.parametrize("cutoffs", [(8, 20), (1,), (39,), (5, 6, 7)])
    def test_it_is_torchs_in_fp32_forward_and_backward(self, cutoffs):
        own, torchs = self.pair(cutoffs=cutoffs)
        given, targets = given_and_targets(40, features=12)
        losses, best = own(given, targets)
        expected = torchs(given.flatten(0, 1), targets.flatten())
        assert best is None
        torch.testing.assert_close(losses.flatten(), -expected.output)
        losses.mean().backward()
        expected.loss.backward()
        for one, other in zip(own.parameters(), torchs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, torch.zeros_like(one) if other.grad is None else other.grad)
        torch.testing.assert_close(own(given).flatten(0, 1), torchs.log_prob(given.flatten(0, 1)))
        evaluated, best = own.eval()(given, targets)
        torch.testing.assert_close(evaluated, losses)
        assert torch.equal(best.flatten(), torchs.predict(given.flatten(0, 1)))

    @pytest.mark.parametrize("place", [0, 10, 30])
    def test_a_batch_of_one_cluster_leaves_others_without_gradients(self, place):
        own, _ = self.pair()
        own(torch.randn(2, 3, 12), torch.full((2, 3), place))[0].mean().backward()
        asked = [bool(tail[1].weight.grad.any()) for tail in own.tails]
        assert asked == [place == 10, place == 30]
        assert all(parameter.grad is not None for parameter in own.parameters())

    @pytest.mark.parametrize("dtype", HALF)
    def test_its_softmaxes_are_fp32_whatever_it_is_cast_to(self, dtype):
        own, torchs = self.pair()
        given, targets = given_and_targets(40, features=12)
        half, torchs = own.to(dtype), torchs.to(dtype)
        with Upcast():
            losses, _ = half(given.to(dtype), targets)
            logarithms = half(given.to(dtype))
        expected = -torchs.float()(given.to(dtype).float().flatten(0, 1), targets.flatten()).output
        assert losses.dtype == logarithms.dtype == torch.float32
        assert (losses.flatten() - expected).abs().max() < 8 * torch.finfo(dtype).eps
        assert logarithms.exp().sum(-1).flatten().tolist() == pytest.approx([1.0] * 15, abs=1e-5)


@pytest.mark.parametrize("size", [1, 30, 10**9])
def test_an_exact_softmax_is_the_same_in_parts(size, monkeypatch):
    monkeypatch.setattr(softmaxes, "SCORES_AT_A_TIME", size)
    layer, (given, targets) = SampledSoftmax(6, 10, 4).eval(), given_and_targets(10)
    losses, best = layer(given, targets)
    scores = layer(given)
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
    assert torch.equal(best, scores.argmax(-1))
