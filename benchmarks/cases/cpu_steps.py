"""Steps of small networks on a CPU: what a loop costs besides the network (C1 to C5, C12, C13, C18, C20, C21)."""

from __future__ import annotations

import contextlib
import time

import torch

from benchmarks.cases.audit import as_on_a_device, host_reads
from benchmarks.cases.case import Case, Setting
from benchmarks.cases.resnet_cpu import RESNET18
from benchmarks.cases.steps import Contest, contest
from benchmarks.loops.bare import Bare
from benchmarks.loops.base import Mode, Work
from benchmarks.loops.ours import Ours
from benchmarks.loops.peers import PEERS, NotThere
from benchmarks.results import Measurement, measured, unavailable
from benchmarks.timing import PLACES, Times, in_several_places, take_turns
from mptrain.system.torch_private import has_native_half

#: 36-64-64-10 with ReLU; the labels cannot be learned, so the gradients stay as large as they are.
MLP = (
    "model=mlp",
    "model.hidden=[64,64]",
    "dataset=synthetic",
    "dataset.image_size=6",
    "dataset.channels=1",
    "dataset.learnable=false",
    "train.batch_size=32",
    "train.channels_last=false",
)

#: Peers that bring a loop of their own; timm's script is a bare loop in FP32.
FRAMEWORKS = ("fabric", "accelerate", "lightning")

#: 8x8 digits, three convolutions with BatchNorm.
CNN = ("model=cnn", "dataset=digits", "train.batch_size=32", "train.channels_last=false")

#: Two blocks of width 128 over sequences of 64 characters.
TRANSFORMER = (
    "model=transformer",
    "model.width=128",
    "model.layers=2",
    "model.heads=4",
    "dataset.sequence_length=64",
    "train.batch_size=32",
)

#: torch's own half-precision kernels, as everybody else's loop uses them.
SMALL = Work(MLP, more=("precision.cpu_kernels=native",))


def step_in_fp32(setting: Setting) -> list[Measurement]:
    """C1."""
    return _against_bare("C1", "fp32", None, setting)


def step_under_autocast(setting: Setting) -> list[Measurement]:
    """C2."""
    return _against_bare("C2", "amp", None, setting)


def step_with_masters(setting: Setting) -> list[Measurement]:
    """C3."""
    return _against_bare("C3", "half", "amp", setting)


def step_in_bf16(setting: Setting) -> list[Measurement]:
    """C12."""
    if not has_native_half("bfloat16"):
        return [unavailable("C12", name, "this CPU has no BF16 arithmetic") for name in ("mlp", "cnn", "resnet18")]
    rows = []
    for name, words, places in (("mlp", MLP, PLACES), ("cnn", CNN, PLACES), ("resnet18", RESNET18, 1)):
        found = contest(Work(words), "bf16", setting.seconds / 3, peers=setting.peers, places=places)
        rows += [
            measured("C12", name, found.times.ratio("ours", "bare"), void=found.void),
            *_beside("C12", found, name),
        ]
    return rows


def step_beside_frameworks(setting: Setting) -> list[Measurement]:
    """C13: with the scaler of ``precision=fp32`` as users get it, which never scales."""
    rows = []
    for name, words in (("mlp", MLP), ("cnn", CNN)):
        work = Work(words, more=("scaler=none",))
        found = contest(work, "fp32", setting.seconds / 2, peers=setting.peers, places=PLACES)
        there = [peer for peer in FRAMEWORKS if peer in found.makers]
        if not there:
            rows.append(unavailable("C13", name, "no framework is installed: pip install -e '.[bench]'"))
            continue
        best = min(there, key=lambda peer: found.times.of(peer).value)
        rows.append(measured("C13", name, found.times.ratio("ours", best), void=found.void))
        rows.append(measured("C13", f"{name}: ours / bare", found.times.ratio("ours", "bare"), judged=False))
        rows += _beside("C13", found, name)
    return rows


def _against_bare(goal: str, mode: Mode, bare_mode: Mode | None, setting: Setting) -> list[Measurement]:
    found = contest(SMALL, mode, setting.seconds, peers=setting.peers, bare_mode=bare_mode, places=PLACES)
    times, void = found.times, found.void

    def turns(seconds: float) -> Times:
        with contextlib.closing(Ours(SMALL, mode)) as loop:
            return take_turns({"whole": loop.whole_loop, "ready": loop.block}, seconds, least=2)

    whole = in_several_places(turns, setting.seconds / 4, PLACES)
    return [
        measured(goal, "", times.ratio("ours", "bare"), void=void),
        measured(goal, "whole loop / step on ready batches", whole.ratio("whole", "ready"), judged=False),
        *_beside(goal, found),
        measured(goal, "microseconds of a bare step", times.of("bare").value * 1e6, judged=False),
        measured(goal, "microseconds of ours", times.of("ours").value * 1e6, judged=False),
    ]


