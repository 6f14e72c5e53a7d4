"""What is to be reached, and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.results import Measurement


@dataclass(frozen=True)
class Goal:
    """One line of the table of goals.

    Attributes:
        name: C1 and so on on a CPU, G1 and so on on a GPU.
        what: The measurement.
        anchor: What others reach.
        limit: What nothing can beat.
        bounds: The goal, by the measurement's ``what``; a goal of a single number has the key "".
        better: Whether low or high numbers are good.
        unit: Of the number; empty for a ratio.
    """

    name: str
    what: str
    anchor: str
    limit: str
    bounds: dict[str, float]
    better: Literal["low", "high"]
    unit: str = ""

    def met(self, found: Measurement) -> bool | None:
        """Whether a measurement reaches the goal; None where it was not measured, is void or is not judged."""
        bound = self.bounds.get(found.what)
        if not found.judged or bound is None or found.value is None or found.state != "measured":
            return None
        return found.value <= bound if self.better == "low" else found.value >= bound


GOALS = {
    goal.name: goal
    for goal in (
        Goal("C1", "fp32 step with scaler and record / bare loop without either (MLP, batch 32, SGD momentum)", "Fabric 1.19, accelerate 1.75, Lightning 2.46", "forward and backward alone", {"": 0.80}, "low"),
        Goal("C2", "amp_dynamic step with record / bare autocast + GradScaler", "Fabric 1.03, accelerate 1.25, Lightning 1.56", "forward and backward alone", {"": 0.75}, "low"),
        Goal("C3", "fp16_dynamic step with master weights and record / bare autocast + GradScaler", "nobody offers it", "forward and backward alone", {"": 0.65}, "low"),
        Goal("C4", "writing the record of every step", "get_scale + json 24 us, Lightning's log + CSV 583 us", "2 us", {"microseconds": 6.0, "share of the step": 0.04}, "low"),
        Goal("C5", "host reads of device values in a step", "GradScaler 1, timm 2", "0", {"": 0.0}, "low"),
        Goal("C6", "command line to first training step / import torch", "a bare script 1.85, Lightning's import alone 3.1", "1.1", {"": 1.4}, "low"),
        Goal("C7", "mptrain --help / an empty Hydra application", "-", "1.0", {"": 1.3}, "low"),
        Goal("C8", "isolation of a sweep's job", "a fresh process 2.6 to 3 s", "fork of a warm server 15 ms", {"": 0.060}, "low", "s"),
        Goal("C9", "256 MB checkpoint", "torch.save 3.9 and 1.55", "1 and 1", {"blocked / memcpy": 1.2, "total / write + fsync": 1.3}, "low"),
        Goal("C10", "master-weight update / naive update on stock operators, 20 M parameters", "foreach copy + fused kernel 0.79", "0.5 by bytes", {"eager": 0.80}, "low"),
        Goal("C11", "ResNet-18 amp_bf16 at 112 px, channels_last: speed / fp32, on a CPU with BF16", "1.9 bare", "4.0 (matrix products)", {"": 1.7}, "high"),
        Goal("C12", "amp_bf16 step with record / bare autocast to BF16, on a CPU with BF16", "Fabric 1.15, 1.04, 1.02", "1.0", {"mlp": 1.10, "cnn": 1.10, "resnet18": 1.10}, "low"),
        Goal("C13", "fp32 step with record / the best framework's without", "1.0", "forward and backward alone", {"mlp": 1.0, "cnn": 1.0}, "low"),
        Goal("C14", "peak memory of ResNet-50 in FP32 without the checkpoint's copy / bare loop", "1.0", "1.0", {"": 1.08}, "low"),
        Goal("C15", "200,000 steps on record", "-", "reading the file", {"replay": 5.0, "report": 5.0}, "low", "s"),
        Goal("C16", "sweep of two jobs less two single runs", "-", "-", {"": 2.0}, "low", "s"),
        Goal("C17", "default command on all cores / bare script of the same training", "1.0", "0.8", {"fp32: wall": 1.0, "fp32: training": 1.15, "amp_dynamic: wall": 1.0, "amp_dynamic: training": 1.15}, "low"),
        Goal("C18", "optimizer=torch optimizer.name=AdamW / the best bare loop", "1.0", "-", {"resnet18": 1.05, "mlp": 1.20}, "low"),
        Goal("C19", "samples/s of the default threads / the best of one thread, spinning and sleeping threads", "1.0", "1.0", {"cnn fp32": 0.95, "cnn amp_dynamic": 0.95, "resnet18 fp32": 0.95, "resnet18 amp_dynamic": 0.95}, "high"),
        Goal("C20", "transformer amp_bf16 step with record / bare autocast to BF16, on a CPU with BF16", "1.0", "0.65", {"": 0.75}, "low"),
        Goal("C21", "watching what others change (MLP) / fp32 step", "-", "0", {"fp32": 0.01, "half": 0.01}, "low"),
        Goal("C22", "mptrain.watch on a bare ResNet-18 step (batch 32), beyond the step: records; and histograms in every 100th step", "-", "0", {"records": 0.02, "histograms": 0.05}, "low"),
        Goal("G1", "ResNet-50, batch 256, NHWC, every step recorded: throughput / others", "they wait for the host once or twice a step", "1.0 against bare best", {"bare": 1.02, "bare_best": 0.995, "lightning": 1.03, "fabric": 1.03, "accelerate": 1.03, "timm": 1.03}, "high"),
        Goal("G2", "launch-bound networks, whole step in a CUDA graph: speed / others", "-", "device time", {"mlp / bare_best": 1.5, "resnet18 / bare_best": 1.5, "mlp / lightning": 2.0, "resnet18 / lightning": 2.0}, "high"),
        Goal("G3", "ResNet-50, synthetic data", "H200 3079 (NCHW), H100 about 7000 (MLPerf, 8 GPUs)", "9000", {"": 4500.0}, "high", "images/s"),
        Goal("G4", "fp16_dynamic speed / tf32 and / fp32", "ResNet-50 1.36 (NCHW), GNMT 2.0; the paper 2 to 6", "about 2 and 12 to 15", {"resnet50 / tf32": 1.8, "resnet50 / fp32": 2.5, "seq2seq / tf32": 2.0, "seq2seq / fp32": 3.5, "transformer / tf32": 1.7, "transformer / fp32": 5.0, "vgg16 / tf32": 1.7, "vgg16 / fp32": 4.0}, "high"),
        Goal("G5", "fp16_dynamic speed / amp_dynamic speed", "-", "-", {"resnet50": 1.0, "transformer": 1.05}, "high"),
        Goal("G6", "peak memory fp32 / fp16_dynamic, as a share of what can be reached (ResNet-50: 1.97)", "the paper: nearly 2", "1.97", {"": 0.94}, "high"),
        Goal("G7", "optimizer step: bytes/s / copy bandwidth, and speed / others", "nothing published", "1.0", {"share of copy bandwidth": 0.80, "/ torch fused + GradScaler": 1.3, "/ naive": 1.8}, "high"),
        Goal("G9", "device-to-host waits in a step, record on", "1 to 2", "0", {"": 0.0}, "low"),
        Goal("G10", "kernel launches outside forward and backward", "about 10", "3", {"": 6.0}, "low"),
        Goal("G11", "throughput with record / without", "-", "1.0", {"": 0.998}, "high"),
        Goal("G12", "arithmetic used of the measured peak of matrix products, Transformer", "-", "1.0", {"eager": 0.35, "compiled": 0.45}, "high"),
        Goal("G13", "mptrain.watch on a bare ResNet-50 step (batch 256, autocast, fused), beyond the step: records; and histograms in every 100th step", "-", "0", {"records": 0.01, "histograms": 0.05}, "low"),
    )
}  # fmt: skip
