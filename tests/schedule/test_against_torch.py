"""Every schedule against the scheduler of torch or timm that it is, at every update, also where steps are skipped."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from mptrain.config.compose import compose
from mptrain.config.learner_checks import build_schedule, check_schedule
from mptrain.config.targets import Target
from mptrain.schedule import rate_table
from mptrain.system.errors import ConfigError
from tests.small_runs import TINY, loop_of, steps_of

PLANNED, PER_EPOCH, LR = 60, 15, 0.3


def stepped(make, planned=PLANNED, every=1, lr=LR):
    """The rates of a scheduler as a training loop of torch would see them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr, momentum=0.9)
    scheduler, rates = make(optimizer), []
    for update in range(planned):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (update + 1) % every == 0 and update + 1 < planned:
            scheduler.step()
    return rates


def table(*words, planned=PLANNED):
    schedule = build_schedule(compose(words).schedule)
    return rate_table(schedule, LR, planned, torch.device("cpu"), PER_EPOCH)[:planned].tolist()


def warmed(after, warmup=10):
    """A linear warm-up from 1/10 in 10 updates, as ours, and then another scheduler."""

    def make(optimizer):
        first = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        return lr_scheduler.SequentialLR(optimizer, [first, after(optimizer)], [warmup])

    return make


OURS = {
    "constant": ((), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    "constant warm": (("schedule=constant", "schedule.warmup=10"), warmed(lambda o: lr_scheduler.ConstantLR(o, 1.0))),
    "cosine": (("schedule=cosine", "schedule.final=0.1"), lambda o: lr_scheduler.CosineAnnealingLR(o, 60, 0.03)),
    "cosine warm": (
        ("schedule=cosine", "schedule.warmup=10"),
        warmed(lambda o: lr_scheduler.CosineAnnealingLR(o, 50)),
    ),
    "linear": (("schedule=linear", "schedule.final=0.25"), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 60)),
    "step": (
        ("schedule=step", "schedule.milestones=[0.5,0.75]", "schedule.gamma=0.2"),
        lambda o: lr_scheduler.MultiStepLR(o, [30, 45], 0.2),
    ),
    "inverse_sqrt": (
        ("schedule=inverse_sqrt", "schedule.warmup=10"),
        lambda o: lr_scheduler.LambdaLR(o, lambda t: min((t + 1) / 10, (10 / (t + 1)) ** 0.5)),
    ),
    "polynomial": (("schedule=polynomial", "schedule.power=2"), lambda o: lr_scheduler.PolynomialLR(o, 60, 2.0)),
    "polynomial warm": (
        ("schedule=polynomial", "schedule.warmup=10"),
        warmed(lambda o: lr_scheduler.PolynomialLR(o, 50, 0.9)),
    ),
    "exponential": (("schedule=exponential", "schedule.gamma=0.95"), lambda o: lr_scheduler.ExponentialLR(o, 0.95)),
    "exponential to 0.01": (("schedule=exponential",), lambda o: lr_scheduler.ExponentialLR(o, 0.01 ** (1 / 60))),
    "one_cycle": (("schedule=one_cycle",), lambda o: lr_scheduler.OneCycleLR(o, LR, 60)),
    "one_cycle linear": (
        ("schedule=one_cycle", "schedule.anneal_strategy=linear", "schedule.pct_start=0.1", "schedule.div_factor=4"),
        lambda o: lr_scheduler.OneCycleLR(o, LR, 60, pct_start=0.1, anneal_strategy="linear", div_factor=4),
    ),
    "one_cycle falling": (
        ("schedule=one_cycle", "schedule.pct_start=0.0", "schedule.final_div_factor=10"),
        lambda o: lr_scheduler.OneCycleLR(o, LR, 60, pct_start=0.0, final_div_factor=10),
    ),
    "cosine_restarts": (
        ("schedule=cosine_restarts", "schedule.period=0.25", "schedule.final=0.1"),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 15, 1, 0.03),
    ),
    "cosine_restarts longer": (
        ("schedule=cosine_restarts", "schedule.period=0.1", "schedule.multiplier=2"),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6, 2),
    ),
    "warmup_stable_decay": (
        ("schedule=warmup_stable_decay", "schedule.warmup=10", "schedule.decay=0.5", "schedule.final=0.2"),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 0.1, 1.0, 9),
                lr_scheduler.ConstantLR(o, 1.0),
                lr_scheduler.LinearLR(o, 1.0, 0.2, 30),
            ],
            [10, 30],
        ),
    ),
    "plateau": (("schedule=plateau", "schedule.warmup=10"), warmed(lambda o: lr_scheduler.ConstantLR(o, 1.0))),
}


