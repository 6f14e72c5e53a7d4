"""A text as samples: windows of equally many tokens, each with the window one token further on as its targets.

Windows either stand for themselves or continue one another: then the batches of an epoch go through the text in
*lanes*, and a network that carries state reads on where the batch before left off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mptrain.errors import ConfigError, Problem
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.random_streams import sample_order

#: The shortest window, in tokens, that a hint proposes for a text that is too short.
_SHORTEST = 8


class TextSplit:
    """Windows of one text. Window i has the tokens from ``i * sequence_length`` on, and one more to predict.

    With ``lanes`` B > 0, the W windows are laid out for batches of B: lane l of B holds the windows ``l * steps`` to
    ``(l + 1) * steps - 1`` where ``steps = W // B``; batch b has the b-th window of each lane; the W - B * steps
    windows that are left over make up the last, short batch, and begin anew each. In a split of fewer windows than twice
    the lanes, as a short validation text is, nothing is carried at all.

    Args:
        name: What to call it in messages, such as ``python_docs train``.
        numbers: Token numbers, int32 ``[L]``.
        sequence_length: Tokens of a window, T.
        lanes: The batch size where windows continue one another; 0 where they stand for themselves.
        limit: Use so many windows only; None uses all.
        faults: What was wrong with the text.
        shares: The option that made the text as long as it is, for messages; empty where it has a file of its own.

    Raises:
        ConfigError: The text is shorter than one window, or has fewer windows than ``limit``.
    """

    in_memory = True

    def __init__(
        self,
        name: str,
        numbers: Tensor,
        sequence_length: int,
        *,
        lanes: int = 0,
        limit: int | None = None,
        faults: Faults | None = None,
        shares: str = "",
    ) -> None:
        windows = max(0, len(numbers) - 1) // sequence_length
        if windows == 0:
            longest = len(numbers) - 1
            shorter = (
                f"write dataset.sequence_length={longest} or less"
                if longest >= min(_SHORTEST, sequence_length // 2)
                else ""
            )
            hint = shorter or "choose a longer text: so few tokens teach nothing"
            raise ConfigError(
                Problem(
                    f"{name} has {len(numbers)} tokens; a window of dataset.sequence_length={sequence_length} takes "
                    f"{sequence_length + 1}",
                    f"{hint}, or change {shares} (0 for no such part)" if shares else hint,
                )
            )
        if limit is not None and limit > windows:
            raise ConfigError(
                f"dataset.train_samples={limit}, but {name} has {windows} windows of {sequence_length} tokens",
                f"choose at most {windows}, or null for all",
            )
        self.faults = faults or Faults()
        self.numbers = numbers
        self.sequence_length = sequence_length
        self.lanes = lanes
        self._windows = windows if limit is None else limit

    def __len__(self) -> int:
        return self._windows

    @property
    def skipped(self) -> int:
        """How many pieces of text were left out because they could not be read."""
        return len(self.faults.found)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Indices of one epoch; along the lanes, whatever the other arguments say, where there are any."""
        if not self.lanes:
            return sample_order(len(self), seed, epoch, shuffle=shuffle)
        whole = self._steps * self.lanes
        along = torch.arange(whole).view(self.lanes, self._steps).t().flatten()
        return torch.cat([along, torch.arange(whole, len(self))])

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The windows with these indices.

        Returns:
            ``inputs`` and ``targets`` int64 ``[N, T]``, T terms a sample. With lanes also ``lane``, int64 ``[N]``: the
            row of the carried state that belongs to a window, and ``fresh``, bool ``[N]``: nothing precedes it.

        Raises:
            ConfigError: There are more samples than lanes, so that some would share a row.
        """
        if self.lanes and len(indices) > self.lanes:
            raise ConfigError(
                f"a batch of {len(indices)} samples does not fit the {self.lanes} lanes of dataset.batch_size={self.lanes}",
                "leave dataset.batch_size out: it follows train.batch_size",
            )
        picked = torch.as_tensor(indices, dtype=torch.int64)
        places = picked[:, None] * self.sequence_length + torch.arange(self.sequence_length + 1)
        rows = self.numbers[places].long()
        counts = (self.sequence_length,) * len(picked)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), counts, self._places(picked))

    def _places(self, picked: Tensor) -> dict[str, Tensor]:
        if not self.lanes:
            return {}
        steps, whole = max(1, self._steps), self._steps * self.lanes
        left_over = picked >= whole
        lane = torch.where(left_over, picked - whole, picked // steps)
        return {"lane": lane, "fresh": left_over | (picked % steps == 0)}

    @property
    def _steps(self) -> int:
        return len(self) // self.lanes
