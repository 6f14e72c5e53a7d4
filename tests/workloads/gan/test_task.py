from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mptrain.precision.apply import autocast, cast_model
from mptrain.precision.policy import Policy
from mptrain.precision.upcast import Upcast
from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.gan.models.dcgan import dcgan
from mptrain.workloads.gan.task import ClassifierFeatures, Gan

HALF = Policy("half", "float16", "float16", autocast=False, master_weights=True, keep_fp32=("norms",))
MIXED = Policy("mixed", "float32", "float16", autocast=True, master_weights=False)


class Pair(nn.Module):
    """A generator that shifts its noise, and a discriminator that weighs what it sees; one number each."""

    latent = 1

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.generator = nn.Linear(1, 1)
        self.discriminator = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Flatten(0))
        with torch.no_grad():
            self.generator.weight.fill_(1.0)
            self.generator.bias.fill_(0.5)
            self.discriminator[0].weight.fill_(weight)


def pair_batch(*values, dtype=torch.float32):
    return Batch(torch.tensor(values, dtype=dtype).unsqueeze(1), torch.zeros(len(values), dtype=torch.int64))


def networks(size=16, **more):
    torch.manual_seed(0)
    return dcgan(in_channels=1, image_size=size, latent=6, width=4, **more).train()


def image_batch(samples=6, size=16):
    drawn = torch.rand(samples, 1, size, size, generator=torch.Generator().manual_seed(3))
    return Batch(drawn * 2 - 1, torch.zeros(samples, dtype=torch.int64))


@contextlib.contextmanager
def lowered(model, batch, policy):
    """The batch as a model in this precision takes it; None is full precision."""
    if policy is HALF:
        cast_model(model, HALF)
        batch = Batch(batch.inputs.half(), batch.targets)
    with Upcast(), autocast(policy or HALF, torch.device("cpu")):
        yield batch


def softplus(values):
    return [max(value, 0.0) + math.log1p(math.exp(-abs(value))) for value in values]


class Tape:
    """Stands for torch.randn: the same numbers whether they are asked for at once or in pieces."""

    def __init__(self) -> None:
        self.numbers = torch.randn(100, 1, generator=torch.Generator().manual_seed(5))
        self.position = 0

    def __call__(self, samples, latent, device=None, generator=None):
        assert latent == 1
        self.position += samples
        return self.numbers[self.position - samples : self.position]

    def rewind(self):
        self.position = 0

    def logits(self, samples, weight=1.0):
        """What a `Pair` with this weight says of the first images it draws, in double precision."""
        return [weight * (value + 0.5) for value in self.numbers[:samples].double().flatten().tolist()]


@pytest.fixture
def tape(monkeypatch):
    numbers = Tape()
    monkeypatch.setattr(torch, "randn", numbers)
    return numbers


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_discriminators_loss_is_the_formula(smoothing, tape):
    real = [0.25, -1.5, 3.0, 0.0]
    drawn = tape.logits(4, weight=0.75)
    loss = Gan(label_smoothing=smoothing).discriminator_loss(Pair(0.75), pair_batch(*real))
    logits = [0.75 * value for value in real]
    # -(1 - s) log sigma(x) - s log (1 - sigma(x)) for real ones, -log (1 - sigma(x)) for drawn ones
    as_real = [
        (1 - smoothing) * one + smoothing * other
        for one, other in zip(softplus([-x for x in logits]), softplus(logits), strict=True)
    ]
    assert loss.item() == pytest.approx(sum(as_real) / 4 + sum(softplus(drawn)) / 4, rel=1e-6)


def test_the_generators_loss_is_the_one_that_does_not_saturate(tape):
    drawn = tape.logits(4, weight=0.75)
    loss = Gan(label_smoothing=0.1).generator_loss(Pair(0.75), pair_batch(9.0, 9.0, 9.0, 9.0))
    assert loss.item() == pytest.approx(sum(softplus([-x for x in drawn])) / 4, rel=1e-6)
    sure = Pair(1e6)  # its discriminator is certain that images below 0 are drawn ones
    tape.rewind()
    Gan().generator_loss(sure, pair_batch(*[0.0] * 8)).backward()
    assert abs(sure.generator.bias.grad.item()) > 1e4


