"""Detection data sets."""
