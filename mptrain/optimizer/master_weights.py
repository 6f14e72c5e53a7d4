"""Master weights, which the optimizer moves in place of half-precision parameters: FP32 copies of them.

FP32 parameter                      the parameter itself
half parameter, master weights      an FP32 copy that lives on (Micikevicius et al. 2018, section 3.1)
half parameter, no master weights   an FP32 scratch copy, read from the parameter before each update: what the
rounding to half precision loses, is lost
half parameter, state in half too   the parameter itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mptrain.errors import CheckpointError
from mptrain.numerics.formats import FLOAT16
from mptrain.numerics.shards import as_part_of, part, part_for
from mptrain.numerics.verdict import memory_order


class MasterWeights:
    """The working tensors of P parameters; where ranks hold parts of them, this rank's parts.

    Args:
        names: Of the parameters.
        params: The parameters.
        keep: The FP32 copies of half parameters live on.
        state_in_half: Half parameters are their own working tensors.
        initial: FP32 values that the parameters were cast from, by name; the copies start there, so that nothing of the
            initial draw is lost.

    Attributes:
        parts: This rank's parts of the parameters: the parameters themselves where they are whole.
        work: The working tensors, some of them ``parts``.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        keep: bool,
        state_in_half: bool,
        initial: Mapping[str, Tensor],
    ) -> None:
        self._names, self._params = tuple(names), list(params)
        self._keep = keep
        self.parts = [part(p) for p in params]
        # What has gaps in memory gets a working copy without them: torch's fused kernels would write past its elements.
        in_place = [
            (own.dtype == torch.float32 or state_in_half) and (own.is_contiguous() or memory_order(own) is not None)
            for own in self.parts
        ]
        self.work = [
            own if same else _wide_copy(own, part_for(initial.get(name, p), p))
            for name, p, own, same in zip(names, params, self.parts, in_place, strict=True)
        ]
        # Fixed for good, since every step needs them: what is rounded to what, and what may not become infinite.
        self._half = [own for own, same in zip(self.parts, in_place, strict=True) if not same]
        self._wide = [work for work, same in zip(self.work, in_place, strict=True) if not same]
        self._fp16 = [own for own in self.parts if own.dtype == torch.float16]  # those updated in place as well

    def rounded_into(self) -> list[Tensor | None]:
        """Return for each working tensor the parameter that gets its rounded value; None where it is the parameter."""
        return [None if work is own else own for work, own in zip(self.work, self.parts, strict=True)]

    def copy_from_params(self) -> None:
        """Read the parameters, where no copies of them live on."""
        if self._half and not self._keep:
            torch._foreach_copy_(self._wide, [parameter.detach() for parameter in self._half])

    def copy_to_params(self) -> None:
        """Round the working copies to half precision; FP16 saturates at 65504 instead of becoming inf."""
        with torch.no_grad():
            if self._half:
                torch._foreach_copy_(self._half, self._wide)
            if self._fp16:
                torch._foreach_clamp_max_(self._fp16, FLOAT16_MAX)
                torch._foreach_clamp_min_(self._fp16, -FLOAT16_MAX)

    def full_precision(self) -> dict[str, Tensor]:
        """Return the best copy of each parameter by name: the master where there is one, else the parameter."""
        best = self.work if self._keep else self.parts
        return {
            name: as_part_of((work if work is own else kept).detach(), p)
            for name, p, own, work, kept in zip(self._names, self._params, self.parts, self.work, best, strict=True)
        }

    def load_full_precision(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters and master copies from `full_precision`'s values, whatever their dtype.

        Raises:
            CheckpointError: A parameter is missing or has another shape.
        """
        wrong = [
            f"{name} is {'missing' if name not in values else f'{tuple(values[name].shape)}, not {tuple(p.shape)}'}"
            for name, p in zip(self._names, self._params, strict=True)
            if name not in values or values[name].shape != p.shape
        ]
        if wrong:
            raise CheckpointError(
                f"the saved weights do not fit the model: {'; '.join(wrong[:5])}",
                "resume with the model it was saved from",
            )
        with torch.no_grad():
            for name, p, work in zip(self._names, self._params, self.work, strict=True):
                work.copy_(part_for(values[name], p))
        self.copy_to_params()

    def working(self) -> dict[str, Tensor]:
        """Return what the rule has moved last, by name: after an update the new weights before they were rounded."""
        return {name: work.detach() for name, work in zip(self._names, self.work, strict=True)}

    def in_place_half(self) -> list[str]:
        """Return the names of the half-precision parameters that the rule moves as they are, in their own dtype."""
        return [name for name, work in zip(self._names, self.work, strict=True) if work.dtype != torch.float32]


#: The largest finite number of FP16.
FLOAT16_MAX = FLOAT16.max


def _wide_copy(parameter: Tensor, value: Tensor) -> Tensor:
    """Return an FP32 copy of a value in the memory layout of the parameter it belongs to.

    Gradients have the parameter's layout too, and torch's kernels for lists of tensors are fast, or on CUDA willing at
    all, only where corresponding tensors have equal strides.
    """
    return torch.empty_like(parameter, dtype=torch.float32).copy_(value.detach())
