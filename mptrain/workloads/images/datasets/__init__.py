"""Image data sets: in memory, and in folders."""
