"""Arithmetic of number formats and gradients: overflow checks, norms and histograms. No policy, no state."""
