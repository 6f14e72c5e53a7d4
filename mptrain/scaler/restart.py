"""Takes up a saved scaler state under the constants in force now, and says what of it does not fit them.

Not a rule: what a state means is known to the rules alone. This reads values on the host, once, after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mptrain.scaler.base import ScalerState

#: The least and the greatest value of a state tensor; None where there is no such limit.
Limits = tuple[float | None, float | None]


def take_up(
    saved: ScalerState, own: ScalerState, limits: Mapping[str, Limits], device: torch.device
) -> tuple[ScalerState, list[str]]:
    """The saved state, brought within limits.

    Args:
        saved: The state in a checkpoint, perhaps of another rule or of other constants.
        own: The first state of the rule in force, which decides on names and dtypes.
        limits: By name; a tensor that is not named may have any value.
        device: Where to go on.

    Returns:
        The state, bit for bit the saved one where that fits; ``own`` where another rule saved it. And a sentence for
        each difference.
    """
    if own.keys() != saved.keys():
        scale = float(own["scale"])
        return own, [f"the checkpoint's scaler was another one: the loss scale starts afresh at {scale:g}"]
    state = {key: saved[key].to(own[key].dtype).to(device) for key in own}
    for key, (low, high) in limits.items():
        if low is not None:
            state[key] = state[key].clamp(min=low)
        if high is not None:
            state[key] = state[key].clamp(max=high)
    notes = [
        f"the scaler's {key} goes on at {float(state[key]):g}; it was {float(saved[key]):g} in the checkpoint"
        for key in state
        if float(state[key]) != float(saved[key])
    ]
    return state, notes
