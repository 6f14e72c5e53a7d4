"""WaveNet looks back only, exactly as far as it says, and says the same sample by sample as all at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.precision.upcast import Upcast
from mptrain.workloads.audio_generation.models.wavenet import wavenet
from tests.loops import each

HALF = [torch.float16, torch.bfloat16]


def small(seed=0, **changed):
    torch.manual_seed(seed)
    facts = {"levels": 16, "stacks": 2, "layers": 3, "residual": 6, "skip": 8, "condition": 5}
    return wavenet(**{**facts, **changed})


def sharp(model, factor=3.0):
    """The same network with larger weights, so that no answer depends on nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model.eval()


def levels_of(*shape, levels=16):
    return torch.randint(levels, shape, generator=torch.Generator().manual_seed(0))


def told(model, samples, length):
    """Speakers, texts of unequal length, and places that rise."""
    generator = torch.Generator().manual_seed(2)
    more = {}
    if model.speakers is not None:
        more["speaker"] = torch.randint(3, (samples,), generator=generator)
    if model.letters is not None:
        more["text"] = torch.randint(1, 7, (samples, 4), generator=generator)
        more["place"] = (torch.arange(length) * 4 // length).expand(samples, -1)
    return more


CONDITIONS = [{}, {"speakers": 3}, {"vocabulary_size": 7}, {"speakers": 3, "vocabulary_size": 7}]


class TestCausality:
    @each("dtype", [torch.float32, *HALF])
    @each("kernel_size", [2, 3])
    def test_an_answer_depends_on_no_later_sample(self, kernel_size, dtype):
        model, given = sharp(small(kernel_size=kernel_size)).to(dtype), levels_of(1, 40)
        with torch.no_grad(), Upcast():
            before = model(given)
            for place in (0, 7, 20, 39):
                other = given.clone()
                other[:, place] = (other[:, place] + 5) % 16
                after = model(other)
                assert torch.equal(after[..., :place], before[..., :place])
                assert not torch.equal(after[..., place], before[..., place])

    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            ({}, 1 + 2 * 7),
            ({"stacks": 1, "layers": 5}, 32),
            ({"stacks": 3, "layers": 2, "kernel_size": 3}, 1 + 3 * 3 * 2),
            ({"stacks": 1, "layers": 1, "kernel_size": 1}, 1),
        ],
    )
    def test_the_receptive_field_is_that_of_the_formula(self, shape, expected):
        model, place = sharp(small(**shape), 1.5).double(), 60
        assert model.receptive_field == expected
        value = model.embedding(levels_of(1, 80)).detach().requires_grad_()
        hook = model.embedding.register_forward_hook(lambda *_: value)
        model(levels_of(1, 80))[0, :, place].sum().backward()
        hook.remove()
        seen = value.grad[0].abs().sum(1).nonzero().flatten()
        assert seen.max().item() == place
        assert place - seen.min().item() + 1 == expected


@pytest.mark.parametrize(("name", "receptive_field"), [("wavenet", 3070), ("wavenet_small", None)])
def test_shipped_data_give_as_much_context_as_the_network_sees(name, receptive_field):
    config = compose((f"model={name}",))
    with torch.device("meta"):
        model = config.model.build(levels=256)
    assert config.dataset.arguments["context"] == model.receptive_field - 1
    assert receptive_field in (None, model.receptive_field)


def test_published_parameters_are_counted_by_hand():
    """Embedding, 30 layers of gates and, but for the last, residual; skips, and two layers at the end."""
    with torch.device("meta"):
        model = compose(("model=wavenet",)).model.build(levels=256)
    assert [layer.gates.dilation[0] for layer in model.layers] == [2**number for number in range(10)] * 3
    gates, skip, residual = 2 * 64 * 128 + 128, 30 * 64 * 256 + 256, 64 * 64 + 64
    expected = 256 * 64 + 30 * gates + 29 * residual + skip + 2 * (256 * 256 + 256)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_the_first_loss_is_the_logarithm_of_the_levels(condition):
    torch.manual_seed(0)
    model = wavenet(levels=256, stacks=2, layers=6, residual=24, skip=64, condition=16, **condition)
    given = levels_of(2, 400, levels=256)
    loss = nn.functional.cross_entropy(model(given, **told(model, 2, 400)), levels_of(2, 400, levels=256))
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


