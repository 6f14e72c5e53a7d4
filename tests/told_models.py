"""A network that answers what it was told, whatever it sees, for tests of losses and metrics."""

from __future__ import annotations

from torch import nn


class Says(nn.Module):
    """Answers with an output; ``given`` is what the last call gave it by name."""

    def __init__(self, output):
        super().__init__()
        self.output, self.given = output, None

    def forward(self, inputs, **more):
        self.given = more
        return self.output