@pytest.mark.parametrize("name", OURS)
def test_each_schedule_is_that_of_torch_at_every_update(name):
    words, make = OURS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR of torch calls a deprecated method of its own
        expected = stepped(make)
    assert table(*(words or ("schedule=constant",))) == pytest.approx(expected, rel=1e-6, abs=1e-8)


TORCH = [
    (("CosineAnnealingWarmRestarts", "T_0=7", "T_mult=2"), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7, 2)),
    (("CosineAnnealingLR", "eta_min=0.01"), lambda o: lr_scheduler.CosineAnnealingLR(o, 60, 0.01)),
    (("StepLR", "step_size=20"), lambda o: lr_scheduler.StepLR(o, 20)),
    (("MultiStepLR", "milestones=[5,50]", "gamma=0.3"), lambda o: lr_scheduler.MultiStepLR(o, [5, 50], 0.3)),
    (("ConstantLR", "total_iters=4"), lambda o: lr_scheduler.ConstantLR(o, 1 / 3, 4)),
    (("LinearLR", "start_factor=0.1"), lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 60)),
    (("PolynomialLR", "power=3"), lambda o: lr_scheduler.PolynomialLR(o, 60, 3.0)),
    (("ExponentialLR", "gamma=0.9"), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    (("OneCycleLR",), lambda o: lr_scheduler.OneCycleLR(o, LR, 60)),
    (("OneCycleLR", "max_lr=2", "three_phase=true"), lambda o: lr_scheduler.OneCycleLR(o, 2, 60, three_phase=True)),
    (("OneCycleLR", "epochs=5"), lambda o: lr_scheduler.OneCycleLR(o, LR, epochs=5, steps_per_epoch=15)),
    (
        ("CyclicLR", "base_lr=0.01", "step_size_up=6"),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, LR, 6, cycle_momentum=False),
    ),
]


@pytest.mark.parametrize(("words", "make"), TORCH, ids=[" ".join(words) for words, _ in TORCH])
def test_every_scheduler_of_torch_has_its_own_rates(words, make):
    found = table("schedule=torch", f"schedule.name={words[0]}", *(f"schedule.{word}" for word in words[1:]))
    assert found == torch.tensor(stepped(make), dtype=torch.float32).tolist()


def test_every_scheduler_of_this_torch_can_be_named_or_is_refused_with_a_reason():
    covered = {words[0] for words, _ in TORCH}
    refused = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "LRScheduler"}
    assert covered | refused == {*lr_scheduler.__all__}


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (("StepLR", "step_size=2"), lambda o: lr_scheduler.StepLR(o, 2)),
        (("CosineAnnealingLR",), lambda o: lr_scheduler.CosineAnnealingLR(o, 4)),
        (("OneCycleLR",), lambda o: lr_scheduler.OneCycleLR(o, LR, 4)),
        (("OneCycleLR", "epochs=4"), lambda o: lr_scheduler.OneCycleLR(o, LR, 4)),
    ],
)
def test_a_scheduler_may_step_once_an_epoch(words, make):
    words = ("schedule=torch", f"schedule.name={words[0]}", *(f"schedule.{word}" for word in words[1:]))
    found = table(*words, "schedule.interval=epoch")
    assert found == torch.tensor(stepped(make, every=PER_EPOCH), dtype=torch.float32).tolist()


TIMM = [
    (("CosineLRScheduler", "warmup_t=6", "warmup_lr_init=0.001"), {"t_initial": 60}),
    (("CosineLRScheduler", "warmup_t=6", "warmup_prefix=true"), {"t_initial": 54}),
    (("CosineLRScheduler", "cycle_limit=3", "cycle_decay=0.5", "t_initial=20"), {}),
    (("TanhLRScheduler",), {"t_initial": 60}),
    (("PolyLRScheduler", "power=2.0", "t_in_epochs=false"), {"t_initial": 60}),
    (("StepLRScheduler", "decay_t=7", "decay_rate=0.5"), {}),
    (("MultiStepLRScheduler", "decay_t=[5,9]", "decay_rate=0.5", "noise_range_t=[10,30]"), {}),
]


