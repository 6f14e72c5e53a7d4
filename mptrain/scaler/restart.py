"""Conversion of a loss scaler's saved state, on the host, for a resumed run with possibly another rule or constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mptrain.scaler.base import ScalerState

#: The lowest and the highest value of a state tensor; None means no limit.
Limits = tuple[float | None, float | None]


def take_up(
    saved: ScalerState, own: ScalerState, limits: Mapping[str, Limits], device: torch.device
) -> tuple[ScalerState, list[str]]:
    """Return the state of a loss scaler for a resumed run, and a sentence for the user about each difference.

    ``own`` is the first state of the present rule, which determines names and dtypes. The saved state is kept bit for
    bit within the limits (lowest and highest value by tensor name); if another rule saved it (its tensors have other
    names), ``own`` is returned.
    """
    if own.keys() != saved.keys():
        scale = float(own["scale"])
        return own, [f"the checkpoint was saved with another scaler: the loss scale starts again at {scale:g}"]
    state = {key: saved[key].to(own[key].dtype).to(device) for key in own}
    for key, (low, high) in limits.items():
        if low is not None:
            state[key] = state[key].clamp(min=low)
        if high is not None:
            state[key] = state[key].clamp(max=high)
    notes = [
        f"the scaler's {key} continues at {float(state[key]):g}; it was {float(saved[key]):g} in the checkpoint"
        for key in state
        if float(state[key]) != float(saved[key])
    ]
    return state, notes
