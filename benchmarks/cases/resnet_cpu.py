"""What half precision gains on a CPU (C11)."""

from __future__ import annotations

from benchmarks.cases.case import Case, Setting
from benchmarks.cases.steps import Contest
from benchmarks.loops.base import Mode, Work
from benchmarks.loops.ours import Ours
from benchmarks.results import Measurement, measured, unavailable
from benchmarks.timing import Estimate
from mptrain.system.torch_private import has_native_half

RESNET18 = (
    "model=resnet18",
    "dataset=synthetic",
    "dataset.image_size=32",
    "dataset.samples=512",
    "dataset.val_samples=64",
    "train.batch_size=32",
)


def half_speed(setting: Setting) -> list[Measurement]:
    """C11: only a CPU with half-precision arithmetic can gain by it."""
    work = Work(tuple(word.replace("image_size=32", "image_size=112") for word in RESNET18))
    modes: dict[str, Mode] = {"ours": "fp32", "half": "bf16"}
    found = Contest(work, {"ours": lambda work: Ours(work, "fp32"), "half": lambda work: Ours(work, "bf16")})
    times = found.run(setting.seconds, modes).times
    speed = times.ratio("ours", "half")
    if has_native_half("bfloat16"):
        return [measured("C11", "", speed)]
    return [
        unavailable("C11", "", "this CPU has no BF16 arithmetic"),
        measured(
            "C11",
            "speed with upcast products / fp32",
            Estimate(speed.value, speed.low, speed.high, speed.rounds),
            judged=False,
        ),
    ]


CASES = (Case("half precision on a CPU", ("C11",), half_speed, 2),)
