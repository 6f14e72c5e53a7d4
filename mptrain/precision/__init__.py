"""Which dtype each tensor of a training step has: the policy, how it is applied, how it is checked."""
