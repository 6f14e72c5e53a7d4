"""Language models: state that is carried equals one long text, and a Transformer never looks ahead."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.precision.census import OperatorCensus
from mptrain.precision.upcast import Upcast
from mptrain.system.errors import ConfigError
from mptrain.workloads.language.models.lstm import lstm_language_model
from mptrain.workloads.language.models.transformer import transformer_language_model

HALF = [torch.float16, torch.bfloat16]


def tokens_of(*shape, vocabulary=11):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def lstm(lanes=0, seed=0, **changed):
    torch.manual_seed(seed)
    return lstm_language_model(vocabulary_size=11, lanes=lanes, **{"embedding_size": 6, "hidden_size": 7, **changed})


def transformer(seed=0, **changed):
    torch.manual_seed(seed)
    facts = {"vocabulary_size": 11, "sequence_length": 9, "width": 8, "heads": 2}
    return transformer_language_model(**{**facts, **changed})


@pytest.mark.parametrize("name", ["big_lstm_small", "char_lstm", "transformer", "word_lstm"])
def test_the_model_of_a_file_has_logits_near_those_of_chance(name):
    config = compose((f"model={name}",))
    length, lanes = config.dataset.arguments["sequence_length"], 3 if config.dataset.arguments["stream"] else 0
    model = config.model.build(vocabulary_size=40, sequence_length=length, lanes=lanes)
    tokens = tokens_of(3, length, vocabulary=40)
    more = {"lane": torch.arange(3), "fresh": torch.ones(3, dtype=torch.bool)} if lanes else {}
    logits = model(tokens, **more)
    assert logits.shape == (3, length, 40)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens_of(3 * length, vocabulary=40))
    assert loss.item() == pytest.approx(math.log(40), abs=0.3)


def test_the_big_lstm_has_the_parameters_of_the_paper():
    """The sizes in table 1 of Jozefowicz et al. (2016), in whose names the cell state comes before the projection."""
    with torch.device("meta"):
        model = compose(("model=big_lstm",)).model.build(vocabulary_size=793_471, lanes=128)
    layer = 4 * 8192 * (1024 + 1024 + 2) + 8192 * 1024
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 1_776_948_095 == 793_471 * (1024 + 1024 + 1) + 2 * layer


@pytest.mark.parametrize(
    ("build", "changed", "said", "hint"),
    [
        (lstm, {"projection": 7}, "model.projection=7 with model.hidden_size=7", ""),
        (lstm, {"projection": 3, "tied": True}, "model.embedding_size=6 and model.projection=3", ""),
        (lstm, {"tied": True}, "model.tied=true with model.embedding_size=6 and model.hidden_size=7", ""),
        (
            lstm,
            {"softmax": "sampled", "tied": True, "hidden_size": 6},
            "model.tied=true with model.softmax=sampled",
            "",
        ),
        (lstm, {"softmax": "adaptive"}, r"model.cutoffs=\[2000, 10000\] with a vocabulary of 11", ""),
        (lstm, {"softmax": "adaptive", "cutoffs": (4, 4)}, "must rise", ""),
        (transformer, {"lanes": 4}, "dataset.stream=true", "set dataset.stream=false"),
        (transformer, {"width": 10, "heads": 4}, "model.width=10 is not a multiple of model.heads=4", "model.width=12"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(build, changed, said, hint):
    with pytest.raises(ConfigError, match=said) as caught:
        build(**changed)
    assert hint in str(caught.value.hint)


class TestState:
    @pytest.mark.parametrize(
        "choices", [{"layers": 1}, {"layers": 2}, {"hidden_size": 8, "projection": 3, "layers": 2}], ids=str
    )
    def test_windows_in_a_row_give_the_logits_of_one_long_text(self, choices):
        model, text, lane = lstm(lanes=5, **choices).eval(), tokens_of(3, 24), torch.tensor([4, 0, 2])
        layers, size = choices["layers"], choices.get("hidden_size", 7)
        assert (model.hidden.shape, model.cell.shape) == (
            (layers, 5, choices.get("projection", size)),
            (layers, 5, size),
        )
        with torch.no_grad():
            pieces = [model(text[:, at : at + 6], lane, torch.full((3,), at == 0)) for at in range(0, 24, 6)]
            torch.testing.assert_close(torch.cat(pieces, 1), model(text), rtol=1e-5, atol=1e-6)

    def test_a_fresh_sample_begins_with_zeros_whatever_was_there(self):
        model = lstm(lanes=2).eval()
        text, lane = tokens_of(2, 6), torch.arange(2)
        model.hidden.fill_(float("nan"))
        model.cell.fill_(float("inf"))
        with torch.no_grad():
            # kernels without AVX512 round differently where a state of zeros is given
            torch.testing.assert_close(model(text, lane, torch.tensor([True, True])), model(text))
            model.hidden[:, 0] = float("nan")
            mixed = model(text, lane, torch.tensor([True, False]))
        assert mixed.isfinite().all()
        torch.testing.assert_close(mixed[0], model(text)[0])
        assert not torch.allclose(mixed[1], model(text)[1])

    def test_only_rows_of_the_batch_change(self):
        model = lstm(lanes=4)
        before = model.hidden.clone()
        model(tokens_of(2, 6))
        assert torch.equal(model.hidden, before)
        model(tokens_of(2, 6), torch.tensor([3, 1]), torch.tensor([True, True]))
        assert (model.hidden[:, [1, 3]] != 0).any(2).all()
        assert torch.equal(model.hidden[:, [0, 2]], before[:, [0, 2]])

    def test_parts_of_a_batch_carry_what_the_whole_batch_does(self):
        whole, parts = lstm(lanes=4), lstm(lanes=4)
        lane = torch.arange(4)
        for begin in (0, 6):
            text, fresh = tokens_of(4, 12)[:, begin : begin + 6], torch.full((4,), begin == 0)
            expected = whole(text, lane, fresh)
            rows = [slice(0, 1), slice(1, 4)]
            given = torch.cat([parts(text[row], lane[row], fresh[row]) for row in rows])
            torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parts.hidden, whole.hidden, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parts.cell, whole.cell, rtol=1e-5, atol=1e-6)

    def test_it_is_no_part_of_the_weights_or_the_graph_nor_moves(self):
        model, lane, fresh = lstm(lanes=2), torch.arange(2), torch.ones(2, dtype=torch.bool)
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
        lstm(lanes=0).load_state_dict(model.state_dict())
        assert not dict(lstm(lanes=0).named_buffers())
        hidden, cell = model.hidden, model.cell
        model(tokens_of(2, 6), lane, fresh)
        assert model.hidden is hidden
        assert model.cell is cell
        assert not model.hidden.requires_grad
        before, twin = hidden.clone(), copy.deepcopy(model).double()
        twin(tokens_of(2, 6), lane, ~fresh)
        assert torch.equal(model.hidden, before)
        # A second backward pass through a graph that is gone would raise.
        model(tokens_of(2, 6), lane, ~fresh).sum().backward()
        model(tokens_of(2, 6), lane, ~fresh).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    @pytest.mark.parametrize("dtype", HALF)
    def test_it_has_the_dtype_of_the_model_and_fp32_under_autocast(self, dtype):
        model, lane, fresh = lstm(lanes=2), torch.arange(2), torch.ones(2, dtype=torch.bool)
        with Upcast(), torch.autocast("cpu", dtype=dtype):
            assert model(tokens_of(2, 6), lane, fresh).dtype == dtype
        assert model.hidden.dtype == model.cell.dtype == torch.float32
        model.to(dtype)
        with Upcast():
            model(tokens_of(2, 6), lane, fresh).float().sum().backward()
            model(tokens_of(2, 6), lane, ~fresh)
        assert model.hidden.dtype == model.cell.dtype == dtype
        assert model.cell.any()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_projected_lstm_in_half_agrees_up_to_rounding(dtype, autocast):
    wide, text = lstm(hidden_size=8, projection=3, layers=2), tokens_of(2, 6)
    half = copy.deepcopy(wide) if autocast else copy.deepcopy(wide).to(dtype)
    with Upcast(), OperatorCensus() as census:
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            answer = half(text)
        answer.float().square().mean().backward()
    expected = wide(text)
    expected.square().mean().backward()
    assert set().union(*census.products.values()) == {dtype}
    assert (answer.float() - expected).abs().max() < 8 * torch.finfo(dtype).eps
    for one, other in zip(half.parameters(), wide.parameters(), strict=True):
        assert (one.grad.float() - other.grad).abs().max() <= 32 * torch.finfo(dtype).eps * other.grad.abs().max()


@pytest.mark.parametrize("softmax", ["sampled", "adaptive"])
def test_losses_of_a_model_are_those_of_its_logits(softmax):
    model, text, targets = lstm(softmax=softmax, samples=4, cutoffs=(3, 6)).eval(), tokens_of(2, 6), tokens_of(2, 6)
    assert model.takes_targets
    assert not lstm().takes_targets
    losses, best = model(text, targets=targets)
    logits = model(text)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
    assert torch.equal(best, logits.argmax(-1))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's tracer asks for it, after torch's LSTM
@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_torch_compile_can_trace_it_and_its_state(kind):
    plain, traced = ((lstm(lanes=2) if kind == "lstm" else transformer()) for _ in range(2))
    compiled = torch.compile(traced, backend="aot_eager")
    for fresh in (True, False):
        more = {"lane": torch.arange(2), "fresh": torch.full((2,), fresh)} if kind == "lstm" else {}
        expected, given = plain(tokens_of(2, 6), **more), compiled(tokens_of(2, 6), **more)
        torch.testing.assert_close(given, expected)
        given.sum().backward()
    for one, other in zip(plain.buffers(), traced.buffers(), strict=True):
        torch.testing.assert_close(other, one)
    assert all(parameter.grad is not None for parameter in traced.parameters())


def test_tied_weights_are_one_matrix_that_fits_both_ends():
    for model in (lstm(hidden_size=6, tied=True), transformer(tied=True)):
        assert model.decoder.weight is model.embedding.weight
    assert lstm(hidden_size=6, tied=True).embedding.weight.abs().max() <= 6**-0.5
    assert lstm(embedding_size=3, projection=3, tied=True).decoder.weight.shape == (11, 3)


def test_dropout_acts_in_training_only():
    for build in (lambda: lstm(dropout=0.5, layers=2), lambda: lstm(dropout=0.5), lambda: transformer(dropout=0.5)):
        model, text = build(), tokens_of(2, 6)
        assert not torch.equal(model(text), model(text))
        model.eval()
        assert torch.equal(model(text), model(text))


class TestTransformer:
    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_a_later_token_changes_no_earlier_logit(self, dtype):
        model = transformer().to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5.0)  # attention as sharp as after training
        text = tokens_of(2, 9)
        with torch.no_grad(), Upcast():
            before = model(text)
            assert before.isfinite().all()
            torch.testing.assert_close(model(text[:, :4]), before[:, :4])
            same = model(torch.full((1, 9), 3))
            assert not torch.equal(same[0, 0], same[0, 5])
            for place in range(9):
                other = text.clone()
                other[:, place] = (other[:, place] + 1) % 11
                after = model(other)
                assert torch.equal(after[:, :place], before[:, :place])
                assert not torch.equal(after[:, place], before[:, place])

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_the_largest_attention_of_half_precision_is_finite(self, dtype):
        model = transformer().to(dtype)
        for block in model.blocks:
            nn.init.constant_(block.attention.inward.weight, 8.0)
        with Upcast():
            logits = model(tokens_of(2, 9))
            logits.float().sum().backward()
        assert logits.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
