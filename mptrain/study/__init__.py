"""Sweeps, comparisons and recipes: runs that are planned, judged and reproduced together."""
