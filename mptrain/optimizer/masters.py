"""FP32 master weights: the tensors that updates change, and the half-precision parameters that receive their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.numerics.formats import FLOAT16
from mptrain.numerics.rounding import round_compensated, round_stochastically, rounding_key, with_compensation
from mptrain.numerics.tensors import as_part_of, first_element, memory_order, part, part_for
from mptrain.system.device import capabilities
from mptrain.system.errors import CheckpointError, ConfigError
from mptrain.system.torch_private import foreach_clamp_max_, foreach_clamp_min_, foreach_copy_

#: The largest finite number of FP16.
FLOAT16_MAX = FLOAT16.max

#: Updates between two comparisons of parameters with master weights, for changes that no version counter shows.
LOOK_EVERY = 32


class Rounding(NamedTuple):
    """Rounding of updated half-precision parameters without master weights, as `precision.policy.Policy` says.

    ``seed`` chooses the random bits of stochastic rounding.
    """

    kind: Literal["nearest", "stochastic", "compensated"] = "nearest"
    seed: int = 0


class MasterWeights:
    """Working tensors of P parameters, which the update rule changes; with sharded parameters, this rank's shards.

        FP32 parameter                      the parameter itself
        half parameter, master weights      a permanent FP32 copy (Micikevicius et al. 2018, section 3.1)
        half parameter, no master weights   a temporary FP32 copy, read from the parameter before each update, so that
                                            rounding to half precision loses digits in every update, or none on
                                            average (stochastic), or none at all (compensated)
        parameter with gaps in memory       an FP32 copy without gaps, copied back after each update
        half parameter, state in half too   the parameter itself

    ``keep`` makes FP32 copies of half-precision parameters permanent. They start from ``initial``, the FP32 values that
    the parameters were cast from, by name. ``rounding`` says how the temporary ones are rounded (`Rounding`).

    Attributes:
        keep: FP32 copies of half-precision parameters are permanent: master weights.
        rounding: That of updated half-precision parameters without them.
        parts: This rank's shards of the parameters, or the parameters themselves if they are not sharded.
        work: The working tensors, some of which are in ``parts``.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        keep: bool,
        state_in_half: bool,
        initial: Mapping[str, Tensor],
        rounding: Rounding | None = None,
    ) -> None:
        self._names, self._params = tuple(names), list(params)
        self.keep = keep
        self.parts = [part(p) for p in params]
        # A parameter with gaps in memory gets a working copy without gaps: torch's fused kernels would write into them.
        in_place = [
            (own.dtype == torch.float32 or state_in_half) and (own.is_contiguous() or memory_order(own) is not None)
            for own in self.parts
        ]
        self.work = [
            own if same else _wide_copy(own, part_for(initial.get(name, p), p))
            for name, p, own, same in zip(names, params, self.parts, in_place, strict=True)
        ]
        # Computed once because every step uses them: parameters that have a working copy, and FP16 ones to clamp.
        self._copied = [own for own, same in zip(self.parts, in_place, strict=True) if not same]
        self._wide = [work for work, same in zip(self.work, in_place, strict=True) if not same]
        self._fp16 = [own for own in self.parts if own.dtype == torch.float16]  # with those updated in place
        self.rounding = rounding or Rounding()
        # By index. FP32 parameters with gaps are copied as ever.
        copied = [index for index, same in enumerate(in_place) if not same]
        special = self.rounding.kind != "nearest" and not keep
        self._not_nearest = [index for index in copied if special and self.parts[index].dtype == torch.bfloat16]
        self._nearest = [index for index in copied if index not in set(self._not_nearest)]
        kept = self._not_nearest if self.rounding.kind == "compensated" else []
        self._compensation = {index: torch.zeros_like(self.parts[index], dtype=torch.int16) for index in kept}
        if kept:
            self.copy_to_params()  # what rounding has taken from the initial values
        self._versions: list[int] = []
        self._followed: set[int] = set()  # indices into _copied
        self._updates = 0
        self._host = capabilities(self.parts[0].device).host
        self._unseen: list[tuple[int, Tensor]] = []

    def rounded_into(self) -> list[Tensor | None]:
        """Return for each working tensor the parameter that receives its rounded value; None if it is the parameter."""
        return [None if work is own else own for work, own in zip(self.work, self.parts, strict=True)]

    def follow(self, parameter: Tensor) -> None:
        """Compare a parameter with its permanent master weights in every step, because passes change it."""
        self._followed |= {index for index, own in enumerate(self._copied) if own is parameter}

    def mark(self) -> None:
        """Note the version counters of the half-precision parameters, before the passes of a step."""
        self._versions = [own._version for own in self._copied]

    def touched(self) -> set[int]:
        """Return the indices of the half-precision parameters that were changed in place since `mark`."""
        now = [own._version for own in self._copied]
        if now == self._versions:
            return set()
        return {index for index, (own, version) in enumerate(zip(now, self._versions, strict=True)) if own != version}

    @torch.no_grad()
    def take_changes(self, applied: Tensor) -> None:
        """Write changes that passes made to half-precision parameters into their permanent master weights.

        Each master weight becomes the changed value plus what rounding had taken from the master weight, if the sum
        still rounds to the changed value. So small updates are not lost where a module changes a weight in every pass.
        Nothing is written unless the step's update is applied (bool, shape (1,)). On a CPU it raises as `require_seen`.
        """
        if not self.keep or not self._copied:
            return
        changed = self._followed | self.touched()
        for index in changed:
            own, wide = self._copied[index], self._wide[index]
            rounded = _rounded(wide, own)
            value = own.float()
            kept = value + (wide - rounded.float())
            kept = torch.where(_rounded(kept, own) == own, kept, value)
            wide.copy_(torch.where((own != rounded) & applied.view(()), kept, wide))
        self._updates += 1
        if self._updates % LOOK_EVERY == 1:
            for index in set(range(len(self._copied))) - changed:
                own = self._copied[index]
                rounded = _rounded(self._wide[index], own)
                if not (self._host and torch.equal(own, rounded)):
                    self._unseen.append((index, ((own != rounded) & (own == own)).any()))
            if self._host:
                self.require_seen()

    def require_seen(self) -> None:
        """Raise ConfigError if `take_changes` found changes that no version counter shows; reads the device.

        Passes made them through ``.data`` in some steps, but not in the rehearsal.
        """
        unseen, self._unseen = self._unseen, []
        for index, changed in unseen:
            if changed:
                raise self.lost_change(index, "through .data in some steps")

    def lost_change(self, index: int, how: str) -> ConfigError:
        """Return an error about a half-precision parameter that was changed where its master weight cannot follow."""
        names = [name for name, own in zip(self._names, self.rounded_into(), strict=True) if own is not None]
        return ConfigError(
            f"the parameter {names[index]} was changed {how}, and the FP32 copy that the optimizer"
            " updates does not have the change",
            "change it in place under torch.no_grad(), in a forward pass or a hook of a module, or choose a precision "
            "whose parameters are FP32, such as amp_bf16",
        )

    def copy_from_params(self) -> None:
        """Copy the parameters to their temporary FP32 copies before an update; permanent master weights stay."""
        if self._copied and not self.keep:
            foreach_copy_(self._wide, [parameter.detach() for parameter in self._copied])
            for index, kept in self._compensation.items():
                self.work[index].copy_(with_compensation(self.parts[index], kept))

    def copy_to_params(self, step: Tensor | None = None) -> None:
        """Round the working tensors to their half-precision parameters after an update; FP16 saturates at 65504.

        ``step`` is the number of the update, float32 of shape (1,), of which random bits are a function; without it
        values are rounded to nearest, as those of a checkpoint.
        """
        if not self._copied and not self._fp16:
            return
        with torch.no_grad():
            if self._nearest:
                foreach_copy_([self.parts[i] for i in self._nearest], [self.work[i] for i in self._nearest])
            for index in self._not_nearest:
                own, wide = self.parts[index], self.work[index]
                if self._compensation:
                    round_compensated(wide, own, self._compensation[index])
                elif step is None:
                    own.copy_(wide)
                else:
                    key = rounding_key(self.rounding.seed, step, index)
                    round_stochastically(wide, own, key, first_element(self._params[index]))
            if self._fp16:
                foreach_clamp_max_(self._fp16, FLOAT16_MAX)
                foreach_clamp_min_(self._fp16, -FLOAT16_MAX)

    def full_precision(self) -> dict[str, Tensor]:
        """Return the most precise copy of each parameter by name: its FP32 master weight, or else the parameter itself.

        The tensors are detached but not copied; sharded parameters give sharded tensors. Compensated parameters give
        new FP32 tensors, with what rounding took from them.
        """
        best = list(self.work if self.keep else self.parts)
        for index, kept in self._compensation.items():
            best[index] = with_compensation(self.parts[index], kept)
        return {
            name: as_part_of(kept.detach(), p) for name, p, kept in zip(self._names, self._params, best, strict=True)
        }

    def load_full_precision(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters and master copies from tensors of any dtype, whole or sharded.

        Raises CheckpointError if a parameter is missing or has another shape.
        """
        wrong = [
            f"{name} is {'missing' if name not in values else f'{tuple(values[name].shape)}, not {tuple(p.shape)}'}"
            for name, p in zip(self._names, self._params, strict=True)
            if name not in values or values[name].shape != p.shape
        ]
        if wrong:
            raise CheckpointError(
                f"the saved weights do not fit the model: {'; '.join(wrong[:5])}",
                "resume with the model that the checkpoint was saved from",
            )
        with torch.no_grad():
            for name, p, work in zip(self._names, self._params, self.work, strict=True):
                work.copy_(part_for(values[name], p))
        self.copy_to_params()

    def working(self) -> dict[str, Tensor]:
        """Return the tensors that the rule updates, by name: after an update, the new weights before rounding."""
        return {name: work.detach() for name, work in zip(self._names, self.work, strict=True)}

    @property
    def compensation_bytes(self) -> int:
        """Bytes in which compensated parameters keep what rounding took from them."""
        return sum(kept.nbytes for kept in self._compensation.values())

    def stored(self) -> dict[str, Tensor]:
        """Return by name the half-precision parameters that hold all there is of a weight between updates."""
        lossy = () if self.keep else set(self._nearest + self._not_nearest) - self._compensation.keys()
        return {self._names[i]: self.parts[i].detach() for i in lossy if self.parts[i].dtype.itemsize < 4}

    def in_place_half(self) -> list[str]:
        """Return the names of the half-precision parameters that the rule updates in place, in their own dtype."""
        return [name for name, work in zip(self._names, self.work, strict=True) if work.dtype != torch.float32]


def _rounded(wide: Tensor, half: Tensor) -> Tensor:
    rounded = wide.to(half.dtype)
    return rounded.clamp_(-FLOAT16_MAX, FLOAT16_MAX) if half.dtype == torch.float16 else rounded


def _wide_copy(parameter: Tensor, value: Tensor) -> Tensor:
    """Return an FP32 copy with the strides of its parameter; with others, multi-tensor kernels are slow or fail."""
    return torch.empty_like(parameter, dtype=torch.float32).copy_(value.detach())
