"""The suite for one GPU: audits, the optimizer's step, precisions, peers, graphs (G1 to G12)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases import gpu_works
from benchmarks.cases.case import Case, Setting
from benchmarks.cases.steps import contest, precisions
from benchmarks.cases.update import Masters, naive, shapes
from benchmarks.loops.bare import Bare, Passes
from benchmarks.loops.base import Mode
from benchmarks.loops.ours import Ours
from benchmarks.loops.peers import PEERS, NotThere
from benchmarks.results import Measurement, measured, unavailable
from benchmarks.timing import Estimate, Times, take_turns, timed
from mptrain.engine.step_runner import host_waits

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.loops.base import ByHand

GRAPH = ("train.engine=graph",)


def _synchronise(setting: Setting) -> Callable[[], object]:
    return torch.cuda.synchronize if setting.device == "cuda" else lambda: None


def _speed(times: Times, ours: str, other: str) -> Estimate:
    """How many times as fast ``ours`` is."""
    return times.ratio(other, ours)


def waits(setting: Setting) -> list[Measurement]:
    """G9: waits for the device in ten steps, as torch notices them."""
    rows = []
    for mode in ("fp32", "amp", "half"):
        loop = Ours(gpu_works.resnet18(setting), mode)
        rows.append(measured("G9", "" if mode == "half" else mode, _waits(loop, setting), judged=mode == "half"))
        loop.close()
    return rows


def _waits(loop: ByHand, setting: Setting, steps: int = 10) -> float:
    loop.block(5)
    if setting.device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    with host_waits(torch.device("cuda")) as found:
        for index in range(steps):
            loop.step(loop.batches[index % len(loop.batches)])
    return len(found) / steps


def launches(setting: Setting) -> list[Measurement]:
    """G10: kernels and copies that a step launches besides those of forward and backward alone."""
    work = gpu_works.resnet18(setting)
    if setting.device != "cuda":
        return [unavailable("G10", "", "launches are counted on a GPU alone")]
    counts = {}
    loops: dict[str, ByHand] = {
        "passes": Passes(work, "half"),
        "ours": Ours(work, "half"),
        "graph": Ours(replace(work, more=(*work.more, *GRAPH)), "half"),
        "passes amp": Passes(work, "amp"),
        "bare": Bare(work, "amp"),
        "bare_best": Bare(work, "amp", best=True),
    }
    for name, loop in loops.items():
        counts[name] = _launches(loop)
        loop.close()
    return [
        measured("G10", "", counts["graph"]),
        measured(
            "G10", "launched one by one, without forward and backward", counts["ours"] - counts["passes"], judged=False
        ),
        measured("G10", "bare, without forward and backward", counts["bare"] - counts["passes amp"], judged=False),
        measured(
            "G10", "bare_best, without forward and backward", counts["bare_best"] - counts["passes amp"], judged=False
        ),
    ]


def _launches(loop: ByHand, steps: int = 10) -> float:
    """Calls that put something on the device, a step."""
    from torch.profiler import ProfilerActivity, profile

    loop.block(8)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for index in range(steps):
            loop.step(loop.batches[index % len(loop.batches)])
        torch.cuda.synchronize()
    calls = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
    return float(sum(event.count for event in seen.key_averages() if event.key.startswith(calls))) / steps


def optimizer(setting: Setting) -> list[Measurement]:
    """G7: judge and update of FP16 weights with FP32 masters, against memory and against stock operators."""
    device = torch.device(setting.device)
    parameters = 200_000 if setting.rehearsal else 100_000_000
    sizes = shapes(parameters, 160)
    gradients = [(torch.randn(size, device=device) * 1e-2).half() for size in sizes]
    ours, wait = Masters(sizes, gradients, device), _synchronise(setting)
    source = torch.empty(parameters * 8, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    contenders = {
        "ours": timed(ours.step, wait),
        "naive": timed(naive(sizes, gradients, device), wait),
        "fused": timed(_fused(sizes, device), wait),
        "copy": timed(lambda index: target.copy_(source), wait),
    }
    times = take_turns(contenders, setting.seconds)
    moved, copied = 22 * sum(sizes), 2 * len(source)  # SGD with momentum: check, gradient, master, momentum, weight
    share = times.ratio("copy", "ours")
    share = Estimate(
        share.value * moved / copied, share.low * moved / copied, share.high * moved / copied, share.rounds
    )
    return [
        measured("G7", "share of copy bandwidth", share),
        measured("G7", "/ torch fused + GradScaler", _speed(times, "ours", "fused")),
        measured("G7", "/ naive", _speed(times, "ours", "naive")),
        measured("G7", "GB/s of a copy", copied / times.of("copy").value / 1e9, judged=False),
    ]


def _fused(sizes: list[int], device: torch.device) -> Callable[[int], None]:
    """What autocast trains with: FP32 weights and gradients, GradScaler, a fused optimizer."""
    parameters = [torch.nn.Parameter(torch.randn(size, device=device) * 0.05) for size in sizes]
    gradients = [torch.randn(size, device=device) * 1e-2 for size in sizes]
    found = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))

    def step(index: int) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        scaler.step(found)
        scaler.update()

    return step


def resnet50_precisions(setting: Setting) -> list[Measurement]:
    """G3 to G6 on ResNet-50."""
    work = gpu_works.resnet50(setting)
    times, peaks = precisions(work, _modes(setting), setting.seconds)
    batch = int(next(word for word in work.words if word.startswith("train.batch_size")).partition("=")[2])
    half = times.of("half")
    rows = [
        measured("G3", "", Estimate(batch / half.value, batch / half.high, batch / half.low, half.rounds)),
        *_against("resnet50", times),
        measured("G5", "resnet50", _speed(times, "half", "amp")),
        measured("G3", "images/s under autocast", batch / times.of("amp").value, judged=False),
        measured("G3", "images/s in fp32", batch / times.of("fp32").value, judged=False),
    ]
    if peaks:
        rows.append(measured("G6", "", peaks["fp32"] / peaks["half"] / 1.97))
        rows += [measured("G6", f"GB in {name}", peak / 1e9, judged=False) for name, peak in peaks.items()]
    else:
        rows.append(unavailable("G6", "", "memory is measured on a GPU alone"))
    return rows


def _modes(setting: Setting) -> tuple[Mode, ...]:
    """The precisions that are compared; a CPU has no TF32."""
    return ("half", "amp", "tf32", "fp32") if setting.device == "cuda" else ("half", "amp", "fp32")


def _against(name: str, times: Times) -> list[Measurement]:
    """G4: half precision against the others."""
    others = [mode for mode in ("tf32", "fp32") if mode in times.seconds]
    return [measured("G4", f"{name} / {other}", _speed(times, "half", other)) for other in others]


def other_precisions(setting: Setting) -> list[Measurement]:
    """G4 and G5 on the other networks."""
    rows = []
    works = {"transformer": gpu_works.transformer, "seq2seq": gpu_works.seq2seq, "vgg16": gpu_works.vgg16}
    for name, make in works.items():
        try:
            times, _ = precisions(make(setting), _modes(setting), setting.seconds / len(works))
        except Exception as error:  # an extra that is not installed, or too little memory: the others go on
            rows.append(unavailable("G4", f"{name} / tf32", str(error).splitlines()[0]))
            continue
        rows += _against(name, times)
        rows.append(measured("G5", name, _speed(times, "half", "amp"), judged=name == "transformer"))
    return rows


def peers(setting: Setting) -> list[Measurement]:
    """G1: ours under autocast against the same by others."""
    found = contest(gpu_works.resnet50(setting), "amp", setting.seconds, peers=setting.peers)
    rows = [
        measured("G1", name, _speed(found.times, "ours", name), void=found.void, judged=name not in ("passes", "twin"))
        for name in found.makers
        if name != "ours"
    ]
    return rows + [unavailable("G1", name, why) for name, why in found.refused.items()]


def recording(setting: Setting) -> list[Measurement]:
    """G11: the same loop with and without its record."""
    work = gpu_works.resnet50(setting)
    with contextlib.closing(Ours(work, "half")) as loop:
        times = take_turns({"with": loop.block, "without": loop.block_without_record}, setting.seconds)
    return [measured("G11", "", _speed(times, "with", "without"))]


def graphs(setting: Setting) -> list[Measurement]:
    """G2: whole steps as CUDA graphs."""
    rows = []
    for name, make in {"mlp": gpu_works.mlp, "resnet18": gpu_works.resnet18}.items():
        work = make(setting)
        loops: dict[str, Any] = {
            "graph": Ours(replace(work, more=(*work.more, *GRAPH)), "amp"),
            "eager": Ours(work, "amp"),
            "bare_best": Bare(work, "amp", best=True),
        }
        lightning = next(peer for peer in PEERS if peer.name == "lightning")
        try:
            if setting.peers:
                loops["lightning"] = lightning.make(work, "amp")
        except NotThere as why:
            rows.append(unavailable("G2", f"{name} / lightning", str(why)))
        with contextlib.ExitStack() as stack:
            for loop in loops.values():
                stack.callback(loop.close)
            times = take_turns({one: loop.block for one, loop in loops.items()}, setting.seconds / 2)
        rows += [
            measured("G2", f"{name} / {other}", _speed(times, "graph", other), judged=other != "eager")
            for other in loops
            if other != "graph"
        ]
        rows.append(
            measured("G2", f"{name}: microseconds of a graph step", times.of("graph").value * 1e6, judged=False)
        )
    return rows


def arithmetic(setting: Setting) -> list[Measurement]:
    """G12: operations of a Transformer's step as a share of what matrix products reach.

    Counted are 6 for each weight and token, and 12 for each pair of positions.
    """
    size = 256 if setting.rehearsal else 8192
    one, other = (torch.randn(size, size, device=setting.device).half() for _ in range(2))
    wait = _synchronise(setting)
    rows = []
    for name, more in {"eager": (), "compiled": ("train.compile=true",)}.items():
        if name == "compiled" and setting.device != "cuda":
            rows.append(unavailable("G12", name, "half precision is not compiled on this CPU"))
            continue
        work = gpu_works.transformer(setting)
        work = replace(work, more=(*work.more, *more))
        loop = Ours(work, "half")
        if more:
            loop.loop.parts.compile()
        times = take_turns({"step": loop.block, "product": timed(lambda index: one @ other, wait)}, setting.seconds / 2)
        share = times.ratio("product", "step")
        factor = _operations(loop) / (2 * size**3)
        rows.append(
            measured("G12", name, Estimate(share.value * factor, share.low * factor, share.high * factor, share.rounds))
        )
        rows.append(
            measured(
                "G12", f"TFLOP/s of a product ({name})", 2 * size**3 / times.of("product").value / 1e12, judged=False
            )
        )
        loop.close()
    return rows


def _operations(loop: Ours) -> float:
    """Multiplications and additions of a step of a Transformer."""
    model = loop.loop.parts.model
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Embedding))
    weights = sum(parameter.numel() for parameter in model.parameters()) - tables
    batch, length = loop.batches[0].inputs.shape[:2]
    blocks = [module for module in model.modules() if isinstance(module, torch.nn.TransformerEncoderLayer)]
    width = blocks[0].linear1.in_features if blocks else 0
    return float(
        batch * length * (6 * weights + 12 * len(blocks) * width * length / 2)
    )  # a causal mask halves the pairs


CASES = (
    Case("waits for the device", ("G9",), waits, 0.3),
    Case("launches", ("G10",), launches, 0.3),
    Case("optimizer step", ("G7",), optimizer, 1),
    Case("ResNet-50 in every precision", ("G3", "G4", "G5", "G6"), resnet50_precisions, 2.5),
    Case("record on and off", ("G11",), recording, 1),
    Case("ResNet-50 against others", ("G1",), peers, 3),
    Case("graphs", ("G2",), graphs, 1.5),
    Case("other networks in every precision", ("G4", "G5"), other_precisions, 2.5),
)
#: What compiles, which takes long.
COMPILING = (Case("arithmetic used", ("G12",), arithmetic, 1),)