def test_each_loss_has_gradients_for_its_own_network():
    model = networks()
    Gan().discriminator_loss(model, image_batch()).backward()
    assert all(parameter.grad is None for parameter in model.generator.parameters())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.discriminator.parameters())
    Gan().generator_loss(model, image_batch()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.generator.parameters())


@pytest.mark.parametrize("name", ["discriminator_loss", "generator_loss"])
class TestPrecision:
    @pytest.mark.parametrize("policy", [HALF, MIXED], ids=["half", "autocast"])
    def test_trap_04_the_loss_is_float32_and_near_the_full_one(self, name, policy):
        full, model, batch = networks(), networks(), image_batch()
        torch.manual_seed(1)
        expected = getattr(Gan(), name)(full, batch)
        torch.manual_seed(1)
        with lowered(model, batch, policy) as given:
            loss = getattr(Gan(), name)(model, given)
        assert (loss.dtype, loss.shape) == (torch.float32, ())
        assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
        assert loss.item() != expected.item()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("weight", [-60000.0, 60000.0])
    def test_trap_04_the_largest_logits_have_finite_gradients(self, name, dtype, weight):
        model = Pair(weight).to(dtype)
        loss = getattr(Gan(), name)(model, pair_batch(1.0, -1.0, 0.5, dtype=dtype))
        assert loss.isfinite()
        loss.backward()
        # The gradients of the discriminator's weight are the images, those of the generator's bias the weight.
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)

    def test_micro_batches_draw_their_own_noise_and_add_up(self, name, tape):
        real, weight = [0.25, -1.5, 3.0, 0.0, 0.5], 0.75
        batch = pair_batch(*real)
        whole = getattr(Gan(), name)(Pair(weight), batch).item()
        tape.rewind()
        parts = sum(getattr(Gan(), name)(Pair(weight), part).item() * batch.share(part) for part in batch.split(2))
        assert parts == pytest.approx(whole, rel=1e-6)


def test_noise_is_the_same_in_every_precision_but_for_rounding():
    seen = []
    for dtype in (torch.float32, torch.float16):
        model = Pair()
        model.to(dtype)
        model.generator.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        torch.manual_seed(2)
        Gan().generator_loss(model, pair_batch(*[0.0] * 50, dtype=dtype))
    assert [noise.dtype for noise in seen] == [torch.float32, torch.float16]
    assert torch.equal(seen[0].half(), seen[1])
    assert seen[0].unique().numel() == 50


def test_counts_by_hand(tape):
    model = Pair(weight=2.0)
    drawn = tape.logits(5, weight=2.0)
    real = [1.0, -1.0, 0.0, 3.0, 0.5]
    sums = Gan(label_smoothing=0.3).measure(model, pair_batch(*real))
    assert all(value.dtype == torch.float64 and value.shape == (5,) for value in sums.values())
    assert sums["real_accuracy"].tolist() == [1, 0, 0, 1, 1]
    assert sums["fake_accuracy"].tolist() == [value < 0 for value in drawn]
    assert 0 < sums["fake_accuracy"].sum() < 5
    assert Gan().summarise({"real_accuracy": 3.0}, 5) == {"real_accuracy": 0.6}
    logits = [2.0 * value for value in real]
    expected = [
        as_real + as_drawn for as_real, as_drawn in zip(softplus([-x for x in logits]), softplus(drawn), strict=True)
    ]
    assert sums["discriminator_loss"].tolist() == pytest.approx(expected, rel=1e-6)
    assert sums["generator_loss"].tolist() == pytest.approx(softplus([-x for x in drawn]), rel=1e-6)


def test_measuring_judges_each_kind_by_its_own_statistics():
    model, batch = networks().eval(), image_batch()
    with torch.no_grad():
        torch.manual_seed(4)
        sums = Gan().measure(model, batch)
        torch.manual_seed(4)
        drawn = model.generator(torch.randn(6, 6))  # by the running means, as when it is used
        by_training = copy.deepcopy(model.discriminator).train()
        expected = softplus((-by_training(batch.inputs)).tolist()) + softplus(by_training(drawn).tolist())
        other = softplus((-model.discriminator(batch.inputs)).tolist()) + softplus(model.discriminator(drawn).tolist())
    assert sums["discriminator_loss"].sum().item() == pytest.approx(sum(expected), rel=1e-6)
    assert sums["discriminator_loss"].sum().item() != pytest.approx(sum(other), rel=1e-3)


