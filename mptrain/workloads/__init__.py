"""Workloads: the kinds of training that mptrain knows, such as image classification, GANs or translation.

Each has a folder of data sets, models, a task (losses and metrics) and helpers, and must not import another workload.
Shared code is in `base`, `images`, `sound` and `text`.
"""
