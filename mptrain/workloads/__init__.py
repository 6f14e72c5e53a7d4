"""Workloads, a folder each, with its data, models, task and metrics.

A workload imports none of the others; what several share is in `base`, `images`, `sound` and `text`.
"""
