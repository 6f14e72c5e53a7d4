"""WaveNet looks back only, exactly as far as it says, and says the same sample by sample as all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from loops import each
from torch import nn

from mptrain.precision.upcast import Upcast
from mptrain.workloads.audio_generation.models.wavenet import wavenet

CONFIGS = Path(__file__).parents[3] / "configs" / "model"
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
    def test_an_answer_depends_on_no_later_sample_and_on_its_own(self, kernel_size, dtype):
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
    def test_the_receptive_field_is_that_of_the_formula_and_not_a_sample_more_or_less(self, shape, expected):
        model, place = sharp(small(**shape), 1.5).double(), 60
        assert model.receptive_field == expected
        value = model.embedding(levels_of(1, 80)).detach().requires_grad_()
        hook = model.embedding.register_forward_hook(lambda *_: value)
        model(levels_of(1, 80))[0, :, place].sum().backward()
        hook.remove()
        seen = value.grad[0].abs().sum(1).nonzero().flatten()
        assert seen.max().item() == place
        assert place - seen.min().item() + 1 == expected

    @pytest.mark.parametrize("name", ["wavenet", "wavenet_small"])
    def test_the_shipped_data_give_as_much_context_as_the_shipped_network_sees(self, name):
        keys = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]
        defaults = keys.pop("defaults")
        del keys["_target_"]
        with torch.device("meta"):
            model = wavenet(levels=256, **keys)
        assert defaults["context"] == model.receptive_field - 1


class TestPublished:
    def build(self, name, **facts):
        keys = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]
        keys = {key: value for key, value in keys.items() if key not in ("_target_", "defaults")}
        with torch.device("meta"):
            return wavenet(levels=256, **keys, **facts)

    def test_it_has_the_dilations_and_parameters_that_its_file_says(self):
        """Counted by hand: embedding, 30 layers of gates and, but for the last, residual; skips, and two layers at the end."""
        model = self.build("wavenet")
        assert [layer.gates.dilation[0] for layer in model.layers] == [2**number for number in range(10)] * 3
        assert model.receptive_field == 3070
        gates, skip, residual = 2 * 64 * 128 + 128, 30 * 64 * 256 + 256, 64 * 64 + 64
        expected = 256 * 64 + 30 * gates + 29 * residual + skip + 2 * (256 * 256 + 256)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == expected
        assert f"{count:,} parameters" in (CONFIGS / "wavenet.yaml").read_text()
        small_one = self.build("wavenet_small", speakers=4)
        assert (
            f"{sum(p.numel() for p in small_one.parameters()):,} parameters"
            in (CONFIGS / "wavenet_small.yaml").read_text()
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_it_runs_forward_and_backward_without_values_and_every_parameter_is_trained(self, dtype):
        model = self.build("wavenet", speakers=109, vocabulary_size=29).to(dtype)
        given = torch.zeros(8, 19069, dtype=torch.int64, device="meta")
        speaker, text = torch.zeros(8, dtype=torch.int64, device="meta"), given[:, :50]
        logits = model(given, speaker, text, given)
        assert (logits.shape, logits.dtype) == ((8, 256, 19069), dtype)
        logits.float().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_the_first_loss_is_the_logarithm_of_the_levels(condition):
    torch.manual_seed(0)
    model = wavenet(levels=256, stacks=2, layers=6, residual=24, skip=64, condition=16, **condition)
    given = levels_of(2, 400, levels=256)
    loss = nn.functional.cross_entropy(model(given, **told(model, 2, 400)), levels_of(2, 400, levels=256))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.02)


class TestConditions:
    def test_a_speaker_changes_every_answer_and_only_that_sample_of_the_batch(self):
        model, given = sharp(small(speakers=3)), levels_of(2, 20)
        with torch.no_grad():
            one, other = (model(given, torch.tensor([0, number])) for number in (0, 1))
        assert torch.equal(one[0], other[0])
        assert (one[1] != other[1]).any(0).all()

    def test_a_letter_changes_answers_from_where_its_neighbourhood_is_said_on(self):
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

    def test_gradients_of_a_letter_said_by_thousands_of_samples_are_summed_in_fp32(self):
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
    def test_sample_by_sample_it_says_what_it_says_of_all_at_once(self, condition, length, kernel_size):
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
    def test_in_half_precision_and_under_autocast_it_is_drawn_from_an_fp32_softmax(self, dtype):
        model, given = small(speakers=3), levels_of(2, 9)
        for autocast in (True, False):
            network = model if autocast else model.to(dtype)
            with torch.no_grad(), Upcast(), torch.autocast("cpu", dtype=dtype, enabled=autocast):
                drawn = network.drawn(given, 5, torch.Generator().manual_seed(0), torch.tensor([0, 1]))
            assert drawn.shape == (2, 5)
            assert 0 <= drawn.min() <= drawn.max() < 16

    def test_nothing_can_be_drawn_too_and_a_broken_network_draws_all_the_same(self):
        model = small()
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            assert model.drawn(levels_of(2, 5), 0, source).shape == (2, 0)
            model.output.bias.fill_(float("nan"))
            assert model.drawn(levels_of(2, 5), 3, source).shape == (2, 3)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_agrees_with_fp32_up_to_its_rounding(dtype):
    model, given = small(speakers=3, vocabulary_size=7), levels_of(2, 50)
    more = told(model, 2, 50)
    wide = model(given, **more)
    with torch.no_grad(), Upcast():
        half = model.to(dtype)(given, **more)
    assert half.dtype == dtype
    assert (half.float() - wide).abs().max() < 32 * torch.finfo(dtype).eps


def test_it_learns_a_short_sound_by_heart():
    model, sound = small(residual=16, skip=32), levels_of(1, 65)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        loss = nn.functional.cross_entropy(model(sound[:, :-1]), sound[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
