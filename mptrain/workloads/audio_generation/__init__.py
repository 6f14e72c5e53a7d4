"""Generation of raw audio."""