@pytest.mark.parametrize(("words", "lengths"), TIMM, ids=[" ".join(words) for words, _ in TIMM])
def test_schedulers_of_timm_have_their_own_rates(words, lengths):
    scheduler = pytest.importorskip("timm.scheduler")
    schedule = ("schedule=timm", f"schedule.name={words[0]}", *(f"schedule.{word}" for word in words[1:]))
    arguments = compose(schedule).schedule.arguments
    given = {key: value for key, value in arguments.items() if key not in ("name", "interval")}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=LR)
    own, rates = getattr(scheduler, words[0])(optimizer, **given, **lengths), []
    for update in range(PLANNED):
        rates.append(optimizer.param_groups[0]["lr"])
        (own.step if given.get("t_in_epochs", True) else own.step_update)(update + 1)
    assert table(*schedule) == torch.tensor(rates, dtype=torch.float32).tolist()


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_the_shapes_of_warmup_stable_decay_are_those_of_timm(shape):
    timm = pytest.importorskip("timm.scheduler")
    if not hasattr(timm, "WSDLRScheduler"):
        pytest.skip("this timm has no WSDLRScheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=LR)
    theirs = {"sqrt": "1-sqrt"}.get(shape, shape)
    own, rates = timm.WSDLRScheduler(optimizer, 60, 24, lr_min=LR / 10, decay_fn=theirs), []
    for update in range(PLANNED):
        rates.append(optimizer.param_groups[0]["lr"])
        own.step(update + 1)
    words = ("schedule=warmup_stable_decay", "schedule.warmup=0", "schedule.decay=0.4", "schedule.final=0.1")
    assert table(*words, f"schedule.shape={shape}") == pytest.approx(rates, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (("schedule=one_cycle",), lambda o: lr_scheduler.OneCycleLR(o, 0.05, 18)),
        (("schedule=torch", "schedule.name=StepLR", "schedule.step_size=3"), lambda o: lr_scheduler.StepLR(o, 3)),
    ],
)
def test_skipped_steps_do_not_advance_any_schedule_in_a_run(tmp_path, words, make):
    fault = ("inject.step=4", "inject.count=3", "inject.tensor=input")
    loop = loop_of(tmp_path, *TINY, "precision=amp_dynamic", "optimizer.lr=0.05", *words, *fault)
    loop.run()
    steps = steps_of(loop)
    assert [step["step"] for step in steps if step["skipped"]] == [4, 5, 6]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.05, momentum=0.9)
    scheduler = make(optimizer)
    for step in steps:
        assert step["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        if not step["skipped"]:
            optimizer.step()
            scheduler.step()
    assert steps[-1]["updates"] == 15


def own_schedule(optimizer, total_iters: int, steps_per_epoch: int, power: float = 2.0):
    return lr_scheduler.LambdaLR(optimizer, lambda update: (1 - update // steps_per_epoch * 0.1) ** power)


def cycling(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 1.0, 60)


def cycling_back(optimizer, total_steps: int):
    """The last update has the momentum of the first."""
    return lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, (total_steps - 1) / 2, base_momentum=0.5, max_momentum=0.9)


def no_scheduler(optimizer):
    return optimizer


def on_plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def target(name, **arguments):
    return check_schedule(Target(f"{__name__}.{name}", arguments, (__name__,)), "schedule")


def test_a_function_of_ones_own_builds_what_a_configuration_cannot():
    schedule = build_schedule(target("own_schedule", power=1.0))
    assert schedule.rates(LR, PLANNED, PER_EPOCH)[14:16] == [LR, pytest.approx(0.9 * LR)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cycling", "changes the optimizer's momentum, which mptrain keeps constant"),
        ("cycling_back", "changes the optimizer's momentum"),
        ("no_scheduler", "returned a SGD, not a scheduler of the given optimizer"),
        ("on_plateau", "ReduceLROnPlateau needs the metric of each validation"),
    ],
)
def test_what_a_function_of_ones_own_must_not_return(name, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(target(name)).rates(LR, PLANNED, PER_EPOCH)
