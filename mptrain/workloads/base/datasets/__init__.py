"""Data sets of no workload of their own."""
