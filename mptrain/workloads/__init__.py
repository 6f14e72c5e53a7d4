"""Workloads: the kinds of training that mptrain knows, such as image classification, GANs or translation.

Each workload has one folder with its data sets, models, task (losses and metrics) and helpers. A workload must not
import another workload. Shared code is in `base`, `images`, `sound` and `text`.
"""
