"""Examination of ``mptrain diagnose``: a failed training step, its causes, and the remedies tried on it."""
