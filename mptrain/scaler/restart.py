"""Conversion of a loss scaler's saved state when a run is resumed, possibly with another rule or other constants.

This is no scaling rule: it does not know what a state means. It reads values on the host, once, when a run is resumed.
"""

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
    """Return the state of a loss scaler for a resumed run: the saved state, clamped to the present rule's limits.

    Args:
        saved: The state in a checkpoint, possibly of another rule or of other constants.
        own: The first state of the present rule, which determines names and dtypes.
        limits: Lowest and highest value by tensor name; a tensor without an entry may have any value.
        device: The training device of the resumed run.

    Returns:
        The state: bit for bit the saved one where that fits, or ``own`` if another rule saved it (its tensors have
        other names). And one sentence for the user about each difference.
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