def _beside(goal: str, found: Contest, work: str = "") -> list[Measurement]:
    """The other loops against the bare one."""
    of = f"{work}: " if work else ""
    rows = [
        measured(goal, f"{of}{name} / bare", found.times.ratio(name, "bare"), judged=False, void=found.void)
        for name in found.makers
        if name not in ("ours", "bare")
    ]
    return rows + [unavailable(goal, f"{of}{name} / bare", why, judged=False) for name, why in found.refused.items()]


def optimizer_by_name(setting: Setting) -> list[Measurement]:
    """C18: torch's AdamW by its name, against the quicker one of two bare loops (fused or not)."""
    rows = []
    for name, words, places in (("mlp", MLP, PLACES), ("resnet18", RESNET18, 1)):
        work = Work(words, optimizer="torch.AdamW", more=("scaler=none",))
        found = contest(work, "fp32", setting.seconds / 2, peers=False, places=places)
        best = min(("bare", "bare_best"), key=lambda one: found.times.of(one).value)
        rows.append(measured("C18", name, found.times.ratio("ours", best), void=found.void))
    return rows


def transformer(setting: Setting) -> list[Measurement]:
    """C20."""
    work = Work(TRANSFORMER, optimizer="adam")
    found = contest(work, "bf16", setting.seconds, peers=False, places=1)
    ratio = found.times.ratio("ours", "bare")
    if has_native_half("bfloat16"):
        return [measured("C20", "", ratio, void=found.void)]
    return [
        unavailable("C20", "", "this CPU has no BF16 arithmetic"),
        measured("C20", "with upcast products", ratio, judged=False, void=found.void),
    ]


def record(setting: Setting) -> list[Measurement]:
    """C4: the same loop with and without writing and reading its record."""

    def turns(seconds: float) -> Times:
        with contextlib.closing(Ours(SMALL, "fp32")) as loop:
            return take_turns({"with": loop.block, "without": loop.block_without_record}, seconds, least=2)

    times = in_several_places(turns, setting.seconds, PLACES)
    cost, share = times.difference("with", "without"), times.ratio("with", "without")
    micro = 1e6
    return [
        measured(
            "C4", "microseconds", type(cost)(cost.value * micro, cost.low * micro, cost.high * micro, cost.rounds)
        ),
        measured("C4", "share of the step", type(share)(share.value - 1, share.low - 1, share.high - 1, share.rounds)),
    ]


def guard(setting: Setting) -> list[Measurement]:
    """C21: what a step does to see changes of parameters and buffers by others, on its own, against the step."""
    rows = []
    for mode in ("fp32", "half"):

        def turns(seconds: float, mode: Mode = mode) -> Times:
            with contextlib.closing(Ours(SMALL, mode)) as loop:
                loop.block(3)
                watched, applied = loop.loop.parts.plan.guard, torch.ones(1, dtype=torch.bool)

                def block(steps: int) -> float:
                    started = time.perf_counter()
                    for _ in range(steps):
                        watched.snapshot()
                        watched.settle()
                        watched.write_through(applied)
                    return time.perf_counter() - started

                return take_turns({"guard": block, "step": loop.block}, seconds, least=2)

        times = in_several_places(turns, setting.seconds / 2, PLACES)
        rows.append(measured("C21", mode, times.ratio("guard", "step")))
    return rows


def reads(setting: Setting) -> list[Measurement]:
    """C5: counted, in a step with half precision and a scaler."""
    with as_on_a_device():
        rows = [measured("C5", "", host_reads(Ours(SMALL, "amp")))]
    rows.append(measured("C5", "bare", host_reads(Bare(SMALL, "amp")), judged=False))
    rows.append(measured("C5", "bare_best", host_reads(Bare(SMALL, "amp", best=True)), judged=False))
    for peer in PEERS if setting.peers else ():
        if peer.name == "lightning":  # its steps cannot be driven one by one
            continue
        try:
            rows.append(measured("C5", peer.name, host_reads(peer.make(SMALL, "amp")), judged=False))
        except NotThere as why:
            rows.append(unavailable("C5", peer.name, str(why), judged=False))
    return rows


CASES = (
    Case("step in fp32", ("C1",), step_in_fp32, 3),
    Case("step under autocast", ("C2",), step_under_autocast, 3),
    Case("step with master weights", ("C3",), step_with_masters, 2),
    Case("step in BF16", ("C12",), step_in_bf16, 5),
    Case("step beside frameworks", ("C13",), step_beside_frameworks, 4),
    Case("record of every step", ("C4",), record, 2),
    Case("optimizer by name", ("C18",), optimizer_by_name, 3),
    Case("transformer in BF16", ("C20",), transformer, 2),
    Case("changes by others", ("C21",), guard, 1),
    Case("host reads", ("C5",), reads, 0.2),
)
