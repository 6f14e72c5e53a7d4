"""Precision policy: the dtypes that a precision mode, such as ``fp16_dynamic`` or ``amp_bf16``, uses in training.

Nothing here imports torch, and no code checks for a mode by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mptrain.system.errors import ConfigError, Problem

Dtype = Literal["float32", "float16", "bfloat16"]

#: Names of the rules for operands in emulated formats: those of `mptrain.numerics.quantization.RULES`.
Emulated = Literal[
    "fp16",
    "bf16",
    "fp8_unscaled",
    "fp8_tensor",
    "fp8_row",
    "fp8_block",
    "mxfp8",
    "mxfp8_floor",
    "mxfp4",
    "nvfp4",
]

#: Classes of the entry ``norms`` in ``keep_fp32``: every normalisation layer of torch.
NORMS = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "SyncBatchNorm",
    "LayerNorm",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "RMSNorm",
)


@dataclass(frozen=True)
class Policy:
    """Precision policy of a training run, filled from a file in ``configs/precision``.

    Fields that contradict each other, such as autocast with half-precision parameters, raise ConfigError.

    Attributes:
        parameters: Dtype of the parameters that the forward pass reads.
        compute: Dtype of matrix products and convolutions.
        autocast: torch's autocast casts parameters op by op, instead of storing them in ``compute``.
        master_weights: Half-precision parameters have an FP32 copy that the optimizer updates (Micikevicius et al.
            2018, section 3.1).
        optimizer_state: Dtype of momentum and moments.
        rounding: How updated weights without a master copy are rounded: to ``nearest``, at random without bias
            (``stochastic``), or to nearest with what rounding took kept for the next update (``compensated``, Kahan).
        keep_fp32: Modules whose parameters and arithmetic stay in FP32: class names, module names or patterns of them
            (``layer4.*``); ``norms`` means every normalisation layer of torch.
        tf32: FP32 matrix products and convolutions may round their inputs to TF32 (10 mantissa bits).
        eval: Precision of evaluation: ``same`` as training, or ``fp32`` from the FP32 weights.
        cpu_kernels: Kernels of half-precision products on a CPU: ``native``, or ``upcast``, which computes in FP32 and
            rounds the result once. ``auto`` upcasts if the CPU has no half-precision arithmetic. Except with
            ``native``, long sums that torch's CPU kernels accumulate in half precision are upcast on every CPU.
        force: Run on a device that does not support the mode well.
        emulate: Rule by which the operands of layers' products are rounded to a format of 16, 8 or 4 bits, with its
            scales (`mptrain.numerics.quantization`); the products and everything else are FP32. None for none.
    """

    name: str
    parameters: Dtype
    compute: Dtype
    autocast: bool
    master_weights: bool
    optimizer_state: Literal["float32", "parameters"] = "float32"
    rounding: Literal["nearest", "stochastic", "compensated"] = "nearest"
    keep_fp32: tuple[str, ...] = ()
    tf32: bool = False
    eval: Literal["same", "fp32"] = "same"
    cpu_kernels: Literal["auto", "native", "upcast"] = "auto"
    force: bool = False
    emulate: Emulated | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.autocast and self.parameters != "float32":
            problems.append(
                Problem(
                    f"precision.autocast=true with precision.parameters={self.parameters}:"
                    " autocast needs FP32 parameters",
                    "use precision=fp16_dynamic for FP16 storage, or precision=amp_dynamic for autocast",
                )
            )
        if not self.autocast and self.parameters != self.compute:
            problems.append(
                Problem(
                    f"precision.compute={self.compute} with precision.parameters={self.parameters} and no autocast",
                    "set precision.autocast=true: without it products use the parameters' dtype"
                    if self.parameters == "float32"
                    else f"set precision.compute={self.parameters}: without autocast, which needs FP32 parameters, "
                    "products use the parameters' dtype",
                )
            )
        if self.master_weights and self.parameters == "float32":
            problems.append(
                Problem(
                    "precision.master_weights=true with FP32 parameters: they are their own master copy",
                    "set precision.master_weights=false",
                )
            )
        if self.optimizer_state == "parameters" and self.master_weights:
            problems.append(
                Problem(
                    "precision.optimizer_state=parameters with master weights: their optimizer state is FP32",
                    "set precision.optimizer_state=float32",
                )
            )
        if self.rounding != "nearest" and (self.parameters != "bfloat16" or self.master_weights):
            has = "master weights" if self.master_weights else f"precision.parameters={self.parameters}"
            problems.append(
                Problem(
                    f"precision.rounding={self.rounding} with {has}: it is for BF16 weights without a master copy",
                    "set precision.rounding=nearest, or use precision=bf16_stochastic or bf16_kahan",
                )
            )
        if self.rounding != "nearest" and self.optimizer_state == "parameters":
            problems.append(
                Problem(
                    f"precision.rounding={self.rounding} with precision.optimizer_state=parameters:"
                    " an optimizer whose state is BF16 rounds its updates itself",
                    "set precision.optimizer_state=float32",
                )
            )
        if self.tf32 and self.eval == "fp32":
            problems.append(
                Problem(
                    "precision.eval=fp32 with precision.tf32=true: TF32 cannot be switched off for evaluation only",
                    "evaluate the finished run in FP32 with: mptrain eval RUN precision=fp32",
                )
            )
        if self.emulate is not None and (self.compute != "float32" or self.autocast or self.tf32):
            has = "autocast=true" if self.autocast else "tf32=true" if self.tf32 else f"compute={self.compute}"
            problems.append(
                Problem(
                    f"precision.emulate={self.emulate} with precision.{has}: an emulated format has FP32 products",
                    "use precision=mxfp8_emulated, which takes any rule, or set precision.emulate=null",
                )
            )
        if problems:
            raise ConfigError(problems)

    @property
    def half(self) -> bool:
        """True if matrix products and convolutions run in FP16 or BF16."""
        return self.compute != "float32"

    @property
    def reduced(self) -> bool:
        """True if operands of products have fewer bits than FP32: in half precision or in an emulated format."""
        return self.half or self.emulate is not None

    @property
    def reductions(self) -> str:
        """Name of the dtype in which normalisation layers compute mean and variance."""
        kept = "norms" in self.keep_fp32 or set(NORMS) <= set(self.keep_fp32)
        return "float32" if self.autocast or kept or not self.half else self.parameters

    def describe(self) -> str:
        """Return one line of text: dtypes of parameters, compute, gradients, master weights, reductions and loss."""
        compute = f"autocast {self.compute}" if self.autocast else self.compute
        if self.emulate is not None:
            compute += f" from operands in {self.emulate} (emulated, slower than FP32)"
        elif self.compute == "float32":
            compute += " with TF32 products" if self.tf32 else " (TF32 off)"
        if self.parameters == "float32":
            master = "the parameters themselves"
        else:
            master = "float32" if self.master_weights else _WITHOUT_MASTER[self.rounding]
        kept = f", kept in float32: {', '.join(self.keep_fp32)}" if self.keep_fp32 else ""
        return (
            f"parameters {self.parameters}, compute {compute}, gradients {self.parameters}, master weights {master}, "
            f"reductions {self.reductions}, loss float32{kept}"
        )


#: What stands in place of a master copy, in words.
_WITHOUT_MASTER = {
    "nearest": "none",
    "stochastic": "none (stochastic rounding)",
    "compensated": "none (Kahan compensation, int16)",
}

#: The mode with which others are compared: FP32 throughout.
FP32 = Policy(name="fp32", parameters="float32", compute="float32", autocast=False, master_weights=False)
