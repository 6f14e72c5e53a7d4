"""Generation of raw sound."""
