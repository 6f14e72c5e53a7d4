"""Comparison of runs: reads run directories, aligns the runs, and gives a verdict on each arm.

Reads records only. Trains nothing, prints nothing, and never imports torch.
"""
