"""Sweeps and comparisons of many runs: expansion to points, and execution in processes or Slurm jobs."""