def test_measuring_and_exhibiting_leave_the_model_as_it_was():
    model, batch = networks().eval(), image_batch()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        Gan().measure(model, batch)
        Gan().exhibits(model, batch)
    # Those of the discriminator are the engine's to restore.
    statistics = {name for name, _ in model.discriminator.named_buffers(prefix="discriminator")}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name not in statistics)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("policy", [None, HALF, MIXED], ids=["full", "half", "autocast"])
@pytest.mark.parametrize("samples", [3, 80])
def test_exhibits_are_64_drawn_images_the_same_each_time(policy, samples):
    model, shown = networks().eval(), []
    with torch.no_grad(), lowered(model, image_batch(samples), policy) as batch:
        for seed in range(2):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            shown.append(Gan().exhibits(model, batch)["samples"].pixels)
            assert torch.equal(torch.get_rng_state(), state)  # what is measured next is the same without them
    pictures = shown[0]
    assert (pictures.shape, pictures.dtype) == ((64, 1, 16, 16), torch.float32)
    assert 0 <= pictures.min() <= pictures.max() <= 1
    assert pictures.unique().numel() > 100
    assert torch.equal(pictures, shown[1])


@pytest.mark.parametrize("missing", ["generator", "discriminator", "latent"])
def test_a_network_that_is_no_pair_is_refused_with_a_model(missing):
    model = networks()
    delattr(model, missing)
    for use in (Gan().discriminator_loss, Gan().generator_loss, Gan().measure, Gan().exhibits):
        with pytest.raises(ConfigError, match="task=gan") as caught:
            use(model, image_batch())
        assert "model=dcgan" in caught.value.problems[0].hint


class Means(nn.Module):
    """A classifier of two features, the means of the upper and lower half, that calls what is bright above a 1."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.last.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))

    def forward(self, images):
        return self.last(images.unflatten(2, (2, -1)).mean((1, 3, 4)))


def seeing(labelled=True):
    return Gan(features=ClassifierFeatures(lambda device: Means().to(device), None, labelled=labelled))


@pytest.mark.parametrize("policy", [None, HALF, MIXED], ids=["full", "half", "autocast"])
def test_answers_are_what_a_classifier_sees_in_both_kinds(policy):
    model, task = networks().eval(), seeing()
    with torch.no_grad(), lowered(model, image_batch(), policy) as batch:
        torch.manual_seed(4)
        answers = task.answers(model, batch)
        torch.manual_seed(4)
        drawn = model.generator(torch.randn(6, 6).to(batch.inputs.dtype)).float()
        unlabelled, one = seeing(labelled=False), Batch(batch.inputs[:1], batch.targets[:1])
        others = [unlabelled.score(unlabelled.answers(model, some)) for some in (batch, one)]
    inputs = batch.inputs.float()
    halves = torch.stack([inputs[:, :, :8].mean((1, 2, 3)), inputs[:, :, 8:].mean((1, 2, 3))], 1)
    assert (task.metric, task.higher_is_better, len(answers)) == ("frechet", False, 6)
    for position, (real, invented, right) in enumerate(answers):
        assert real.dtype == invented.dtype == "float32"
        assert real == pytest.approx(halves[position].numpy(), abs=1e-6)
        assert invented[0] == pytest.approx(drawn[position, :, :8].mean().item(), abs=1e-6)
        assert invented[1] == pytest.approx(drawn[position, :, 8:].mean().item(), abs=1e-6)
        assert right == (halves[position, 0] <= 0)  # all labels are 0
    scores = task.score(answers)
    assert scores["classifier_top1"] == sum(right for *_, right in answers) / 6
    assert scores["frechet"] > 0
    assert set(task.shares) == {"real_accuracy", "fake_accuracy", *scores} - {"frechet"}
    assert Gan().answers(model, batch) == ()
    assert [set(scores) for scores in others] == [{"frechet"}] * 2
    assert math.isnan(others[1]["frechet"])


@pytest.mark.parametrize("name", ["discriminator_loss", "generator_loss"])
def test_no_loss_reads_a_value_of_the_device(name):
    model, batch = networks(), image_batch()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Batch(torch.empty_like(batch.inputs), torch.empty_like(batch.targets))
        loss = getattr(Gan(), name)(model, fake)
        loss.backward()
    assert isinstance(loss, FakeTensor)
