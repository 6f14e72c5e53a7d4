"""Image data sets, in memory or in folders."""
