"""Workloads: one folder each, with its data, models, task and metrics.

A workload must not import another workload. Shared code is in `base`, `images`, `sound` and `text`.
"""
