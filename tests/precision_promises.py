"""Which dtypes each precision mode promises, for tests that read them from running modules."""

from __future__ import annotations

import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

#: mode: dtype of the parameters of products, of the operands of products, of the parameters of norms
PROMISED = {
    "fp32": (F32, F32, F32),
    "amp_static": (F32, F16, F32),
    "amp_dynamic": (F32, F16, F32),
    "amp_bf16": (F32, BF16, F32),
    "fp16_static": (F16, F16, F32),
    "fp16_dynamic": (F16, F16, F32),
    "fp16_noscale": (F16, F16, F32),
    "fp16_pure": (F16, F16, F16),
    "bf16": (BF16, BF16, F32),
    "bf16_pure": (BF16, BF16, BF16),
    "bf16_stochastic": (BF16, BF16, BF16),
    "bf16_kahan": (BF16, BF16, BF16),
    "fp8_current_emulated": (F32, F32, F32),
    "mxfp8_emulated": (F32, F32, F32),
    "nvfp4_emulated": (F32, F32, F32),
}
