"""What is trained on what: a folder a workload, with its data, models, task and metrics.

A workload imports none of the others; what several share is in `base`, `images`, `sound` and `text`.
"""
