"""Models that translate: padding changes nothing, stepping equals reading at once, and sizes are the published ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from mptrain.config.compose import compose
from mptrain.precision.upcast import Upcast
from mptrain.system.errors import ConfigError
from mptrain.workloads.text.subwords import lengths_mask
from mptrain.workloads.translation.models.lstm import lstm_translator
from mptrain.workloads.translation.models.masked_attention import attend, causal_mask
from mptrain.workloads.translation.models.transformer import positions, transformer_translator

HALF = [torch.float16, torch.bfloat16]
#: Three sentences and what is given of their translations.
LENGTHS = torch.tensor([5, 2, 1])


def lstm(**changed):
    torch.manual_seed(0)
    facts = {"source_vocabulary_size": 13, "target_vocabulary_size": 11, "width": 8, "layers": 3}
    return lstm_translator(**{**facts, **changed}).eval()


def transformer(**changed):
    torch.manual_seed(0)
    facts = {"source_vocabulary_size": 13, "target_vocabulary_size": 11, "width": 8, "heads": 2, "inner": 16}
    return transformer_translator(**{**facts, "layers": 2, "dropout": 0.0, "tied": False, **changed}).eval()


BUILD = {"lstm": lstm, "transformer": transformer}


def sentences(padding=0):
    generator = torch.Generator().manual_seed(0)
    source, given = (torch.randint(4, 11, (3, width), generator=generator) for width in (5, 4))
    return source.masked_fill(~lengths_mask(LENGTHS, 5), padding), given


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


class TestAttention:
    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_a_row_that_may_see_nothing_gives_zeros(self, dtype):
        query, key, value = (torch.randn(2, 3, 4).to(dtype).requires_grad_() for _ in range(3))
        keep = torch.tensor([[[True, True, False]], [[False, False, False]]])
        with Upcast():
            answer = attend(query, key, value, keep)
            answer.float().sum().backward()
        assert answer.dtype == dtype
        assert not answer[1].any()
        assert answer[0].all()
        for tensor in (query, key, value):
            assert tensor.grad.isfinite().all()
            assert not tensor.grad[1].any()

    def test_scores_of_any_size_give_finite_weights_in_half(self):
        query = torch.full((1, 1, 64), 30.0, dtype=torch.float16)
        key = torch.stack([torch.full((64,), 30.0), torch.full((64,), -30.0)])[None].half()
        with Upcast():
            assert (query @ key.transpose(1, 2)).tolist() == [[[57600.0, -57600.0]]]
            answer = attend(query * 1.5, key * 1.5, torch.tensor([[[1.0], [2.0]]]).half(), None)
        # 129,600 before the division would have been inf, and NaN behind the softmax.
        assert answer.tolist() == [[[1.0]]]

    def test_it_is_that_of_torch(self):
        query, key, value = (torch.randn(2, 4, 5, 6) for _ in range(3))
        keep = causal_mask(5, torch.device("cpu"))
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(attend(query, key, value, keep), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            attend(query, key, value, None), F.scaled_dot_product_attention(query, key, value), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("kind", BUILD)
class TestAnyTranslator:
    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_a_sentence_has_the_same_logits_alone_and_padded(self, kind, dtype):
        model = BUILD[kind]().to(dtype)
        source, given = sentences()
        with torch.no_grad(), Upcast():
            together = model(source, LENGTHS, given)
            for row, length in enumerate(LENGTHS.tolist()):
                alone = model(source[row : row + 1, :length], LENGTHS[row : row + 1], given[row : row + 1])
                tolerance = 1e-6 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=tolerance)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_padding_makes_no_bit_of_difference(self, kind, dtype):
        answers = []
        for padding in (0, 12):
            model = BUILD[kind]().to(dtype)
            source, given = sentences(padding)
            with Upcast():
                logits = model(source, LENGTHS, given)
                logits.square().sum().backward()
            assert not list(model.buffers())
            assert logits.isfinite().all()
            assert not model.source_embedding.weight.grad[padding].any()
            answers.append([logits, *(parameter.grad for parameter in model.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))

    def test_a_later_token_changes_no_earlier_logit(self, kind):
        model = BUILD[kind]()
        source, given = sentences()
        with torch.no_grad():
            before = model(source, LENGTHS, given)
            for place in range(4):
                other = given.clone()
                other[:, place] = 4 + (other[:, place] - 3) % 7
                after = model(source, LENGTHS, other)
                torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
                assert not torch.allclose(after[:, place], before[:, place], atol=1e-6)

    def test_every_word_of_the_source_and_their_order_matter(self, kind):
        model = BUILD[kind]()
        source, given = sentences()
        with torch.no_grad():
            before = model(source, LENGTHS, given)
            for place in range(5):
                other = source.clone()
                other[0, place] = 4 + (other[0, place] - 3) % 7
                assert not torch.allclose(model(other, LENGTHS, given)[0], before[0], atol=1e-6)
            assert not torch.allclose(model(source.flip(1), LENGTHS[:1].expand(3), given)[0], before[0], atol=1e-6)

    @pytest.mark.parametrize("mode", ["float32", "float16", "autocast"])
    def test_token_by_token_gives_the_logits_of_all_at_once(self, kind, mode):
        model = BUILD[kind]().to(torch.float16 if mode == "float16" else torch.float32)
        source, given = sentences()
        tolerance = 1e-5 if mode == "float32" else 2e-2
        with torch.no_grad(), Upcast(), torch.autocast("cpu", torch.float16, enabled=mode == "autocast"):
            expected = model(source, LENGTHS, given).float()
            state = model.encode(source, LENGTHS)
            assert all(len(tensor) == 3 for tensor in state.values())
            rows = torch.tensor([2, 0])
            for place in range(4):
                if place == 2:
                    state = {name: each[rows] for name, each in state.items()}
                    given, expected = given[rows], expected[rows]
                logits, state = model.step(given[:, place], state)
                torch.testing.assert_close(logits.float(), expected[:, place], rtol=0, atol=tolerance)

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("cast", [True, False])
    def test_it_learns_in_half_precision_and_under_autocast(self, kind, dtype, cast):
        model = BUILD[kind]().train()
        model = model.to(dtype) if cast else model
        source, given = sentences()
        with Upcast(), torch.autocast("cpu", dtype, enabled=not cast):
            logits = model(source, LENGTHS, given)
            logits.float().square().mean().backward()
        assert logits.dtype == dtype
        assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())


def published(name, source, target=None):
    facts = {"source_vocabulary_size": source, "target_vocabulary_size": target or source}
    with torch.device("meta"):
        return count(compose((f"model={name}",)).model.build(**facts, shared_vocabulary=target is None))


@pytest.mark.parametrize(("name", "layers"), [("seq2seq_3x1024", 3), ("seq2seq_5x1024", 5)])
def test_lstm_parameters_are_those_of_the_papers_layers(name, layers):
    """Micikevicius et al. 2018, section 4.4: 3 or 5 layers of 1024 LSTM in encoder and decoder, 100K and 40K words."""
    width, source, target = 1024, 100_000, 40_000

    def cell(given):
        return 4 * width * (given + width) + 8 * width

    encoder = 2 * cell(width) + cell(2 * width) + (layers - 2) * cell(width)
    decoder = cell(width) + (layers - 1) * cell(2 * width)
    bridge, attention = 2 * layers * width * (width + 1), width * width + width * (2 * width + 1)
    ends = (source + target) * width + target * (width + 1)
    assert published(name, source, target) == ends + encoder + decoder + bridge + attention


def test_base_transformer_parameters_are_those_of_the_paper():
    """Vaswani et al. 2017, section 3 and table 3 (65 million): attention without biases, a shared vocabulary of 37,000."""
    vocabulary, width, inner = 37_000, 512, 2048
    attention, feed, norm = 4 * width**2, 2 * width * inner + inner + width, 2 * width
    expected = vocabulary * width + 6 * (attention + feed + 2 * norm) + 6 * (2 * attention + feed + 3 * norm)
    assert published("transformer_base", vocabulary) == expected == pytest.approx(65e6, rel=0.04)


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_first_losses_are_those_of_chance(vocabulary):
    """A tied Transformer loses half a nat more, since its logits have a deviation of 1."""
    facts = {"source_vocabulary_size": vocabulary, "target_vocabulary_size": vocabulary}
    tied = transformer(**facts, shared_vocabulary=True, tied=True, width=128, heads=4)
    assert first_loss(lstm(**facts, width=64), vocabulary) == pytest.approx(math.log(vocabulary), rel=0.03)
    assert first_loss(tied, vocabulary) == pytest.approx(math.log(vocabulary) + 0.5, rel=0.03)


def first_loss(model, vocabulary):
    generator = torch.Generator().manual_seed(1)
    source, given, targets = (torch.randint(4, vocabulary, (32, 12), generator=generator) for _ in range(3))
    with torch.no_grad():
        logits = model(source, torch.full((32,), 12), given)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def test_positions_go_on_and_differ_from_each_other():
    device = torch.device("cpu")
    whole = positions(0, 50, 16, device)
    torch.testing.assert_close(positions(20, 30, 16, device), whole[20:])
    assert whole[0].tolist() == [0.0] * 8 + [1.0] * 8
    assert whole[3, 0].item() == pytest.approx(math.sin(3))
    assert whole[3, 15].item() == pytest.approx(math.cos(3e-4))
    assert torch.pdist(whole).min() > 0.1
    assert positions(0, 3, 7, device).shape == (3, 7)


def test_weights_are_tied_at_three_places_and_sizes_must_fit():
    model = transformer(tied=True, shared_vocabulary=True, source_vocabulary_size=11)
    assert model.output.weight is model.source_embedding.weight is model.target_embedding.weight
    assert count(model) == count(transformer(source_vocabulary_size=11)) - 2 * 11 * 8
    with pytest.raises(ConfigError, match=r"model.layers=1: the encoder needs at least two layers"):
        lstm(layers=1)
    with pytest.raises(ConfigError, match=r"model.width=8 is not a multiple of model.heads=3"):
        transformer(heads=3)
    with pytest.raises(ConfigError, match=r"one matrix cannot be shared by two vocabularies"):
        transformer(tied=True)
