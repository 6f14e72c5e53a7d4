"""Arithmetic of number formats and of verdicts: what is finite, how large a gradient is. No policy, no state."""