class TestConditions:
    def test_a_speaker_changes_every_answer_of_its_sample(self):
        model, given = sharp(small(speakers=3)), levels_of(2, 20)
        with torch.no_grad():
            one, other = (model(given, torch.tensor([0, number])) for number in (0, 1))
        assert torch.equal(one[0], other[0])
        assert (one[1] != other[1]).any(0).all()

    def test_a_letter_changes_answers_in_its_neighbourhood(self):
        model, given = sharp(small(vocabulary_size=7)), levels_of(1, 60)
        place = torch.arange(60)[None] // 6
        text = torch.ones(1, 10, dtype=torch.int64)
        other = text.clone()
        other[0, 5] = 2
        with torch.no_grad():
            same = (model(given, None, text, place) == model(given, None, other, place)).all(1)[0]
        assert same[: 3 * 6].all()  # letter 3 is the first that has letter 5 within two of it
        assert not same[3 * 6 : 8 * 6].any()

    def test_letters_behind_the_end_of_a_text_say_nothing(self):
        model, given = sharp(small(vocabulary_size=7)), levels_of(1, 20)
        place = torch.arange(20)[None] // 7
        with torch.no_grad():
            short = model(given, None, torch.tensor([[3, 1, 2]]), place)
            filled = model(given, None, torch.tensor([[3, 1, 2, 0, 0, 0]]), place)
        torch.testing.assert_close(short, filled)

    def test_gradients_of_a_long_letter_are_summed_in_fp32(self):
        grads = []
        for dtype in (torch.float32, torch.float16):
            model = small(vocabulary_size=3, stacks=1, layers=1).to(dtype)
            given, text = torch.zeros(1, 8000, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)
            with Upcast():
                model.conditioning(None, text, torch.zeros_like(given)).float().sum().backward()
            grads.append(model.neighbours.bias.grad.float())
        assert grads[0].tolist() == [8000.0] * 5
        assert torch.equal(*grads)


class TestDrawing:
    @each("kernel_size", [1, 2, 3])
    @each("length", [1, 2, 15, 40])
    @each("condition", CONDITIONS)
    def test_sample_by_sample_it_says_what_it_says_at_once(self, condition, length, kernel_size):
        model, count = sharp(small(kernel_size=kernel_size, **condition), 2.0).double(), 30
        more = told(model, 3, length - 1 + count)
        with torch.no_grad():
            drawn = model.drawn(levels_of(3, length), count, torch.Generator().manual_seed(4), **more)
            whole = torch.cat([levels_of(3, length), drawn], 1)
            logits = model(whole[:, :-1], **more)
        source = torch.Generator().manual_seed(4)
        for place in range(count):
            probabilities = logits[:, :, length - 1 + place].float().softmax(1)
            assert torch.equal(drawn[:, place], torch.multinomial(probabilities, 1, generator=source)[:, 0])
        assert drawn.unique().numel() > 4

    @pytest.mark.parametrize("dtype", HALF)
    def test_samples_are_drawn_from_an_fp32_softmax(self, dtype):
        model, given = small(speakers=3), levels_of(2, 9)
        for autocast in (True, False):
            network = model if autocast else model.to(dtype)
            with torch.no_grad(), Upcast(), torch.autocast("cpu", dtype=dtype, enabled=autocast):
                drawn = network.drawn(given, 5, torch.Generator().manual_seed(0), torch.tensor([0, 1]))
            assert drawn.shape == (2, 5)
            assert 0 <= drawn.min() <= drawn.max() < 16
        model, source = small(), torch.Generator()
        with torch.no_grad():
            assert model.drawn(given, 0, source).shape == (2, 0)
            model.output.bias.fill_(float("nan"))  # a broken network draws all the same
            assert model.drawn(given, 3, source).shape == (2, 3)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_agrees_with_fp32_up_to_its_rounding(dtype):
    model, given = small(speakers=3, vocabulary_size=7), levels_of(2, 50)
    more = told(model, 2, 50)
    wide = model(given, **more)
    with torch.no_grad(), Upcast():
        half = model.to(dtype)(given, **more)
    assert half.dtype == dtype
    assert (half.float() - wide).abs().max() < 32 * torch.finfo(dtype).eps
