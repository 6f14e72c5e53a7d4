"""Sweeps and comparisons of many training runs: expansion to points (single runs), execution in processes or Slurm."""
